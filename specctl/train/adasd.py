"""`fit adasd`: the warm start of AdaSD's stop, and a certified clip (arXiv:2512.11280).

The stop needs no fit, but it starts blind: a request of a hundred tokens is half over before it
has seen eight rejections. The fit measures both means on the training prompts and gives a request
some tokens of them to start with; how many, and between what the threshold lies, is chosen by
replay of the training prompts, and reported on the prompts held out.

The acceptance's threshold follows the request, blind to whether what it admits is right. The clip
bounds it. Runs of the fitted stop under each clip, on prompts with checkable answers, are paired
with runs of the same stop under strict acceptance; the largest certified clip is published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specctl.artifacts import Metric, PairFingerprint
from specctl.artifacts.manifest import REPORT_JSON
from specctl.errors import EvidenceError, TraceMismatchError
from specctl.formatting import Table
from specctl.logs.fit_data import PromptCosts, TestedTokens
from specctl.policy import Chain, EntropyStop, Policy, Shape, SignalStop
from specctl.policy.adasd import JensenShannon
from specctl.records import Record, canonical_json
from specctl.runtime.load import Pair
from specctl.runtime.output import write_whole
from specctl.stats import (
    Floats,
    Interval,
    Split,
    auc_of,
    intervals_over,
    ratio_of_ratios,
    ratio_of_sums,
    split_prompts,
)
from specctl.train.configs import AdasdConfig, ClipConfig
from specctl.train.paired import Plan, RunFolder, nothing_to_check, run_prompts, strict_twin
from specctl.train.quality import SettingRow, Sweep, SweepReport
from specctl.train.report import BLUE, PALE, RED, Fit, FitReport

Between = Literal["midpoint", "rejected"]
CONFIDENCES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
FEWEST = 30
"""Tokens of each class below which a mean is not a start."""


Measure = Callable[[Sequence[Policy]], Sequence[PromptCosts]]
"""Replays policies over all prompts of the traces."""


class Signal(Record):
    """Separation of accepted from rejected tokens by one value, on the training prompts.

    Attributes:
        auc: chance that a rejected token has the larger value than an accepted one.
        bounds, accepted, rejected: a histogram, `len(bounds) - 1` counts of each class.
    """

    accepted_mean: float
    rejected_mean: float
    accepted_std: float
    rejected_std: float
    auc: float
    bounds: tuple[float, ...]
    accepted: tuple[int, ...]
    rejected: tuple[int, ...]

    @property
    def midpoint(self) -> float:
        return (self.accepted_mean + self.rejected_mean) / 2


class StopRow(Record):
    """One way of stopping, on both sides of the split.

    Attributes:
        train_cost, held_out_cost: per token. against: held-out cost per token over that of the
            best fixed chain, paired by prompt. The rest is held out.
        support: share of all its rounds for which the traces hold all.
    """

    name: str
    train_cost: float
    held_out_cost: Interval
    against: Interval
    tokens_per_call: float
    levels_per_call: float
    verified_per_call: float
    support: float


class StopFit(Record):
    """A fitted stop and what is known of it.

    Attributes:
        num_prompts, num_tokens: by side of the split; tokens that were tested.
        distance: that only the acceptance reads; None of a serving engine's log, which lacks it.
        rows: the paper's fixed chain of 5, the best fixed chain and confidence stop, AdaSD cold,
            then the chosen one.
    """

    config: AdasdConfig
    shape: EntropyStop
    entropy: Signal
    distance: Signal | None
    num_prompts: dict[str, int]
    num_tokens: dict[str, int]
    rows: tuple[StopRow, ...]

    def known_distance(self) -> Signal:
        """The distance.

        Raises:
            EvidenceError: there is none.
        """
        if self.distance is not None:
            return self.distance
        raise EvidenceError(
            "the clip of AdaSD's acceptance",
            expected="the distance of drafter and target, js_distance",
            found="none: logs of serving engines lack it",
            fix="collect the log with `specctl collect --dense`, or fit the stop alone",
        )


def fit_stop(tested: TestedTokens, measure: Measure, config: AdasdConfig) -> StopFit:
    """Measures, tries, chooses.

    Raises:
        TraceEmptyError: fewer than two prompts. EvidenceError: too few tokens of either class.
    """
    split = split_prompts(tested.prompt_id, held_out_frac=config.held_out_frac, seed=config.seed)
    training = np.isin(tested.prompt_id, split.train)
    accepted = np.asarray(tested.accepted)
    entropy = signal_of(tested.entropy[training], accepted[training])
    is_known = not np.isnan(tested.distance).all()
    distance = signal_of(tested.distance[training], accepted[training]) if is_known else None
    tried = _candidates(config, entropy)
    found = dict(zip(tried, measure(list(tried.values())), strict=True))
    rows = _judged(found, split)
    shape = tried[rows[-1].name].shape
    assert isinstance(shape, EntropyStop)
    return StopFit(
        config=config,
        shape=shape,
        entropy=entropy,
        distance=distance,
        num_prompts={"train": len(split.train), "held_out": len(split.held_out)},
        num_tokens={"train": int(training.sum()), "held_out": int((~training).sum())},
        rows=rows,
    )


def signal_of(values: Floats, accepted: NDArray[np.bool_]) -> Signal:
    """Means, spreads and separation of a value over accepted and rejected tokens.

    Raises:
        EvidenceError: too few of either.
    """
    known = ~np.isnan(values)
    good, bad = values[known & accepted], values[known & ~accepted]
    if min(len(good), len(bad)) < FEWEST:
        raise EvidenceError(
            "fit adasd",
            expected=f"at least {FEWEST} accepted and {FEWEST} rejected tokens",
            found=f"{len(good)} and {len(bad)} on the training prompts",
            fix="collect dense traces of more prompts",
        )
    bounds = np.histogram_bin_edges(np.concatenate([good, bad]), 40)
    return Signal(
        accepted_mean=float(good.mean()),
        rejected_mean=float(bad.mean()),
        accepted_std=float(good.std()),
        rejected_std=float(bad.std()),
        auc=auc_of(values[known], ~accepted[known]),
        bounds=tuple(bounds.tolist()),
        accepted=tuple(np.histogram(good, bounds)[0].tolist()),
        rejected=tuple(np.histogram(bad, bounds)[0].tolist()),
    )


def _candidates(config: AdasdConfig, entropy: Signal) -> dict[str, Policy]:
    """Every policy that is tried, by name: `family: setting`."""
    shapes: dict[str, Shape] = {
        f"chain: {size}": Chain(num_draft_tokens=size) for size in range(1, config.window + 1)
    }
    for least in CONFIDENCES:
        stop = SignalStop(signal="confidence", threshold=least, window=config.window)
        shapes[f"confidence: {least:g}"] = stop
    own = config.model_dump(include={"window", "min_samples", "half_life", "keep_last"})
    means = (max(0.0, mean) for mean in (entropy.accepted_mean, entropy.rejected_mean))
    prior: dict[str, Any] = dict(zip(("prior_accepted", "prior_rejected"), means, strict=True))
    for between in config.between:
        for weight in config.weights:
            start = f"warm {weight:g}" if weight else "cold"
            shapes[f"AdaSD: {between}, {start}"] = EntropyStop(
                between=between, prior_weight=weight, **own, **(prior if weight else {})
            )
    return {name: Policy(shape=shape) for name, shape in shapes.items()}


def _judged(found: Mapping[str, PromptCosts], split: Split) -> tuple[StopRow, ...]:
    """Fixed chains, confidence stops and AdaSD's, the one chosen on training prompts last."""
    some = next(iter(found.values()))
    train, held = (np.isin(some.prompt_ids, side) for side in (split.train, split.held_out))
    train_cost = {
        name: float(one.time[train].sum() / one.tokens[train].sum()) for name, one in found.items()
    }

    families = ("chain", "confidence", "AdaSD")
    names = {f: [name for name in found if name.startswith(f"{f}: ")] for f in families}
    best = {family: min(names[family], key=train_cost.__getitem__) for family in families}
    chain = found[best["chain"]]
    theirs = (chain.time[held], chain.tokens[held])
    paper = [name for name in ("chain: 5",) if name in found]
    others = [name for name in names["AdaSD"] if name != best["AdaSD"]]
    shown = [*paper, best["chain"], best["confidence"], *others, best["AdaSD"]]
    rows = []
    for name in dict.fromkeys(shown):
        one = found[name]
        ours, calls = (one.time[held], one.tokens[held]), float(one.calls[held].sum())
        rows.append(
            StopRow(
                name=name,
                train_cost=train_cost[name],
                held_out_cost=ratio_of_sums(*ours),
                against=ratio_of_ratios(ours, theirs),
                tokens_per_call=float(one.tokens[held].sum()) / calls,
                levels_per_call=float(one.levels[held].sum()) / calls,
                verified_per_call=float(one.verified[held].sum()) / calls,
                support=one.support,
            )
        )
    return tuple(rows)


