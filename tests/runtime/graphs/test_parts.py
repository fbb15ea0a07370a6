"""The pieces of a captured round against loops and against the ordinary loop's own functions."""

from __future__ import annotations

import pytest
import torch

from specctl.noise import signed_seed
from specctl.policy import Chain, EntropyBins, StaticTree, build_shape
from specctl.runtime.graphs.drafting import (
    MAX_BEST,
    MAX_CANDIDATES,
    MAX_SLOTS,
    MAX_TOKENS,
    geometry_of,
    too_large,
)
from specctl.runtime.graphs.laws import law_of, mode_of, tokens_of
from specctl.runtime.graphs.places import Constants
from specctl.runtime.graphs.state import SlotFacts, SlotState
from specctl.runtime.growth import pool_capacity
from specctl.runtime.observe import Sampling
from specctl.runtime.sampling import draw, warp_logits

SAMPLINGS = [
    Sampling(),
    Sampling(0.7, seed=2**63 + 5),
    Sampling(1.3, top_k=5, seed=3),
    Sampling(0.9, top_p=0.6, seed=4),
    Sampling(1.0, top_k=7, top_p=0.8, seed=5),
    Sampling(0.5, top_k=1000, seed=6),
]


def facts(samplings: list[Sampling]) -> list[SlotFacts]:
    return [SlotFacts(3 + i, 10 * i, 7 * i, i, s) for i, s in enumerate(samplings)]


def test_state_holds_what_the_host_said_and_empties_the_rest() -> None:
    state = SlotState(4, torch.device("cpu"))
    state.upload(facts(SAMPLINGS[:3]))
    state.upload(facts(SAMPLINGS[:2]))
    rows = state.rows(3)
    assert rows.root_ids.tolist() == [3, 4, 0]
    assert rows.prefix.tolist() == [0, 10, 0]
    assert rows.vacant.tolist() == [False, False, True]
    assert rows.greedy.tolist() == [True, False, False]
    assert rows.seeds[1].item() == signed_seed(2**63 + 5)
    assert rows.temperature.tolist() == [1.0, 0.7, 1.0]


def test_state_advances_by_what_was_committed() -> None:
    state = SlotState(3, torch.device("cpu"))
    state.upload(facts(SAMPLINGS[:3]))
    rows = state.rows(2)
    rows.advance(torch.tensor([90, 91]), torch.tensor([2, 1]))
    assert state.rows(3).root_ids.tolist() == [90, 91, 5]
    assert state.rows(3).prefix.tolist() == [2, 11, 20]
    assert state.rows(3).stable.tolist() == [2, 8, 14]
    assert state.rows(3).positions.tolist() == [2, 2, 2]


def test_laws_and_draws_are_those_of_the_ordinary_loop() -> None:
    """Bit by bit, ties and excluded tokens among them."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 4, 50, generator=generator)
    logits[:, 1] = logits[:, 1].round()  # ties
    logits[:, 2, 30:] = float("-inf")
    state = SlotState(6, torch.device("cpu"))
    state.upload(facts(SAMPLINGS))
    rows, row = state.rows(6), torch.arange(6).repeat_interleave(4)
    positions = torch.arange(24).view(6, 4) // 2
    assert mode_of(SAMPLINGS) == "nucleus"
    law = law_of(logits.flatten(0, 1), rows, row, "nucleus")
    wanted = warp_logits(logits, SAMPLINGS)
    assert torch.equal(law.view_as(wanted), wanted)
    best = logits.argmax(-1).flatten()
    tokens = tokens_of(best, law, rows, row, positions.flatten(), "nucleus")
    assert torch.equal(tokens.view(6, 4), draw(wanted, logits.argmax(-1), SAMPLINGS, positions))


def test_plain_temperatures_need_no_sorting() -> None:
    samplings = SAMPLINGS[:2]
    assert mode_of(samplings) == "temperature"
    assert mode_of(SAMPLINGS[:1]) == "greedy"
    logits = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(1))
    state = SlotState(2, torch.device("cpu"))
    state.upload(facts(samplings))
    law = law_of(
        logits.flatten(0, 1), state.rows(2), torch.tensor([0, 0, 0, 1, 1, 1]), "temperature"
    )
    assert torch.equal(law.view_as(logits), warp_logits(logits, samplings))


def test_constants_are_made_once() -> None:
    constants = Constants(torch.device("cpu"))
    assert constants.even_rows(2, 3).tolist() == [0, 0, 0, 1, 1, 1]
    assert constants.even_offsets(2, 3).tolist() == [0, 3, 6]
    assert constants.causal_words(2, 3).tolist() == [[0b1], [0b11], [0b111]] * 2
    assert constants.even_rows(2, 3) is constants.even_rows(2, 3)


def test_geometry_is_that_of_the_pool() -> None:
    for record in (
        Chain(num_draft_tokens=5),
        StaticTree(depth=4, top_k=3, num_tokens=9),
        EntropyBins(base=StaticTree(depth=3, top_k=4, num_tokens=20), edges=(1.0,), gammas=(0.5,)),
    ):
        rule = build_shape(record)
        geometry = geometry_of(rule)
        assert geometry.capacity == pool_capacity(rule)
        assert geometry.max_depth == rule.max_depth
    geometry = geometry_of(build_shape(StaticTree(depth=4, top_k=3, num_tokens=9)))
    assert geometry.widths == (1, 3, 3, 3)
    assert geometry.starts == (1, 4, 13, 22, 31)
    assert geometry.behind == (0, 0, 3, 6)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (StaticTree(depth=8, top_k=10, num_tokens=60), None),
        (StaticTree(depth=6, top_k=32, num_tokens=60), "5153 slots of a pool"),
        (StaticTree(depth=2, top_k=33, num_tokens=60), "1089 candidates of a level"),
        (Chain(num_draft_tokens=20), None),
    ],
)
def test_trees_beyond_the_kernels_are_named(record: Chain | StaticTree, says: str | None) -> None:
    found = too_large(build_shape(record))
    assert found is says if says is None else str(found).startswith(says)


def test_limits_are_the_kernels_own() -> None:
    pytest.importorskip("triton")
    from specctl.kernels.tree_build import fused

    most = max(fused.POOL_WARPS), max(fused.LEVEL_WARPS), max(fused.BEST_BLOCKS)
    assert most == (MAX_SLOTS, MAX_CANDIDATES, MAX_BEST)
    assert max(fused.TREE_WARPS) == MAX_TOKENS
