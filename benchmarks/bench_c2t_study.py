"""C2T's side studies: feature ablation, hidden sizes, transfer, fine-tuning on little, and the
entropy of few tokens.

    python benchmarks/bench_c2t_study.py TRACES...
    python benchmarks/bench_c2t_study.py TRACES... --entropy-tokens 4 16 64 --predicts joint

The second form is Table 6: the entropy of the M likeliest tokens alone, for every M that the traces
hold children of (collect --dense --children 64 --width 10 --no-nested).

Every fit is judged on the same held-out prompts, by the nodes per position that it needs for the
recall of the main one. All fits share the rows of the main one, so that nothing but their subject
differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import Any
from unittest.mock import patch

import numpy as np
import polars as pl
import torch
from common import parser, report

from specctl.logs.logged_draft import _LogSource
from specctl.logs.node_sample import LoggedNodes, NodeRows, logged_nodes
from specctl.logs.positions import Bools
from specctl.logs.trace_set import TraceSet
from specctl.policy import FfnScorer
from specctl.stats import Split, split_prompts
from specctl.train.c2t import fit_network
from specctl.train.configs import C2TConfig, NodeConfig
from specctl.train.curves import Curve, trace_curve
from specctl.train.scored import Judged, Sides, judge, open_rule, read_sides

HIDDEN = (2, 6, 12, 24, 36, 48)
"""The paper's sizes (appendix B.3)."""
SMALL_SHARE = 0.1
"""Of a category's training prompts, to fine-tune on (appendix B.4)."""
MOST_SUBSETS_OF = 3
"""Features of which all subsets are fitted; of more, each is left out once."""


class Study:
    """All fits beside the main one."""

    def __init__(
        self, source: LoggedNodes, prompt_ids: Any, config: C2TConfig, category_of: dict[str, str]
    ) -> None:
        self.source, self.config, self.category_of = source, config, category_of
        self.sides: Sides = read_sides(source, prompt_ids, config)
        self.main = fit_network(self.sides.train, config)
        self.judged: Judged = judge(source, self.main, config, self.sides.split)
        held_out = sorted({category_of[name] for name in self.sides.split.held_out})
        self.categories = [name for name in held_out if self.usable(self.of(name))]
        self.controls = {
            name: judge(source, self.main, config, self.split_of(name)).control
            for name in self.categories
        }

    def ablation(self) -> Iterator[dict[str, Any]]:
        """Which features are worth what (Table 1)."""
        names = self.config.nodes.features
        for chosen in subsets(len(names)):
            features = tuple(names[index] for index in chosen)
            nodes = self.config.nodes.model_copy(update={"features": features})
            config = self.config.model_copy(update={"nodes": nodes})
            columns = np.ascontiguousarray(self.sides.train.features[:, list(chosen)])
            rows = replace(self.sides.train, features=columns)
            yield self.whole("ablation", " + ".join(features), rows, config)

    def hidden(self) -> Iterator[dict[str, Any]]:
        """How large a network needs to be (appendix B.3)."""
        for hidden in HIDDEN:
            ffn = self.config.ffn.model_copy(update={"hidden": hidden})
            config = self.config.model_copy(update={"ffn": ffn})
            yield self.whole("hidden", f"hidden {hidden}", self.sides.train, config)

    def transfer(self) -> Iterator[dict[str, Any]]:
        """Fitted to one category, judged on each (sections 5.2, B.5)."""
        fits = {"all": (self.sides.train, self.main)}
        for name in self.categories:
            rows = self.sides.train.take(self.of(name))
            fits[name] = rows, fit_network(rows, self.config)
        for name, (rows, fit) in fits.items():
            yield from (self.one("transfer", name, rows, c, fit) for c in self.categories)

    def fine_tuning(self) -> Iterator[dict[str, Any]]:
        """Fitted to the other categories, then to a small share of this one (appendix B.4)."""
        share = f"{SMALL_SHARE:.0%} of it"
        for name in self.categories:
            others, few = self.sides.train.take(~self.of(name)), self.few(name)
            start = fit_network(others, self.config)
            yield self.one("fine-tuning", "others", others, name, start)
            if self.usable(few):
                rows = self.sides.train.take(few)
                for title, before in ((f"others, then {share}", start), (f"{share} alone", None)):
                    fit = fit_network(rows, self.config, start=before)
                    yield self.one("fine-tuning", title, rows, name, fit)

    def entropies(self, sizes: list[int]) -> Iterator[dict[str, Any]]:
        """How many of the likeliest tokens the entropy needs (Table 6)."""
        prompt_ids = [*self.sides.split.train, *self.sides.split.held_out]
        for size in sizes:
            with entropy_of(size):
                rows = read_sides(self.source, prompt_ids, self.config).train
                yield self.whole("entropy", f"M = {size}", rows, self.config)
        yield self.whole("entropy", "all", self.sides.train, self.config)

    def of(self, category: str) -> Bools:
        rows = self.sides.train
        chosen = [self.category_of[name] == category for name in rows.prompt_ids]
        return np.array(chosen, np.bool_)[rows.prompt]

    def split_of(self, category: str) -> Split:
        """The held-out prompts of one category; no training prompt is looked at again."""
        held_out = self.sides.split.held_out
        names = tuple(name for name in held_out if self.category_of[name] == category)
        return Split(names, names)

    def few(self, category: str) -> Bools:
        """Rows of a small share of the category's prompts."""
        rows = self.sides.train
        names = [rows.prompt_ids[code] for code in np.unique(rows.prompt[self.of(category)])]
        if len(names) < 2:
            return np.zeros(len(rows.prompt), np.bool_)
        split = split_prompts(names, held_out_frac=SMALL_SHARE, seed=self.config.seed + 1)
        return np.isin(rows.prompt, [rows.prompt_ids.index(name) for name in split.held_out])

    def usable(self, chosen: Bools) -> bool:
        return len(np.unique(self.sides.train.accepted[chosen])) == 2

    def curve(self, scorer: FfnScorer, config: C2TConfig, split: Split) -> Curve:
        return trace_curve(self.source, open_rule(scorer, config), split.held_out)

    def whole(self, study: str, name: str, rows: NodeRows, config: C2TConfig) -> dict[str, Any]:
        """Judged on all held-out prompts."""
        curve = self.curve(fit_network(rows, config), config, self.sides.split)
        row = self.row(study, name, rows, "all", curve, self.judged.control)
        return {**row, "AUC": curve.calibration.auc(), "ECE": curve.calibration.by_depth()[0].ece}

    def one(
        self, study: str, name: str, rows: NodeRows, category: str, scorer: FfnScorer
    ) -> dict[str, Any]:
        """Judged on one category's held-out prompts."""
        curve = self.curve(scorer, self.config, self.split_of(category))
        row = self.row(study, name, rows, category, curve, self.controls[category])
        return {**row, "AUC": None, "ECE": None}

    def row(
        self, study: str, name: str, rows: NodeRows, tested_on: str, curve: Curve, control: Curve
    ) -> dict[str, Any]:
        [own], [joint] = (c.tokens_at_recall(self.config.recall) for c in (curve, control))
        return {
            "study": study,
            "fit": name,
            "tested on": tested_on,
            "rows": len(rows.accepted),
            "nodes": None if np.isnan(own) else float(own),
            "joint": None if np.isnan(joint) else float(joint),
        }


