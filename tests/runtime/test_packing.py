"""Ragged verification: every node of a packed pass sees its own path and nothing else.

Four requests stand in the second to the fifth of six slots, with prefixes and trees of different
sizes. The reference for every node is its path, run alone and uncached with transformers' own
attention; the same comparison has to see each bug that is put in on purpose.

    row 0: root          row 1: 0─┬─1─┬─3─6      row 2: 0─┬─1      row 3: 0─1─2─3─4
                                  │   └─4                 └─2
                                  └─2───5
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from specctl.errors import InvariantError, ModelConfigError
from specctl.runtime import attention, cached_model
from specctl.runtime.attention import packed_attention
from specctl.runtime.cache import SlotCache
from specctl.runtime.cached_model import CachedModel
from specctl.runtime.packing import Packing, packing_of, pays
from specctl.tree import PAD, ancestor_mask
from tests.runtime.test_models import FAMILIES
from tests.runtime.toy import toy_model

FIRST = 1
PREFIXES = [[5, 9, 2], [7, 30, 11, 8, 6, 6], [12], [21, 22, 23, 24]]
PARENTS = [[-1], [-1, 0, 0, 1, 1, 2, 3], [-1, 0, 0], [-1, 0, 1, 2, 3]]
PATHS = [[0], [0, 1, 3, 6], [0, 2], [0, 1, 2]]
SIZES = [len(parents) for parents in PARENTS]
OFFSETS = [len(prefix) for prefix in PREFIXES]


def token(row: int, node: int) -> int:
    return 40 + 10 * row + node


def path_to(row: int, node: int) -> list[int]:
    return [] if node < 0 else [*path_to(row, PARENTS[row][node]), token(row, node)]


def trees() -> tuple[Tensor, Tensor, Tensor]:
    """`[4, 7]` tokens, parents and depths; padding as the round pads."""
    shape = len(SIZES), max(SIZES)
    tokens, parent = torch.zeros(shape, dtype=torch.int64), torch.full(shape, PAD)
    depth = torch.zeros(shape, dtype=torch.int64)
    for row, parents in enumerate(PARENTS):
        for node, above in enumerate(parents):
            tokens[row, node], parent[row, node] = token(row, node), above
            depth[row, node] = len(path_to(row, node)) - 1
    return tokens, parent, depth


def packed_pass(cached: CachedModel) -> Tensor:
    """Prompts read one by one, then all trees in one pass: logits `[4, 7, V]`."""
    cached.allocate(6, 24)
    for slot in range(6):  # what stands in other slots must not matter, and stays
        cached.extend(slot, 0, torch.full((1, 20), 90))
    for row, prefix in enumerate(PREFIXES):
        cached.extend(FIRST + row, 0, torch.tensor([prefix]))
    tokens, parent, depth = trees()
    positions, mask = torch.tensor(OFFSETS)[:, None] + depth, ancestor_mask(parent, 4)
    return cached.forward(FIRST, OFFSETS, tokens, positions, mask, sizes=SIZES).logits


def largest_error(config: PreTrainedConfig) -> float:
    """Over all nodes, and over the token after each accepted path once it is compacted."""
    cached, reference = CachedModel(toy_model(0, config)), toy_model(0, config)
    reference.set_attn_implementation("eager")

    def alone(text: list[int]) -> Tensor:
        return reference(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]

    errors = []
    with torch.inference_mode():
        logits = packed_pass(cached)
        for row, size in enumerate(SIZES):
            for node in range(size):
                expected = alone(PREFIXES[row] + path_to(row, node))
                errors.append((logits[row, node] - expected).abs().max())
            assert not logits[row, size:].any(), "0 behind a row's own nodes"
        longest = max(len(path) for path in PATHS)
        paths = torch.tensor([path + [-1] * (longest - len(path)) for path in PATHS])
        cached.cache.commit(FIRST, torch.tensor(OFFSETS), paths)
        for row, path in enumerate(PATHS):
            text = PREFIXES[row] + [token(row, node) for node in path] + [77]
            after = cached.extend(FIRST + row, len(text) - 1, torch.tensor([[77]])).logits[0, -1]
            errors.append((after - alone(text)).abs().max())
    return float(max(errors))


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_nodes_equal_each_path_alone(name: str) -> None:
    assert pays(SIZES)
    assert largest_error(FAMILIES[name]) < 5e-5


Patch = pytest.MonkeyPatch
MUTANTS: dict[str, Callable[[Patch], None]] = {}


def mutant(install: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTANTS[install.__name__] = install
    return install


def patch_layout(patch: Patch, change: Callable[[Packing], Packing]) -> None:
    patch.setattr(cached_model, "packing_of", lambda *given: change(packing_of(*given)))


@mutant
def rows_shifted_by_one_token(patch: Patch) -> None:
    unpack = Packing.unpack
    patch.setattr(Packing, "unpack", lambda self, x, n: unpack(self, x.roll(1, 1), n))


@mutant
def mask_of_another_request(patch: Patch) -> None:
    patch_layout(
        patch, lambda p: packing_of(p.prefixes, SIZES, ancestor_mask(trees()[1], 4).roll(1, 0))
    )


@mutant
def prefix_of_another_request(patch: Patch) -> None:
    def swapped(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
        return packed_attention(query, key.roll(1, 0), value.roll(1, 0), *rest)

    patch.setattr(attention, "packed_attention", swapped)


@mutant
def positions_that_run_on(patch: Patch) -> None:
    """As though the packed axis were one text."""
    pack = Packing.pack

    def packed(self: Packing, values: Tensor) -> Tensor:
        found = pack(self, values)
        is_positions = values.dtype == torch.int64 and int(values.max()) < 20
        return torch.arange(found.shape[1])[None] if is_positions else found

    patch.setattr(Packing, "pack", packed)


@mutant
def prefix_cut_to_the_shortest(patch: Patch) -> None:
    patch_layout(
        patch,
        lambda p: replace(
            p,
            stretches=[
                s._replace(mask=s.mask & (torch.arange(s.width) >= offset - min(OFFSETS)))
                for s, offset in zip(p.stretches, OFFSETS, strict=True)
            ],
        ),
    )


@mutant
def written_to_the_slot_above(patch: Patch) -> None:
    patch_layout(patch, lambda p: replace(p, row=(p.row + 1) % len(SIZES)))


@mutant
def written_one_entry_late(patch: Patch) -> None:
    patch_layout(patch, lambda p: replace(p, place=p.place + 1))


@mutant
def slots_counted_from_the_first(patch: Patch) -> None:
    stage = SlotCache.stage_packed
    patch.setattr(SlotCache, "stage_packed", lambda self, _, packing: stage(self, 0, packing))


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])  # rotary and learned positions
def test_mutant_is_killed(name: str, family: str, monkeypatch: Patch) -> None:
    MUTANTS[name](monkeypatch)
    assert largest_error(FAMILIES[family]) > 1e-2


def test_padding_is_left_out_where_that_saves_a_fifth() -> None:
    assert not pays([7])
    assert not pays([4, 4, 4, 4])
    assert not pays([24, 24, 20, 24])
    assert pays([5, 5, 4, 4, 4, 3])  # 30 for 25
    assert not pays([5, 5, 4, 4, 4, 4])  # 30 for 26
    assert pays([48, 4, 4, 4])


def test_packed_and_padded_agree(monkeypatch: Patch) -> None:
    with torch.inference_mode():
        packed = packed_pass(CachedModel(toy_model(0)))
        monkeypatch.setattr(cached_model, "pays", lambda _: False)
        padded = packed_pass(CachedModel(toy_model(0)))
    own = torch.arange(max(SIZES)) < torch.tensor(SIZES)[:, None]
    torch.testing.assert_close(packed[own], padded[own], atol=2e-5, rtol=1e-4)


def test_a_model_that_drops_its_options_is_refused() -> None:
    module = toy_model(0).model.layers[0].self_attn
    queries, keys = torch.zeros(1, 4, 5, 8), torch.zeros(2, 2, 9, 8)
    mask = torch.ones(1, 1, 5, 9, dtype=torch.bool)
    with pytest.raises(InvariantError, match="option 'packing'"):
        attention.tree_attention(module, queries, keys, keys, mask)


def test_a_row_beyond_its_slot_is_refused() -> None:
    cache = SlotCache(1, 2, 8)
    inner = torch.ones(1, 4, 4, dtype=torch.bool)
    cache.stage_packed(0, packing_of([4, 5], [4, 3], inner))
    with pytest.raises(ModelConfigError, match="at most 8 tokens a request"):
        cache.stage_packed(0, packing_of([4, 6], [4, 3], inner))
