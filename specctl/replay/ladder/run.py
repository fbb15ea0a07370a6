"""`specctl ladder`: opened traces and named policies in, one document and one picture out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from specctl.errors import UsageError
from specctl.logs.trace_columns import Traces
from specctl.logs.tree_log import DenseLog
from specctl.replay.config import ShowProgress, no_progress
from specctl.replay.cost.files import parse_linear
from specctl.replay.cost.model import CostModel, require_slope
from specctl.replay.ladder.build import build_ladder
from specctl.replay.ladder.clock import LoadClock
from specctl.replay.ladder.config import LadderConfig
from specctl.replay.ladder.figure import ladder_png
from specctl.replay.ladder.result import LadderResult
from specctl.replay.results import facts_of
from specctl.replay.run import open_cost_model
from specctl.runtime.output import json_bytes, write_whole
from specctl.runtime.policy_spec import NamedPolicy, resolve_policies

JSON_NAME, PICTURE_NAME, WHAT = "ladder.json", "ladder.png", "ladder"


def write_ladder(result: LadderResult, folder: Path) -> None:
    """Writes `ladder.json` and `ladder.png`.

    Raises:
        OutputError: they cannot be written.
    """
    write_whole(folder / JSON_NAME, json_bytes(result.to_json()), WHAT)
    write_whole(folder / PICTURE_NAME, ladder_png(result), WHAT)


def run_ladder(
    traces: Traces,
    prompt_ids: Sequence[str],
    model: CostModel,
    specs: Sequence[str] = (),
    *,
    batch_size: int = 1,
    config: LadderConfig | None = None,
    progress: ShowProgress = no_progress,
) -> LadderResult:
    """Builds the ladder of dense traces.

    Args:
        specs: names with settings, or artifact folders of this pair.

    Raises:
        UsageError: a policy that a log cannot tell, or a load that was not measured.
        TraceError, ArtifactError: see `specctl.errors`.
    """
    log = DenseLog.open(traces)
    named: list[NamedPolicy] = []
    if specs:
        named = resolve_policies(",".join(specs), traces.fingerprint)
    torch.set_num_threads(1)
    ladder = build_ladder(
        log,
        prompt_ids,
        LoadClock(model, batch_size),
        [(item.label, item.policy) for item in named],
        is_sampled=bool(traces.header.sampling["temperature"]),
        config=config,
        progress=progress,
    )
    return LadderResult(facts_of(traces, log, model.digest), ladder)


def choose_cost(
    path: Path | None, linear: str | None, traces: Traces, warn: Callable[[str], None]
) -> CostModel:
    """The cost model of a file or of stated rates.

    Raises:
        UsageError: none or both, rates that cannot be read, or a model by which tokens are free.
        InputError: a file that cannot be read.
    """
    if (path is None) == (linear is None):
        raise UsageError(
            "cost of a round",
            expected="either --cost-model or --linear: a ladder weighs tokens against time",
            found="neither" if path is None else "both",
            fix="measure one with `specctl profile` and give it with --cost-model",
        )
    model = parse_linear(linear) if linear is not None else open_cost_model(path, traces, warn)
    return require_slope(model)
