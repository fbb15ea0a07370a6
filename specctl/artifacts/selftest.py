"""The self-test of an artifact: its policy must decide 64 stored rows as when it was written.

`policy.safetensors` holds inputs of the learned part, and its answers: the bin of Φ, the gate that
closes, a node's log-odds. So a machine, a library or a version of specctl that answers differently
is detected at load. A shape without a learned part has no self-test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from specctl.artifacts.manifest import TENSORS
from specctl.artifacts.tensors import MAX_MAGNITUDE, SMALLEST_NORMAL
from specctl.errors import ArtifactError, InvariantError
from specctl.features import SUFFIX_TOKENS
from specctl.lazy import Tensor, torch
from specctl.policy import (
    EntropyBins,
    FfnScorer,
    Policy,
    ScoredTree,
    Shape,
    SparseGates,
)
from specctl.policy.echo import log_threshold, stop_levels
from specctl.policy.hetero import entropy_bin
from specctl.policy.scorers import build_log_odds

Arrays = dict[str, NDArray[Any]]
PREFIX: Final = "selftest."
GIVEN, FOUND = f"{PREFIX}given", f"{PREFIX}found"
NUM_ROWS = 64
STEP = 2.0**-10
"""Distance of a row from an edge or threshold."""
CLOSED_FOR_SURE = -50.0
"""Log-probability, nats, in place of log 0."""
TOLERANCE = 1e-4
"""Relative to the largest log-odds: the order of float32 additions differs between machines."""


def selftest_tensors(policy: Policy) -> Arrays:
    """Rows and answers by name in `policy.safetensors`; E_DEGENERATE for a constant scorer."""
    answer = _answer_of(policy.shape)
    if answer is None:
        return {}
    given = _storable(_rows_of(policy.shape))
    return {GIVEN: given, FOUND: _answered(policy.shape, answer, given)}


def check_selftest(policy: Policy, stored: Mapping[str, NDArray[Any]]) -> None:
    """Refuses a policy whose answers differ from the stored ones (E_SELFTEST, E_DEGENERATE).

    Args:
        stored: the tensors of `policy.safetensors` whose names begin with `selftest.`.
    """
    answer = _answer_of(policy.shape)
    names = set() if answer is None else {GIVEN, FOUND}
    if stored.keys() != names:
        raise _wrong(f"it has {sorted(stored)}, not {sorted(names)}")
    if answer is None:
        return
    given, wanted = stored[GIVEN], stored[FOUND]
    shape = _rows_of(policy.shape).shape
    if given.dtype != np.float32 or given.shape != shape:
        raise _wrong(f"rows are {given.dtype} {list(given.shape)}, not float32 {list(shape)}")
    found = _answered(policy.shape, answer, given)
    if (wanted.dtype, wanted.shape) != (found.dtype, found.shape):
        form = f"{found.dtype} {list(found.shape)}"
        raise _wrong(f"answers are {wanted.dtype} {list(wanted.shape)}, not {form}")
    tolerance = TOLERANCE * np.abs(wanted).max() if wanted.dtype == np.float32 else 0
    differs = ~(np.abs(found - wanted) <= tolerance)
    if differs.any():
        first, number = int(differs.argmax()), int(differs.sum())
        written = f"{wanted[first]} when it was written"
        raise _wrong(f"{number} rows differ: row {first} is {found[first]} here, {written}")


def _answer_of(shape: Shape) -> Callable[[Tensor], Tensor] | None:
    """The learned part of a shape as a function of rows; None without one."""
    if isinstance(shape, EntropyBins):
        edges = torch.tensor(shape.edges, dtype=torch.float32)
        return lambda phi: entropy_bin(phi, edges)
    if isinstance(shape, SparseGates):
        return lambda gate_logp: stop_levels(shape, gate_logp)
    if isinstance(shape, ScoredTree):
        return build_log_odds(shape.scorer)
    if shape.learned:
        raise InvariantError(f"family {shape.kind} has no self-test for {', '.join(shape.learned)}")
    return None


def _answered(
    shape: Shape, answer: Callable[[Tensor], Tensor], given: NDArray[np.float32]
) -> NDArray[Any]:
    """The answers to rows (else E_SELFTEST); E_DEGENERATE for a constant scorer, which prunes all
    nodes or none."""
    try:
        found = answer(torch.from_numpy(given.copy())).numpy()
    except (RuntimeError, LookupError, ValueError) as error:
        raise _wrong(f"the policy cannot decide the rows: {error}") from None
    if isinstance(shape, ScoredTree):
        is_finite = bool((np.abs(found) <= MAX_MAGNITUDE).all())
        if not is_finite or np.ptp(found) == 0:
            scores = f"{found[0]:g} for all rows" if is_finite else "NaN or infinity"
            fix = "fit it on more data, or use a policy without a scorer"
            raise ArtifactError("E_DEGENERATE", "scorer", f"it scores {scores}", hint=fix)
        return _storable(found)
    return found


def _rows_of(shape: Shape) -> NDArray[np.float32]:
    """`[64]` or `[64, F]` float32: on edges and thresholds and close to them, or around the mean of
    a network's features."""
    draws = np.random.default_rng(0)
    if isinstance(shape, ScoredTree):
        scorer = shape.scorer
        if isinstance(scorer, FfnScorer):
            spread = draws.normal(0, 3, (NUM_ROWS, len(scorer.features))) * scorer.scale
            return np.clip(scorer.mean + spread, -MAX_MAGNITUDE, MAX_MAGNITUDE).astype(np.float32)
        logp = draws.choice(np.array([*scorer.edges, 0.0], np.float32), NUM_ROWS)
        copied = draws.integers(-SUFFIX_TOKENS, SUFFIX_TOKENS, NUM_ROWS, endpoint=True)
        return np.stack([logp, copied], 1).astype(np.float32)
    beside = draws.choice([-STEP, 0.0, STEP], NUM_ROWS)
    if isinstance(shape, EntropyBins):
        return np.asarray(draws.choice(shape.edges, NUM_ROWS) + beside, np.float32)
    assert isinstance(shape, SparseGates)
    bars = np.array([log_threshold(one) for one in shape.thresholds])
    bars = np.where(np.isfinite(bars), bars, CLOSED_FOR_SURE)
    # Random gates stay open, so that each gate is the first to close in some row.
    is_open = draws.random((NUM_ROWS, len(bars))) < 0.5
    return np.where(is_open, 0.0, bars + beside[:, None]).astype(np.float32)


def _storable(values: NDArray[Any]) -> NDArray[Any]:
    """Replaces denormal numbers, which artifacts may not hold, by 0."""
    return np.where(np.abs(values) < SMALLEST_NORMAL, 0, values).astype(values.dtype)


def _wrong(problem: str) -> ArtifactError:
    fix = "do not load it; if it is yours, fit it again with this version of specctl"
    return ArtifactError("E_SELFTEST", f"{TENSORS}, self-test", problem, hint=fix)
