"""The ladder of one log at one load: tuned on training prompts, measured on held-out ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from specctl.errors import UsageError
from specctl.logs.node_table import sample_labelled
from specctl.logs.positions import Bools, Floats, Ints, Positions
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog, Support
from specctl.policy import Chain, PerRequest, Policy, RootOnly, StaticTree
from specctl.replay.config import (
    LadderConfig,
    ShowProgress,
    Tick,
    check_held_out,
    no_progress,
)
from specctl.replay.cost.files import parse_linear
from specctl.replay.cost.model import CostModel, require_slope
from specctl.replay.ladder.estimates import AcceptanceEstimate, Estimates, fit_estimates
from specctl.replay.ladder.limits import (
    Ranked,
    best_trees,
    clairvoyant,
    rank_log,
    tree_times,
    tune_price,
)
from specctl.replay.ladder.static import (
    TunedStatic,
    chains,
    decide_static,
    fastest,
    swept_widths,
    tree_widths,
    trees,
)
from specctl.replay.ladder.tally import (
    SUMS,
    LoadClock,
    Tally,
    take_requests,
    tally,
    tally_rounds,
)
from specctl.replay.results import facts_of
from specctl.replay.rounds import Rounds, replay
from specctl.replay.run import open_cost_model
from specctl.replay.summary import Summary, summarise
from specctl.results import (
    MARKED_BELOW,
    RUNNABLE,
    Ladder,
    LadderResult,
    LossSplit,
    Rung,
    RungKind,
    SideSizes,
)
from specctl.runtime.policy_spec import resolve_policies
from specctl.stats import Figure, Interval, Resamples, Split, split_prompts, sums_by

LIMITS: dict[RungKind, str] = {
    "features": "R_feat",
    "oracle": "R_prob",
    "clairvoyant": "R_clair",
    "ceiling": "R_ceil",
}
"""Labels of the rungs that are no policies; notes/state-of-the-art.md, section 2.3."""
PLAIN = Policy(shape=RootOnly())


def choose_cost(
    path: Path | None, linear: str | None, traces: TraceSet, warn: Callable[[str], None]
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


def run_ladder(
    traces: TraceSet,
    prompt_ids: Sequence[str],
    model: CostModel,
    specs: Sequence[str] = (),
    *,
    batch_size: int = 1,
    config: LadderConfig | None = None,
    progress: ShowProgress = no_progress,
) -> LadderResult:
    """The ladder of a dense trace set.

    Args:
        specs: names with settings, or artifact folders of this pair.

    Raises:
        UsageError: a policy that cannot be replayed, or a load that was not measured.
        TraceError, ArtifactError: see `specctl.errors`.
    """
    log = DenseLog.open(traces)
    named = resolve_policies(",".join(specs), traces.fingerprint) if specs else []
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
    return LadderResult(kind="ladder", **facts_of(traces, log, model.digest), **dict(ladder))


def build_ladder(
    log: DenseLog,
    prompt_ids: Sequence[str],
    clock: LoadClock,
    policies: Sequence[tuple[str, Policy]] = (),
    *,
    is_sampled: bool = False,
    config: LadderConfig | None = None,
    progress: ShowProgress = no_progress,
) -> Ladder:
    """Every rung on the same held-out prompts.

    Args:
        prompt_ids: of the log. policies: labels and policies between the static rungs and the
            limits; each must be replayable, position by position.

    Raises:
        UsageError: a policy that cannot be replayed. TraceError: see `DenseLog`.
        TraceEmptyError: under two prompts, or nothing to calibrate on.
    """
    config = config or LadderConfig()
    made = make_rungs(
        log, prompt_ids, clock, policies, is_sampled=is_sampled, config=config, progress=progress
    )
    sums = RungSums.of(made.rungs, made.prompt, config.seed)
    return Ladder(
        rungs=tuple(sums.measured(rung, made.best_static) for rung in made.rungs),
        best_static=made.best_static,
        split=sums.loss_split(made.best_static),
        calibration=made.estimates.quality,
        oracle_features=made.estimates.oracle.names,
        num_prompts=SideSizes(train=len(made.sides.train), held_out=len(made.sides.held_out)),
        batch_size=clock.batch_size,
        is_sampled=is_sampled,
        config=config.model_dump(),
    )


# ------------------------------------------------------------------------------- from log to sums


@dataclass(frozen=True)
class RungTally:
    """A rung before it is measured.

    Attributes:
        label: unique. setting: in words. tally: of the held-out requests.
        support: share of the wanted expansions and rounds that the log contains.
    """

    kind: RungKind
    label: str
    setting: str
    tally: Tally
    support: float = 1.0


@dataclass(frozen=True)
class TalliedRungs:
    """All rungs before they are measured.

    Attributes:
        rungs: each tallies the held-out requests, in one order. prompt: `[Q]` their prompts.
    """

    rungs: list[RungTally]
    best_static: str
    prompt: Ints
    sides: Split
    estimates: Estimates


def make_rungs(
    log: DenseLog,
    prompt_ids: Sequence[str],
    clock: LoadClock,
    policies: Sequence[tuple[str, Policy]],
    *,
    is_sampled: bool,
    config: LadderConfig,
    progress: ShowProgress = no_progress,
) -> TalliedRungs:
    """Reads the log, tunes on training requests and adds up held-out ones; see `build_ladder`."""
    clock.check()
    check_held_out(config.held_out_frac)
    for label, policy in policies:
        if label in LIMITS.values() or label == "ar":
            raise UsageError(
                f"policy {label}",
                expected="a label that the ladder does not use itself",
                found="ar, which is always there" if label == "ar" else label,
                fix="leave it out",
            )
        if not isinstance(policy.budget, PerRequest):
            raise UsageError(
                f"ladder with {label}",
                expected="policies that decide for one request at a time",
                found=f"budget {policy.budget.kind}, shared by a batch",
                fix="score it with specctl replay --batch-size, which simulates the batch",
            )
    sides = split_prompts(prompt_ids, held_out_frac=config.held_out_frac, seed=config.seed)
    widths, num_kept = swept_widths(log.support), config.num_kept
    with progress("positions read", log.num_positions * (3 + len(widths))) as tick:
        sample = sample_labelled(
            log, num_nodes=config.num_nodes, seed=config.seed, on_positions=tick
        )
        estimates = fit_estimates(
            sample,
            frozenset(sides.train),
            num_folds=config.num_folds,
            is_sampled=is_sampled,
            seed=config.seed,
        )
        named: dict[str, AcceptanceEstimate] = {
            "features": estimates.features,
            "oracle": estimates.oracle,
        }
        ranked, matched = rank_log(log, named, widths, num_kept=num_kept, on_positions=tick)
        summaries = {width: summarise(log, top_k=width, on_positions=tick) for width in widths}
        shapes = [PLAIN, *(policy for _, policy in policies)]
        runs = replay(log, shapes, with_bounds=False, on_positions=tick)
    positions = summaries[widths[0]].positions
    labels = ["ar", *(label for label, _ in policies)]
    num_trees = sum(len(trees(log.support.depth, w, num_kept)) for w in tree_widths(log.support))
    with progress("settings tuned", log.support.depth + num_trees + 2 * len(widths)) as tick:
        maker = _Maker(
            summaries=summaries,
            ranked=ranked,
            matched=matched,
            runs=list(zip(labels, runs, strict=True)),
            train=np.isin(np.array(positions.prompt_ids)[positions.prompt], sides.train),
            support=log.support,
            clock=clock,
            num_kept=num_kept,
            tick=tick,
        )
        rungs, best_static = maker.rungs()
    return TalliedRungs(rungs, best_static, positions.prompt[~maker.train], sides, estimates)


@dataclass(frozen=True)
class _Maker:
    """Makes rungs of the figures that were read; `train`: `[Q]`, the request is a training one."""

    summaries: dict[int, Summary]
    ranked: dict[tuple[str, int], Ranked]
    matched: Ints
    runs: list[tuple[str, Rounds]]
    train: Bools
    support: Support
    clock: LoadClock
    num_kept: int
    tick: Tick

    def rungs(self) -> tuple[list[RungTally], str]:
        """All rungs, and the label of the static one that training prompts preferred."""
        statics = [self._static(kind) for kind in ("chain", "tree")]
        _, best = max(statics, key=lambda pair: pair[0].tokens_per_us)
        plain, *policies = self._policies()
        limits = [*self._estimates(plain.tally.tokens_per_us), *self._bounds()]
        return [plain, *(rung for _, rung in statics), *policies, *limits], best.label

    def _static(self, kind: RungKind) -> tuple[TunedStatic, RungTally]:
        """The fastest chain or tree on training prompts, measured on the others."""
        depth = self.support.depth

        def candidates() -> Iterator[tuple[Summary, Chain | StaticTree]]:
            for width in (1,) if kind == "chain" else tree_widths(self.support):
                side = take_requests(self.summaries[width], self.train)
                shapes: Sequence[Chain | StaticTree] = (
                    chains(depth) if kind == "chain" else trees(depth, width, self.num_kept)
                )
                yield from ((side, shape) for shape in shapes)

        tuned = fastest(candidates(), self.clock, self.tick)
        width = 1 if isinstance(tuned.shape, Chain) else tuned.shape.top_k
        summary = take_requests(self.summaries[width], ~self.train)
        found = tally(summary.positions, decide_static(summary, tuned.shape), self.clock)
        setting = f"fastest of {tuned.num_settings} on training prompts"
        return tuned, RungTally(kind, tuned.spec, setting, found)

    def _policies(self) -> Iterator[RungTally]:
        held_out = ~self.train
        for label, run in self.runs:
            is_plain, inside = run.policy == PLAIN, held_out[run.request]
            yield RungTally(
                "plain" if is_plain else "policy",
                label,
                "no drafting" if is_plain else "as given",
                tally_rounds(run, self.clock).of(held_out),
                run.outcomes.at(inside).support,
            )

    def _estimates(self, plain_per_us: float) -> Iterator[RungTally]:
        """The best trees, at the width and price at which training prompts settle.

        An oracle may leave its knowledge unused, so R_prob takes the estimate that served the
        training prompts better.
        """
        priced: dict[tuple[str, int], tuple[float, float]] = {}
        for key, ranked in self.ranked.items():
            priced[key] = tune_price(take_requests(ranked, self.train), self.clock, plain_per_us)
            self.tick()
        sides: dict[RungKind, tuple[str, ...]] = {
            "features": ("features",),
            "oracle": ("features", "oracle"),
        }
        for kind, names in sides.items():
            keys = [key for key in priced if key[0] in names]
            best = max(keys, key=lambda key: priced[key][1])
            price, (name, width) = priced[best][0], best
            held_out = take_requests(self.ranked[best], ~self.train)
            decided = best_trees(held_out, tree_times(held_out, self.clock), price)
            found = tally(held_out.positions, decided, self.clock)
            setting = f"estimate {name}, width {width}, λ* {1e6 * price:.4g} tokens/s"
            yield RungTally(kind, LIMITS[kind], setting, found)

    def _bounds(self) -> Iterator[RungTally]:
        everything: Positions = next(iter(self.summaries.values())).positions
        positions = everything.take(~self.train)
        reach = self.matched[everything.rows_of(~self.train)]
        always = np.full_like(reach, self.support.depth)
        knowing: dict[RungKind, tuple[Ints, str]] = {
            "clairvoyant": (reach, "knows the path inside the logged tree"),
            "ceiling": (always, "every draft token accepted"),
        }
        for kind, (far, setting) in knowing.items():
            decided = clairvoyant(positions, far, self.clock)
            yield RungTally(kind, LIMITS[kind], setting, tally(positions, decided, self.clock))


# ------------------------------------------------------------------------- from sums to distances


@dataclass(frozen=True)
class RungSums:
    """Sums of several rungs by prompt, side by side, and figures over them.

    Attributes:
        table: `[P, E * S]`, a rung's sums after another's.
    """

    table: Floats
    labels: tuple[str, ...]
    resamples: Resamples

    @classmethod
    def of(cls, rungs: Sequence[RungTally], prompt: Ints, seed: int) -> RungSums:
        """`prompt`: `[Q]` codes of the held-out requests."""
        _, codes = np.unique(prompt, return_inverse=True)
        num = int(codes.max()) + 1
        table = np.concatenate([sums_by(codes, num, rung.tally.sums) for rung in rungs], 1)
        labels = tuple(rung.label for rung in rungs)
        return cls(table, labels, Resamples.draw(num, seed=seed))

    def interval(self, figure: Figure) -> Interval:
        """A figure of sums `[..., E * S]`."""
        return self.resamples.interval(self.table, figure)

    def column(self, label: str, name: str) -> Figure:
        """One sum of one rung."""
        index = self.labels.index(label) * len(SUMS) + SUMS.index(name)
        return lambda sums: sums[..., index]

    def rate(self, label: str) -> Figure:
        """tokens/s of one rung."""
        tokens, time_us = self.column(label, "tokens"), self.column(label, "time_us")
        return lambda sums: 1e6 * tokens(sums) / time_us(sums)

    def less(self, label: str, other: str) -> Figure:
        """tokens/s of one rung less another's."""
        ours, theirs = self.rate(label), self.rate(other)
        return lambda sums: ours(sums) - theirs(sums)

    def over(self, label: str, other: str) -> Figure:
        """tokens/s of one rung over another's."""
        ours, theirs = self.rate(label), self.rate(other)
        return lambda sums: ours(sums) / theirs(sums)

    def gap_closed(self, label: str, static: str) -> Interval | None:
        """The share of the way from the best static rung to the oracle; None without a gap."""
        gap = self.less(LIMITS["oracle"], static)
        if self.interval(gap).low <= 0:
            return None
        ours = self.less(label, static)
        return self.interval(lambda sums: ours(sums) / gap(sums))

    def measured(self, rung: RungTally, static: str) -> Rung:
        """One rung; `static` is the label of the best static one."""
        label, total = rung.label, rung.tally.total
        accepted, calls = self.column(label, "accepted"), self.column(label, "calls")
        regret = None
        if rung.kind in RUNNABLE:
            regret = self.interval(self.less(LIMITS["features"], label))
        return Rung(
            kind=rung.kind,
            label=label,
            setting=rung.setting,
            num_tokens=int(total("tokens")),
            calls=int(total("calls")),
            verified_tokens=int(total("verified")),
            num_accepted=int(total("accepted")),
            drafted_levels=int(total("levels")),
            time_us=total("time_us"),
            tokens_per_s=self.interval(self.rate(label)),
            mean_acceptance_length=self.interval(lambda s: 1 + accepted(s) / calls(s)),
            against_static=self.interval(self.over(label, static)),
            gap_closed=self.gap_closed(label, static),
            policy_regret=regret,
            support=rung.support,
            is_marked=rung.support < MARKED_BELOW,
            is_estimate=rung.kind in ("features", "oracle"),
        )

    def loss_split(self, static: str) -> LossSplit:
        """The distances between the limits."""
        over = self.over(LIMITS["oracle"], static)
        return LossSplit(
            irreducible=self.interval(self.less(LIMITS["clairvoyant"], LIMITS["oracle"])),
            drafter=self.interval(self.less(LIMITS["oracle"], LIMITS["features"])),
            headroom=self.interval(lambda sums: over(sums) - 1),
        )
