"""Passes without a dense mask: the cascade on the CPU, with the kernel's torch twin.

The references are those of the dense passes: each node's path alone, uncached, with transformers'
own attention; and the text of the loop as it runs today.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specctl.errors import InvariantError
from specctl.policy import Policy, StaticTree
from specctl.runtime import attention, cached_model, cascade
from specctl.runtime.cached_model import CachedModel
from specctl.runtime.cascade import Cascade, cascade_attention, cascade_of
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.drafter import SmallModelDrafter
from specctl.runtime.load import load_pair
from specctl.runtime.packing import layout_of
from tests.runtime.equality import CASES, requests_of, texts_of_case
from tests.runtime.families import FAMILIES
from tests.runtime.packed import largest_error, packed_pass
from tests.runtime.toy import toy_model, toy_requests

Patch = pytest.MonkeyPatch


@pytest.fixture
def cascades(monkeypatch: Patch) -> list[Tensor]:
    """Switches every model to cascades; the keys that attention was given, call by call."""
    seen: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, *rest: object) -> Tensor:
        seen.append(key)
        return cascade_attention(query, key, *rest)

    monkeypatch.setattr(CachedModel, "cascades", True)
    monkeypatch.setattr(attention, "cascade_attention", attend)
    return seen


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_nodes_equal_each_path_alone(name: str, cascades: list[Tensor]) -> None:
    assert largest_error(FAMILIES[name]) < 5e-5
    assert len(cascades) == 2, "one packed pass of two layers"


@pytest.mark.parametrize("batch_size", [1, 3])
def test_padded_rows_and_levels_of_a_draft(batch_size: int, cascades: list[Tensor]) -> None:
    """A small model drafts level by level behind earlier ones; the text is the dense passes'."""

    def texts() -> dict[str, tuple[int, ...]]:
        drafter = SmallModelDrafter(CachedModel(toy_model(0, noise=0.01)))
        policy = Policy(shape=StaticTree(depth=3, top_k=3, num_tokens=8))
        loop = DecodeLoop(
            CachedModel(toy_model(0)),
            drafter,
            policy,
            batch_size=batch_size,
            max_text_tokens=64,
            eos_ids=(),
        )
        return {done.request.request_id: done.token_ids for done in loop.run(requests)}

    requests = toy_requests(3, max_new_tokens=12)
    found = texts()
    assert len(cascades) > 20
    CachedModel.cascades = False  # the fixture's monkeypatch restores it
    assert texts() == found


@pytest.mark.parametrize("name", ["eagle2, 1", "eagle2+survival, 16"])
def test_greedy_text_of_the_embedded_pair(
    name: str, cascades: list[Tensor], monkeypatch: Patch
) -> None:
    pair = load_pair("embedded", "embedded", device="cpu", dtype="float32")
    requests = requests_of(pair)[::13]
    found = texts_of_case(pair, CASES[name], requests, monkeypatch)
    assert len(cascades) > 100
    monkeypatch.setattr(CachedModel, "cascades", False)
    assert texts_of_case(pair, CASES[name], requests, monkeypatch) == found


def test_no_mask_over_the_prefix_is_built(cascades: list[Tensor], monkeypatch: Patch) -> None:
    """But a prompt's: it is read by transformers' kernels, causally."""
    asked: list[int] = []
    dense = cached_model.prefix_mask

    def prompts_only(offsets: list[int], inner: Tensor, *rest: object) -> Tensor:
        asked.append(inner.shape[1])
        return dense(offsets, inner, *rest)

    monkeypatch.setattr(cached_model, "prefix_mask", prompts_only)
    monkeypatch.setattr(cached_model, "packing_of", None)
    packed_pass(CachedModel(toy_model(0)))
    assert cascades
    assert asked == [20] * 6 + [3, 6, 1, 4], "six fillers and four prompts"


def test_left_to_the_device_it_is_off_on_the_cpu(monkeypatch: Patch) -> None:
    assert CachedModel.cascades is None
    monkeypatch.setattr(cached_model, "cascade_of", None)
    packed_pass(CachedModel(toy_model(0)))


MUTANTS: dict[str, Callable[[Cascade], Cascade]] = {
    "another token's bits": lambda c: replace(c, words=c.words.roll(1, 2)),
    "a prefix short by one": lambda c: replace(c, prefixes=c.prefixes - 1),
    "prefixes of other requests": lambda c: replace(c, prefixes=c.prefixes.roll(1)),
    "a tail that all see": lambda c: replace(c, words=torch.full_like(c.words, -1)),
}


@pytest.mark.usefixtures("cascades")
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(
        cached_model, "cascade_of", lambda *given: MUTANTS[name](cascade_of(*given))
    )
    assert largest_error(FAMILIES["llama"]) > 1e-2


def test_a_model_that_drops_its_options_is_refused() -> None:
    module = toy_model(0).model.layers[0].self_attn
    inner = torch.eye(5, dtype=torch.bool)[None]
    words = cascade.cascade_of(layout_of([4], [5], inner.device), inner).words
    queries, keys = torch.zeros(1, 4, 5, 8), torch.zeros(1, 2, 9, 8)
    with pytest.raises(InvariantError, match="'packing' or 'cascade'"):
        attention.tree_attention(module, queries, keys, keys, words)
