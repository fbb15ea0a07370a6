"""The reference of `race`: equal to the definition, and to the draw that decodes today."""

from __future__ import annotations

import pytest
import torch

from specctl.errors import UsageError
from specctl.kernels.race import DTYPES, race
from specctl.noise import noise_keys, signed_seed
from specctl.runtime import sampling
from tests.kernels.cases_race import check_race

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 5, 1300])
def test_reference_equals_the_definition(vocab_size: int, dtype: torch.dtype) -> None:
    check_race(9, vocab_size, dtype, CPU)


def test_it_draws_what_the_runtime_draws() -> None:
    """One call for all requests, where the runtime draws request by request."""
    law = 3 * torch.randn(3, 7, 900, generator=torch.Generator().manual_seed(1))
    positions = torch.randint(1, 5, (3, 7), generator=torch.Generator().manual_seed(2))
    seeds = [0, 17, 2**64 - 1]
    samplings = [
        sampling.Sampling(temperature=t, seed=seed)
        for t, seed in zip((1.0, 0.0, 1.0), seeds, strict=True)
    ]
    drawn = sampling.draw(law, law.argmax(-1), samplings, positions)
    keys = noise_keys(torch.tensor([signed_seed(seed) for seed in seeds])[:, None], positions)
    greedy = torch.tensor([s.greedy for s in samplings])[:, None].expand(3, 7)
    found = race(law.flatten(0, 1), keys.flatten(), greedy.flatten())
    assert torch.equal(found.view(3, 7), drawn)


def test_other_dtypes_and_shapes_are_refused() -> None:
    law, keys = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(UsageError, match="kernel race, law: expected float32 or bfloat16"):
        race(law.double(), keys, keys > 0)
    with pytest.raises(UsageError, match="kernel race, keys: expected int64 of 2, found int64 of"):
        race(law, keys[:1], keys > 0)
    with pytest.raises(UsageError, match="kernel race, greedy: expected bool of 2, found int64"):
        race(law, keys, keys)
