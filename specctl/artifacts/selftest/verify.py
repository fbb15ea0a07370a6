"""Writing the vectors, and holding a policy against those that came with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specctl.artifacts.limits import is_out_of_memory
from specctl.artifacts.manifest import SELFTEST
from specctl.artifacts.selftest.rounds import (
    NUM_TOKENS,
    OUTPUTS,
    Arrays,
    round_inputs,
    round_outputs,
)
from specctl.artifacts.selftest.rows import (
    UNDECIDED,
    Cases,
    ScoreCases,
    cases_of,
    tolerance,
)
from specctl.artifacts.tensors import read_tensors, write_tensors
from specctl.errors import ArtifactError, SpecctlError
from specctl.features import DraftPool
from specctl.policy.build import build_shape
from specctl.policy.pruning import PrunedShape
from specctl.policy.records import Policy, ScoredTree
from specctl.policy.rules import ShapeRule

ROWS, ROUNDS = "rows.", "rounds."
MAX_SEEDS = 16
NOISE = 1e-5
"""Log-probability by which scores are shaken, equal ones alike: made-up rounds that a network then
decides otherwise lie on a border, where another machine might fall to the other side."""
BOUNDS = {
    "draft_ids": (0, NUM_TOKENS - 1),
    "recent": (0, NUM_TOKENS - 1),
    "draft_logp": (-1e4, 0.0),
    "entropy": (-1e-3, 10.0),
    "topk_entropy": (-1e-3, 10.0),
    "shape_memory": (0.0, 1e6),
    "acceptance_memory": (0.0, 1e6),
    "draft_logits": (-1e3, 1e3),
    "target_logits": (-1e3, 1e3),
}


def selftest_bytes(policy: Policy) -> bytes:
    """The bytes of `selftest.safetensors`: a function of the policy alone.

    Raises:
        ArtifactError: E_DEGENERATE for a scorer that says the same of every node, E_SELFTEST for
            rules that cannot decide the made-up rounds.
    """
    with _refusals():
        shape = build_shape(policy.shape)
        inputs = _steady_inputs(policy, shape)
        rounds = {**inputs, **round_outputs(policy, shape, inputs)}
        named = {f"{ROUNDS}{name}": array for name, array in rounds.items()}
        return write_tensors({**named, **_row_tensors(cases_of(policy))})


def check_selftest(policy: Policy, data: bytes) -> None:
    """Refuses a policy that decides otherwise than the vectors say.

    Args:
        data: `selftest.safetensors`.

    Raises:
        ArtifactError: E_SELFTEST or E_DEGENERATE.
    """
    with _refusals():
        cases = cases_of(policy)
        own = _part(_row_tensors(cases), ROWS)
        tensors = read_tensors(data, SELFTEST)
        _check_rounds(policy, _part(tensors, ROUNDS))
        _check_rows(cases, _part(tensors, ROWS), own)


def _part(tensors: Arrays, prefix: str) -> Arrays:
    return {n.removeprefix(prefix): a for n, a in tensors.items() if n.startswith(prefix)}


def _steady_inputs(policy: Policy, shape: ShapeRule) -> Arrays:
    """The first made-up world in which no score decides that rounding could turn."""
    for seed in range(MAX_SEEDS):
        inputs = round_inputs(policy, shape, seed)
        wanted = round_outputs(policy, shape, inputs)
        shaken = (round_outputs(policy, rule, inputs) for rule in _shaken(shape, policy))
        if all(_equal(found, wanted) for found in shaken):
            return inputs
    raise _wrong("rounds", f"one of {MAX_SEEDS} made-up rounds off every border", "none")


def _shaken(rule: ShapeRule, policy: Policy) -> Iterator[ShapeRule]:
    """The rule of a scorer with its scores moved a little; nothing for exact rules."""
    if not isinstance(policy.shape, ScoredTree):
        return
    assert isinstance(rule, PrunedShape)
    score = rule.score
    for phase in (0.0, 1.5):

        def shaken(pool: DraftPool, start: int, phase: float = phase) -> torch.Tensor:
            found = score(pool, start)
            return found + NOISE * (1e5 * found + phase).sin().nan_to_num(0.0)  # sin(-inf)

        yield replace(rule, score=shaken)


def _row_tensors(cases: Cases | None) -> Arrays:
    """Inputs and outputs of what was learned, by name; none where nothing was."""
    if cases is None:
        return {}
    inputs = cases.inputs()
    found = {"inputs": inputs, **cases.outputs(inputs)}
    if isinstance(cases, ScoreCases):
        _check_says_something(found["scores"], tolerance(cases.shape.scorer, inputs))
    return {f"{ROWS}{name}": array for name, array in found.items()}


def _check_says_something(scores: NDArray[Any], rounding: NDArray[np.float64]) -> None:
    """A scorer that scores all nodes alike prunes all or none: a depth says that better.

    One whose scores differ by less than float32 may round them says nothing that another machine
    would have to repeat.
    """
    if not np.isfinite(scores).all():
        found = "NaN or infinity"
    elif len(scores) > 1 and np.ptp(scores) <= rounding.min():
        found = f"{scores[0]:g} for all of them, within rounding of {rounding.min():.2g}"
    else:
        found = ""
    if found:
        raise ArtifactError(
            "E_DEGENERATE",
            "scorer",
            expected=f"finite scores that differ between {len(scores)} made-up nodes",
            found=found,
            fix="fit it on more data, or use a policy without a scorer",
        )


def _check_rounds(policy: Policy, given: Arrays) -> None:
    shape = build_shape(policy.shape)
    like = round_inputs(policy, shape, 0)
    if given.keys() != {*like, *OUTPUTS}:
        raise _wrong("rounds", f"tensors {sorted([*like, *OUTPUTS])}", str(sorted(given)))
    for name, array in like.items():
        _check_input(name, given[name], array)
    found = round_outputs(policy, shape, {name: given[name] for name in like})
    for name in OUTPUTS:
        _check_same(f"rounds, {name}", found[name], given[name])


def _check_input(name: str, given: NDArray[Any], like: NDArray[Any]) -> None:
    low, high = BOUNDS[name]
    if (given.dtype, given.shape) != (like.dtype, like.shape):
        wanted = f"{like.dtype}{list(like.shape)}"
        raise _wrong(f"rounds, {name}", wanted, f"{given.dtype}{list(given.shape)}")
    if given.size and not (low <= given.min() and given.max() <= high):
        raise _wrong(f"rounds, {name}", f"values in [{low}, {high}]", "others")


def _check_rows(cases: Cases | None, given: Arrays, own: Arrays) -> None:
    if given.keys() != own.keys():
        raise _wrong("rows", f"tensors {sorted(own)}", str(sorted(given)))
    if cases is None:
        return
    _check_inputs(own["inputs"], given["inputs"])
    wanted = dict(given)
    if isinstance(cases, ScoreCases):
        _check_near(own["scores"], given["scores"], tolerance(cases.shape.scorer, own["inputs"]))
        wanted["keep"] = _decided(cases, own, given["keep"])
    for name in own.keys() - {"inputs", "scores"}:
        _check_same(f"rows, {name}", own[name], wanted[name])


def _check_inputs(own: NDArray[Any], given: NDArray[Any]) -> None:
    """Other rows, or fewer, could be chosen to ask nothing: they are a function of the record."""
    if given.dtype != own.dtype or given.shape != own.shape or not np.array_equal(given, own):
        wanted = f"the rows that the record asks for, {own.dtype}{list(own.shape)}"
        raise _wrong("rows, inputs", wanted, f"others, {given.dtype}{list(given.shape)}")


def _decided(cases: ScoreCases, own: Arrays, given: NDArray[Any]) -> NDArray[Any]:
    """`keep` of the vectors; what this machine says where it, or only the other one, may doubt."""
    if given.shape != own["keep"].shape:
        return given
    near = cases.doubtful(own["scores"], own["inputs"], machines=2)
    excused = (own["keep"] == UNDECIDED) | (given == UNDECIDED) & near
    return np.where(excused, own["keep"], given)


def _check_near(found: NDArray[Any], wanted: NDArray[Any], bound: NDArray[np.float64]) -> None:
    same = found.shape == wanted.shape and wanted.dtype == np.float32
    if not same or not (np.abs(found.astype(np.float64) - wanted) <= bound).all():
        raise _wrong("rows, scores", "those of the vectors, within rounding", "others")


def _check_same(what: str, found: NDArray[Any], wanted: NDArray[Any]) -> None:
    if found.shape != wanted.shape or wanted.dtype != np.int64:
        raise _wrong(what, f"int64{list(found.shape)}", f"{wanted.dtype}{list(wanted.shape)}")
    place = np.argwhere(found != wanted)
    if len(place):
        at = tuple(int(i) for i in place[0])
        told = f"{int(found[at])} at {list(at)}, {len(place)} of {found.size} differ"
        raise _wrong(what, f"{int(wanted[at])}, as the vectors say", told)


def _equal(found: Arrays, wanted: Arrays) -> bool:
    return all(np.array_equal(found[name], wanted[name]) for name in wanted)


@contextmanager
def _refusals() -> Iterator[None]:
    """Rules that fail on a made-up case are a refusal, not a stack trace."""
    try:
        yield
    except ArtifactError:
        raise
    except (MemoryError, RuntimeError) as error:
        raise _too_large(error) if is_out_of_memory(error) else _undecided(error) from None
    except (SpecctlError, IndexError, ValueError, ArithmeticError) as error:
        raise _undecided(error) from None


def _undecided(error: Exception) -> ArtifactError:
    return _wrong("rules", "rules that decide made-up rounds", str(error))


def _too_large(error: Exception) -> ArtifactError:
    expected = "rules that decide made-up rounds in the memory there is"
    return ArtifactError(
        "E_COST", "policy record", expected=expected, found=str(error) or "none left"
    )


def _wrong(what: str, expected: str, found: str) -> ArtifactError:
    return ArtifactError(
        "E_SELFTEST",
        f"{SELFTEST}, {what}",
        expected=expected,
        found=found,
        fix="do not load it; if it is yours, fit it again with this version of specctl",
    )
