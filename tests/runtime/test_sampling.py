"""Drawing the target's token: processors, seeds, refusals."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specctl.errors import ModelError, UsageError
from specctl.policy import Chain, Policy
from specctl.runtime.requests import Request, Sampling
from specctl.runtime.round import check_finite
from specctl.runtime.sampling import SamplingTable, process_logits
from tests.runtime.toy import decode


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, 1000])
@pytest.mark.parametrize("top_p", [0.05, 0.6, 0.999, 1.0])
def test_warp_equals_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits = 3 * torch.randn(6, 200, generator=torch.Generator().manual_seed(1))
    ours = process_logits(logits, Sampling(temperature, top_k, top_p))
    theirs = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        theirs.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        theirs.append(TopPLogitsWarper(top_p))
    assert torch.equal(ours, theirs(None, logits.clone()))


def test_greedy_rows_pass_through() -> None:
    logits, row = torch.randn(6, 10), torch.tensor([0, 0, 0, 1, 1, 1])
    assert SamplingTable.of([Sampling(), Sampling()], "cpu").process(logits, row) is logits
    for other in (Sampling(0.5), Sampling(0.5, top_k=3)):
        mixed = SamplingTable.of([Sampling(), other], "cpu").process(logits, row)
        assert torch.equal(mixed[:3], logits[:3])
        assert torch.equal(mixed[3:], process_logits(logits[3:], other))


def test_another_seed_gives_another_text() -> None:
    def at(seed: int) -> tuple[int, ...]:
        request = Request("r", (5, 6, 7), 24, sampling=Sampling(1.0, seed=seed))
        return decode(Policy(shape=Chain(num_draft_tokens=2)), [request])["r"].token_ids

    assert at(1) != at(2)
    assert at(1) == at(1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_logits_are_an_error_never_a_token(bad: float) -> None:
    logits = torch.zeros(1, 2, 8)
    logits[0, 1, 3] = bad
    with pytest.raises(ModelError, match="NaN or infinity"):
        check_finite(logits.amax(-1))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"seed": -1},
    ],
)
def test_impossible_sampling_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(fields))} is .*, but must be"):
        Sampling(**fields)
