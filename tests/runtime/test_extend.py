"""Drafters read what a batch accepted: rows of different lengths, packed, as each row alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specctl.runtime import cached_model, drafter
from specctl.runtime.drafter import Drafter, Eagle3Drafter
from specctl.runtime.packing import pays
from tests.runtime.heads import VOCAB, H, load, write_head
from tests.runtime.toy import toy_pair

COUNTS = [1, 5, 2, 3]
PROMPTS = [7, 3, 12, 5]
Make = Callable[[], Drafter]
Rows = list[tuple[Tensor, Tensor]]
"""Per request the tokens and the target states of its prompt and of what it accepted."""


@pytest.fixture(params=["eagle3", "small"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    if request.param == "small":
        return lambda: toy_pair()[1]
    head = load(write_head(tmp_path / "head"))
    return lambda: Eagle3Drafter(head, (1, 2, 3))


@pytest.fixture
def rows() -> Rows:
    generator = torch.Generator().manual_seed(4)
    return [
        (
            torch.randint(3, VOCAB, (1, prompt + 1 + count), generator=generator),
            torch.randn(1, prompt + count, 3 * H, generator=generator),
        )
        for prompt, count in zip(PROMPTS, COUNTS, strict=True)
    ]


def after_reading(reader: Drafter, rows: Rows, prompts: list[int], counts: list[int]) -> Tensor:
    """`[A, 2, V]`: what is said after the roots, and after a token below them."""
    reader.allocate(len(rows), 64)
    longest = max(counts)
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    features = torch.zeros(len(rows), longest, 3 * H)
    for row, (ids, states) in enumerate(rows):
        read, count = prompts[row] + 1, counts[row]
        reader.prefill(row, ids[:, :read], states[:, : read - 1])
        tokens[row, :count], features[row, :count] = ids[0, read:], states[0, read - 1 :]
    reader.extend(tokens, counts, features)
    root = reader.begin_round(len(rows))
    below = reader.expand(torch.full((len(rows), 1), 9), torch.zeros(len(rows), 1).long())
    return torch.stack([root, below[:, 0]], 1)


@torch.inference_mode()
def test_rows_read_together_as_alone(make: Make, rows: Rows) -> None:
    assert pays(COUNTS)
    together = after_reading(make(), rows, PROMPTS, COUNTS)
    for row, found in enumerate(together):
        alone = after_reading(make(), rows[row : row + 1], [PROMPTS[row]], [COUNTS[row]])
        torch.testing.assert_close(found, alone[0], atol=2e-5, rtol=1e-4)


@torch.inference_mode()
def test_padded_reading_says_the_same(
    make: Make, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = after_reading(make(), rows, PROMPTS, COUNTS)
    for module in (drafter, cached_model):
        monkeypatch.setattr(module, "pays", lambda _: False)
    padded = after_reading(make(), rows, PROMPTS, COUNTS)
    torch.testing.assert_close(packed, padded, atol=2e-5, rtol=1e-4)