# --------------------------------------------------------------------------- the clip


class ClipRow(SettingRow):
    """One clip."""

    clip: float


class ClipReport(SweepReport):
    """A judged sweep of clips."""

    config: ClipConfig
    rows: tuple[ClipRow, ...]


def clipped(shape: EntropyStop, distance: Signal, config: ClipConfig, clip: float) -> Policy:
    """The stop with the acceptance of one clip, as warm as the stop itself."""
    warm = bool(shape.prior_weight)
    acceptance = JensenShannon(
        max_threshold=clip,
        **config.model_dump(include={"variant", "min_samples", "half_life", "deny_token_ids"}),
        prior_accepted=distance.accepted_mean if warm else None,
        prior_rejected=distance.rejected_mean if warm else None,
        prior_weight=shape.prior_weight,
    )
    return Policy(shape=shape, acceptance=acceptance)


def sweep_clips(
    pair: Pair,
    stop: StopFit,
    plan: Plan,
    config: ClipConfig,
    folder: RunFolder,
    *,
    on_answer: Callable[[], Any] | None = None,
) -> Sweep:
    """Runs the strict policy and every clip over the prompts; finished answers are kept."""
    base = strict_twin(Policy(shape=stop.shape))
    distance = stop.known_distance()
    policies = tuple(clipped(stop.shape, distance, config, clip) for clip in config.clips)
    strict, *relaxed = (
        run_prompts(pair, policy, plan, folder, on_answer=on_answer) for policy in (base, *policies)
    )
    return Sweep(base, policies, strict, tuple(relaxed), config.contract)


