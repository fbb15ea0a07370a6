"""Where what is measured now will hold: models, number format and hardware of a loaded pair."""

from __future__ import annotations

import re
from collections.abc import Callable

from specctl.artifacts import Domain
from specctl.artifacts.compatibility import Expectation
from specctl.artifacts.manifest import Range
from specctl.errors import UsageError
from specctl.runtime.hardware import hardware_name
from specctl.runtime.identity import config_digest, hub_revision
from specctl.runtime.load import Pair

_WORD = re.compile(r"[a-z0-9._-]{1,64}")


def pair_domain(
    pair: Pair, *, batch_size: int | None = None, workload: str | None = None
) -> Domain:
    """The domain of evidence that is gathered with a pair, as it is loaded, on this machine.

    Args:
        batch_size: requests that share a round; None where rounds are not shared.
        workload: what the prompts are, in the user's word.

    Raises:
        UsageError: a workload that no name of a registry could carry.
    """
    if workload is not None and not _WORD.fullmatch(workload):
        raise UsageError(
            "workload",
            expected="a short word of [a-z0-9._-], e.g. chat",
            found=ascii(workload)[:80],
            fix="choose such a word",
        )
    target, drafter = pair.target.folder, pair.drafter_folder
    return Domain(
        target_config_digest=config_digest(target),
        target_revision=hub_revision(target),
        drafter_config_digest=None if drafter is None else config_digest(drafter),
        drafter_revision=None if drafter is None else hub_revision(drafter),
        dtype=str(pair.target.model.dtype).removeprefix("torch."),
        hardware=(hardware_name(pair.target.model.device),),
        batch_size=None if batch_size is None else Range(low=batch_size, high=batch_size),
        workload=workload,
    )


def expectation(
    pair: Pair, batch_size: int, *, allow_mismatch: bool, warn: Callable[[str], None]
) -> Expectation:
    """What artifacts must fit that are to run on a loaded pair, here, at a load.

    Args:
        allow_mismatch: accept lossless policies that were fitted elsewhere, with a warning each.
    """
    domain = pair_domain(pair, batch_size=batch_size)
    return Expectation(pair.fingerprint, domain, allow_mismatch, warn)