@contextmanager
def entropy_of(size: int) -> Iterator[None]:
    """Has drafts from logs know the entropy of the likeliest `size` tokens alone (Eq. 3)."""
    whole = _LogSource.children

    def children(source: _LogSource, pool: Any, frontier: Any, top_k: int) -> Any:
        found, chunk = whole(source, pool, frontier, top_k), source.chunk
        first = chunk.first_child[source.node.gather(1, frontier.index).clamp(min=0)]
        likeliest = (first[..., None] + torch.arange(size)).clamp(0, chunk.num_nodes - 1)
        logp = chunk.draft_logp[likeliest].clamp(min=-87.0)
        return found._replace(entropy=-(logp.exp() * logp).sum(-1))

    with patch.object(_LogSource, "children", children):
        yield


def subsets(size: int) -> Iterator[tuple[int, ...]]:
    """All subsets of few features; of many, those that lack one, and the whole."""
    least = 1 if size <= MOST_SUBSETS_OF else size - 1
    for number in range(least, size + 1):
        yield from combinations(range(size), number)


def main() -> None:
    wanted = parser(__doc__ or "")
    wanted.add_argument("traces", nargs="+", help="trace sets of one pair")
    wanted.add_argument("--recall", type=float, default=0.8)
    wanted.add_argument("--predicts", default="conditional", help="conditional or joint (paper)")
    wanted.add_argument("--entropy-tokens", type=int, nargs="+", help="M of Table 6, nothing else")
    options = wanted.parse_args()
    opened = TraceSet.open(*options.traces)
    nodes = logged_nodes(opened)
    defaults = NodeConfig.defaults(nodes.support, options.predicts)
    features = tuple(defaults.pop("features"))
    sampled = NodeConfig(features=features, predicts=options.predicts, **defaults)
    config = C2TConfig(nodes=sampled, recall=options.recall)
    named = opened.scan("rounds").select("prompt_id", "category").unique().collect()
    study = Study(nodes, opened.prompt_ids, config, dict(named.cast(pl.String).iter_rows()))
    note = f"nodes per position at recall {options.recall:g}, root counted, held-out prompts"
    if sizes := options.entropy_tokens:
        if max(sizes) > nodes.support.top_k:
            wanted.error(f"the traces hold {nodes.support.top_k} children of a node")
        report("c2t_entropy", [*study.entropies(sizes)], options, note)
        return
    parts = (study.ablation(), study.hidden(), study.transfer(), study.fine_tuning())
    rows = [row for part in parts for row in part]
    report("c2t_study", rows, options, note)


if __name__ == "__main__":
    main()