def check_runs(plan: Plan, running: PairFingerprint, traced: PairFingerprint) -> None:
    """Refuses runs that could certify nothing, before the first of them.

    Raises:
        TraceMismatchError: another pair than that of the traces.
        EvidenceError: no prompt has an answer that can be checked.
    """
    if not any(prompt.answer for prompt in plan.prompts):
        raise nothing_to_check()
    names = ("target_digest", "drafter_digest", "tokenizer_digest")
    if any(getattr(traced, name) != getattr(running, name) for name in names):
        raise TraceMismatchError(
            "--target and --drafter",
            expected=f"the traces' pair, {traced.target} with {traced.drafter}",
            found=f"{running.target} with {running.drafter}",
            fix="name that pair, or collect traces of this one",
        )


def judge_clips(
    found: Sweep, config: ClipConfig, setup: dict[str, Any], folder: Path
) -> ClipReport:
    """Figures of a finished sweep; they stay in the folder, whatever the contract decides.

    Raises:
        EvidenceError: not even the smallest clip keeps the contract.
    """
    judged = zip(config.clips, found.comparisons, found.certificate.trials, strict=True)
    rows = [ClipRow(clip=c, comparison=seen, trial=trial) for c, seen, trial in judged]
    report = ClipReport.of(found, setup, config=config, rows=tuple(rows))
    content = canonical_json(report.model_dump(mode="json")).encode()
    write_whole(folder / REPORT_JSON, content, "report")
    found.certificate.require_any([f"clip {clip:g}" for clip in config.clips])
    return report


# --------------------------------------------------------------------------- what is shown


class AdasdReport(Record):
    """`report.json`. `clip` is None for a fit without paired runs, which is lossless."""

    stop: StopFit
    clip: ClipReport | None


def adasd_fit(stop: StopFit, clip: ClipReport | None = None) -> Fit[AdasdReport]:
    """The fitted stop, with the certified acceptance where one was certified."""
    data = AdasdReport(stop=stop, clip=clip)
    policy = Policy(shape=stop.shape)
    if clip is not None and clip.published is not None:
        policy = clipped(stop.shape, stop.known_distance(), clip.config, clip.published.clip)
    return Fit(policy, report_of(data))


