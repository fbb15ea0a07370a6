"""Fits to traces by name: with options, with defaults, or repeated on other traces."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specctl.artifacts import Artifact
from specctl.logs.node_sample import logged_nodes
from specctl.logs.trace_set import TraceSet, domain_of
from specctl.logs.tree_log import LiveLog, open_log
from specctl.policy import Policy
from specctl.progress import progress
from specctl.records import canonical_json
from specctl.replay.cost.files import AnyCost
from specctl.runtime.words import words_of
from specctl.stats import split_prompts
from specctl.train.c2t import fit_c2t
from specctl.train.cart import fit_cart
from specctl.train.configs import FITS, FitConfig
from specctl.train.echo import fit_echo
from specctl.train.report import Fit, save_fit
from specctl.train.survival import fit_survival


def run_fit(
    name: str,
    traces: TraceSet,
    config: FitConfig,
    *,
    base: str | None = None,
    cost_model: AnyCost | None = None,
) -> Fit[Any]:
    """Runs a fit by its name in `FITS`.

    Args:
        base: for `fit_cart`.
        cost_model: for `fit_echo`.

    Raises:
        UsageError, TraceError: see the fits.
    """
    num_rows = traces.num_rows("rounds")
    if name in ("c2t", "survival"):
        nodes = logged_nodes(traces, config.max_positions, config.seed)
        prompts = nodes.log.prompts or traces.prompt_ids
        fit: Any = fit_c2t if name == "c2t" else fit_survival
        num_passes = 3.0  # both sides twice, the control, and the replay of the training prompts
        if isinstance(nodes.log, LiveLog):
            split = split_prompts(prompts, held_out_frac=config.held_out_frac, seed=config.seed)
            num_passes = 2 + len(split.held_out) / len(prompts)
        num_read = round(num_passes * nodes.log.num_positions)
        with progress("positions", num_read, "positions, in several passes"):
            return fit(nodes, prompts, config)  # type: ignore[no-any-return]
    with progress("positions", num_rows):
        if name == "hetero":
            return fit_cart(traces, config, base)  # type: ignore[arg-type]
        return fit_echo(traces, config, cost_model)  # type: ignore[arg-type]


def default_fit(name: str, traces: TraceSet, *, held_out_frac: float, seed: int) -> Fit[Any]:
    """Runs a fit with default options and sizes within the traces' support."""
    kind, support = FITS[name], open_log(traces).support
    fields = {**kind.fields_for(support, seed), "held_out_frac": held_out_frac, "seed": seed}
    return run_fit(name, traces, kind.model_validate_json(canonical_json(fields)))


def refit(
    stored: Mapping[str, Any], traces: TraceSet, *, held_out_frac: float, seed: int
) -> Fit[Any] | None:
    """Repeats the fit of an artifact on other traces; None if it is not of a fit in `FITS`.

    Args:
        stored: `Manifest.fit`, kind and settings.
    """
    name = str(stored.get("kind"))
    if name not in FITS:
        return None
    fields = {key: value for key, value in stored.items() if key != "kind"}
    fields |= {"held_out_frac": held_out_frac, "seed": seed}
    for part in ("nodes", "ffn"):
        if part in fields:
            fields[part] = {**fields[part], "seed": seed}
    config: Any = FITS[name].model_validate_json(canonical_json(fields))
    base = words_of(Policy(shape=config.base)) if name == "hetero" else None
    return run_fit(name, traces, config, base=base)


def write_fit(fit: Fit[Any], folder: Path, traces: TraceSet) -> Artifact:
    """Writes the artifact of a fit to traces, see `save_fit`."""
    domain, snapshots = domain_of(traces), traces.snapshots
    return save_fit(
        fit, folder, traces.fingerprint, traces.digest, domain=domain, snapshots=snapshots
    )
