"""From what was read to rungs: tuned on training requests, added up on held-out ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specctl.logs.positions import Bools, Ints
from specctl.logs.tree_log import Support
from specctl.policy.records import Chain, StaticTree
from specctl.replay.config import Tick
from specctl.replay.ladder.clock import LoadClock
from specctl.replay.ladder.config import BOUNDS, LadderConfig
from specctl.replay.ladder.material import PLAIN, Material
from specctl.replay.ladder.oracles import clairvoyant
from specctl.replay.ladder.ranking import Ranked
from specctl.replay.ladder.rate import Priced, best_trees, tree_times, tune_price
from specctl.replay.ladder.rungs import Entry, Kind
from specctl.replay.ladder.static import (
    Tuned,
    chains,
    decide_static,
    fastest,
    swept_widths,
    tree_widths,
    trees,
)
from specctl.replay.ladder.tally import (
    Tally,
    rows_of,
    take_positions,
    take_requests,
    tally,
    tally_rounds,
)
from specctl.replay.rounds import Rounds
from specctl.replay.summary import Summary


@dataclass(frozen=True)
class Maker:
    """Makes rungs of what was read."""

    material: Material
    clock: LoadClock
    config: LadderConfig
    tick: Tick

    def entries(self) -> tuple[list[Entry], str]:
        """All rungs, and the label of the static one that training prompts preferred."""
        statics = [self._static(kind) for kind in ("chain", "tree")]
        _, best = max(statics, key=lambda pair: pair[0].tokens_per_us)
        plain, *policies = self._policies()
        limits = [*self._estimates(plain), *self._bounds()]
        return [plain, *(entry for _, entry in statics), *policies, *limits], best.label

    def _static(self, kind: Kind) -> tuple[Tuned, Entry]:
        """The fastest chain or tree on training prompts, measured on the others."""
        tuned = fastest(self._candidates(kind), self.clock, self.tick)
        width = 1 if isinstance(tuned.shape, Chain) else tuned.shape.top_k
        summary = take_requests(self.material.summaries[width], ~self.material.train)
        found = tally(summary.positions, decide_static(summary, tuned.shape), self.clock)
        setting = f"fastest of {tuned.num_settings} on training prompts"
        return tuned, Entry(kind, tuned.spec, setting, found)

    def _candidates(self, kind: Kind) -> Iterator[tuple[Summary, Chain | StaticTree]]:
        support, kept = self.material.support, self.config.num_kept
        for width in (1,) if kind == "chain" else tree_widths(support):
            side = take_requests(self.material.summaries[width], self.material.train)
            shapes: Sequence[Chain | StaticTree] = (
                chains(support.depth) if kind == "chain" else trees(support.depth, width, kept)
            )
            yield from ((side, shape) for shape in shapes)

    def _policies(self) -> Iterator[Entry]:
        held_out = ~self.material.train
        for label, run in self.material.runs:
            kind: Kind = "plain" if run.policy == PLAIN else "policy"
            setting = "no drafting" if kind == "plain" else "as given"
            found = tally_rounds(run, self.clock).of(held_out)
            yield Entry(kind, label, setting, found, _support(run, held_out))

    def _estimates(self, plain: Entry) -> Iterator[Entry]:
        """The best trees, at the width and price that training prompts settle at.

        Whoever knows what the oracle knows may leave it unused, so R_prob takes the estimate
        that served the training prompts better.
        """
        priced = {
            key: self._price(ranked, plain.tally) for key, ranked in self.material.ranked.items()
        }
        sides: dict[Kind, tuple[str, ...]] = {
            "features": ("features",),
            "oracle": ("features", "oracle"),
        }
        for kind, names in sides.items():
            keys = [key for key in priced if key[0] in names]
            best = max(keys, key=lambda key: priced[key].achieved_per_us)
            yield self._entry_at(kind, best, priced[best].tokens_per_us)

    def _price(self, ranked: Ranked, plain: Tally) -> Priced:
        train = take_requests(ranked, self.material.train)
        found = tune_price(train, self.clock, plain.tokens_per_us)
        self.tick()
        return found

    def _entry_at(self, kind: Kind, key: tuple[str, int], tokens_per_us: float) -> Entry:
        """The trees of an estimate and width at a price, on held-out prompts."""
        held_out = take_requests(self.material.ranked[key], ~self.material.train)
        decided = best_trees(held_out, tree_times(held_out, self.clock), tokens_per_us)
        name, width = key
        setting = f"estimate {name}, width {width}, λ* {1e6 * tokens_per_us:.4g} tokens/s"
        return Entry(kind, BOUNDS[kind], setting, tally(held_out.positions, decided, self.clock))

    def _bounds(self) -> Iterator[Entry]:
        held_out = ~self.material.train
        positions = take_positions(self.material.positions, held_out)
        reach = self.material.matched[rows_of(self.material.positions, held_out)]
        always = np.full_like(reach, self.material.support.depth)
        knowing: dict[Kind, tuple[Ints, str]] = {
            "clairvoyant": (reach, "knows the path inside the logged tree"),
            "ceiling": (always, "every draft token accepted"),
        }
        for kind, (far, setting) in knowing.items():
            decided = clairvoyant(positions, far, self.clock)
            yield Entry(kind, BOUNDS[kind], setting, tally(positions, decided, self.clock))


def _support(run: Rounds, requests: Bools) -> float:
    """The smaller share: of expansions that the log contains, of rounds that it tells whole."""
    inside, o = requests[run.request], run.outcomes
    asked = max(1, int(o.asked[inside].sum()))
    return 1 - max(float(o.missing[inside].sum()) / asked, float(o.open[inside].mean()))


def num_settings(support: Support, config: LadderConfig) -> int:
    """Settings that a `Maker` reports as tuned."""
    widths = swept_widths(support)
    sizes = [len(trees(support.depth, width, config.num_kept)) for width in tree_widths(support)]
    return support.depth + sum(sizes) + 2 * len(widths)