def report_of(data: AdasdReport) -> FitReport[AdasdReport]:
    """The figures as they are shown and published."""
    stop, clip = data.stop, data.clip
    config, chosen, known = stop.config.model_dump(mode="json"), stop.rows[-1], stop.distance
    found: dict[str, Metric | Interval | float | None] = {
        "entropy_auc": stop.entropy.auc,
        "distance_auc": None if stop.distance is None else stop.distance.auc,
        "held_out_cost": chosen.held_out_cost,
        "against_best_chain": chosen.against,
        "tokens_per_call": chosen.tokens_per_call,
        "support": chosen.support,
    }
    distance = "Jensen-Shannon distance (square root of bits)"
    said = "Fitted without paired runs, so verification stays strict."
    lines = ["no paired runs: the acceptance stays strict, the artifact is lossless"]
    tables, bound = [_stop_table(stop)], None
    if clip is not None:
        config["clip"] = clip.config.model_dump(mode="json")
        contract = clip.config.contract
        lines = [
            *clip.contract_lines(contract),
            f"variant {clip.config.variant}; {clip.setup_line}",
        ]
        tables.append(clip.table("Clips of the acceptance", "clip"))
        if clip.published is not None:
            bound = clip.published.clip
            found |= {"max_threshold": bound, **clip.metrics()}
            said = clip.promise(contract, f"with its threshold clipped at {bound:g}")
    return FitReport(
        kind="adasd",
        title="AdaSD",
        what="Drafts until a token is more uncertain than a threshold that each request learns "
        "from the tokens that were accepted and rejected in its earlier rounds "
        "(arXiv:2512.11280).",
        config=config,
        data=data,
        splits={
            side: (stop.num_prompts[side], stop.num_tokens[side]) for side in ("train", "held_out")
        },
        metrics=found,
        summary=(
            f"{stop.num_prompts['train']} training and {stop.num_prompts['held_out']} held-out "
            f"prompts; {stop.num_tokens['train']} and {stop.num_tokens['held_out']} tested tokens",
            _signal_line("draft entropy, nats", stop.entropy),
            *(
                [_signal_line("Jensen-Shannon distance", known)]
                if known
                else ["the log has no js_distance, which only the acceptance needs"]
            ),
            f"costs in {stop.config.cost}, held out, {intervals_over(stop.num_prompts['held_out'])}"
            "; chosen on the training prompts",
            *lines,
        ),
        tables=tables,
        figures=(
            lambda axes: _draw_signal(axes, stop.entropy, "draft entropy (nats)"),
            *([lambda axes: _draw_signal(axes, known, distance, bound)] if known else []),
            lambda axes: _draw_costs(axes, stop.rows),
        ),
        limits=(
            "The warm start is of these prompts and this pair; a request that differs unlearns it "
            "at the pace of its own tokens. Entropies do not carry over between draft "
            "vocabularies.",
            "The acceptance looks at distributions, never at right or wrong; only the clip is "
            "certified, for checkable answers to such prompts under this decoding.",
        ),
        promise=said,
    )


def _signal_line(name: str, signal: Signal) -> str:
    return (
        f"{name}: accepted {signal.accepted_mean:.3f}, rejected {signal.rejected_mean:.3f}, "
        f"AUC {signal.auc:.3f}"
    )


def _stop_table(stop: StopFit) -> Table:
    """One row a way of stopping; the last one is in the artifact."""
    # Target steps are about 1, microseconds thousands.
    cost = ".4f" if stop.rows[0].train_cost < 100 else ".0f"
    *others, chosen = stop.rows
    chosen = chosen.model_copy(update={"name": f"{chosen.name}, chosen"})
    columns = {
        "stop": "name",
        "cost/token": f"held_out_cost:{cost}",
        "× best chain": "against:.3f",
        "tokens/call": "tokens_per_call:.2f",
        "drafted/call": "levels_per_call:.2f",
        "verified/call": "verified_per_call:.2f",
    }
    table = Table.of("Ways of stopping", [*others, chosen], columns)
    return replace(table, wide=("tokens/call", "drafted/call"))


def _draw_signal(axes: Any, signal: Signal, label: str, clip: float | None = None) -> None:
    for counts, colour, name in (
        (signal.accepted, BLUE, "accepted"),
        (signal.rejected, RED, "first rejected"),
    ):
        shares = [count / max(1, sum(counts)) for count in counts]
        axes.stairs(shares, signal.bounds, color=colour, label=name, fill=True, alpha=0.5)
    axes.axvline(signal.midpoint, color="black", linestyle="--", linewidth=1, label="midpoint")
    if clip is not None:
        axes.axvline(clip, color=PALE, linewidth=2, label="certified clip")
    axes.set_xlabel(label)
    axes.set_ylabel("share of tokens")


def _draw_costs(axes: Any, rows: Sequence[StopRow]) -> None:
    for place, row in enumerate(rows):
        colour = RED if row is rows[-1] else BLUE
        if row.against.known:
            axes.plot([row.against.low, row.against.high], [place, place], color=colour)
            axes.plot([row.against.value], [place], "o", color=colour)
    axes.axvline(1, color=PALE, linewidth=2)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("held-out cost per token, × best fixed chain (the last row is chosen)")
