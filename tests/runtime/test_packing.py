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

from specctl.errors import InvariantError, ModelConfigError
from specctl.runtime import attention, cached_model
from specctl.runtime.attention import packed_attention
from specctl.runtime.cache import SlotCache
from specctl.runtime.cached_model import CachedModel
from specctl.runtime.packing import Packing, packing_of, pays
from specctl.tree import ancestor_mask
from tests.runtime.families import FAMILIES
from tests.runtime.packed import OFFSETS, SIZES, largest_error, packed_pass, trees
from tests.runtime.toy import toy_model


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
