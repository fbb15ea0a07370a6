"""`specctl drift`: from traces of a deployed policy to a verdict, and what a change costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specctl.errors import TraceEmptyError, UsageError
from specctl.formatting import count
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import support_of
from specctl.policy import as_chain
from specctl.replay.outcomes import check_replayable
from specctl.runtime.words import resolve_policy
from specctl.watch.alarm import LEAST_ALPHA
from specctl.watch.drift import DriftScores, watch
from specctl.watch.price import check_pair, price
from specctl.watch.signals import in_units, read_prompts


def watch_traces(
    traces: list[str],
    policy: str,
    *,
    reference: list[str] | None = None,
    reference_prompts: int = 200,
    unit: str = "prompt",
    dense: list[str] | None = None,
    cost_model: Path | None = None,
    alpha: float = 0.05,
    seed: int = 0,
) -> tuple[DriftScores, list[Any]]:
    """Watches the traffic of a deployed policy.

    Args:
        traces: live, of the traffic. policy: words or an artifact.
        reference: to compare with; None: the first units that hold `reference_prompts`.
        unit: of `signals.UNITS`. alpha: bound on the probability of a false alarm.
        dense: recent traces, which price a change; with times where there is a cost model.
        seed: breaks ties of equal figures.

    Returns:
        The verdict, and what a person sees of it.

    Raises:
        UsageError: an alpha that no evidence reaches, or a policy that cannot be replayed.
        TraceEmptyError: too few prompts. TraceMismatchError: traces of another pair or policy.
    """
    if not LEAST_ALPHA <= alpha < 1:
        raise UsageError(
            f"--false-alarm-prob is a probability from {LEAST_ALPHA:g} to below 1, not {alpha:g}"
        )
    served = TraceSet.open(*traces)
    deployed = resolve_policy(policy, served.fingerprint, allow_lossy=True).policy
    if any("engine" in header.collect for header in served.headers):
        deployed = as_chain(deployed)  # as the engine ran it
    every = read_prompts(served, deployed)
    stream = in_units(every, unit)
    num_left_out = len(every) - len(stream)
    before = check_pair(TraceSet.open(*reference), served, "--reference") if reference else None
    recent = check_pair(TraceSet.open(*dense), served, "--dense") if dense else None
    if recent is not None:
        support_of(recent.header)  # it refuses live traces
        check_replayable(deployed)
    if before is not None:
        known = in_units(read_prompts(before, deployed), unit)
    else:
        known, stream = stream.split(reference_prompts)
        if not len(stream):
            raise TraceEmptyError(
                f"nothing is left to watch behind the {reference_prompts} prompts of "
                f"--reference-prompts: the traffic has {count(known.num_units, unit)} of "
                f"{count(len(known), 'prompt')}",
                hint="wait for traffic, lower --reference-prompts, or name --reference traces",
            )
    found = watch(known, stream, unit=unit, alpha=alpha, seed=seed)
    parts = found.shown()
    if num_left_out:
        parts.append(
            f"{count(num_left_out, 'prompt')} of a {unit} that may not be whole are left out."
        )
    cost = None
    if recent is not None and not found.alarm:
        parts.append("No alarm: --dense was not looked at.")
    elif recent is not None:
        since = found.foremost.since.index
        cost = price(since, known, stream, recent, deployed, before=before, cost_model=cost_model)
        parts += cost.shown()
    scores = DriftScores(
        **dict(found),
        pair=served.fingerprint,
        policy=policy,
        traces=tuple(traces),
        reference=None if reference is None else tuple(reference),
        price=cost,
    )
    return scores, parts
