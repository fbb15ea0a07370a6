"""The paper's side studies: feature ablation, hidden sizes, transfer, fine-tuning on little.

Every fit is judged on the same held-out prompts, by the nodes per position that it needs for the
report's recall. All fits share the rows of the main one, so that nothing but their subject differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import numpy as np

from specctl.errors import UsageError
from specctl.policy.records import FfnScorer
from specctl.stats import split_prompts
from specctl.train.c2t import C2TFit, fit_scorer
from specctl.train.c2t_config import C2TConfig
from specctl.train.c2t_report import Study, StudyRow
from specctl.train.curves import Curve, trace_curve
from specctl.train.nodes import Bools, NodeRows, NodeSource
from specctl.train.scored_fit import rule_of

HIDDEN = (2, 6, 12, 24, 36, 48)
"""The paper's sizes (appendix B.3)."""
SMALL_SHARE = 0.1
"""Of a category's training prompts, to fine-tune on (appendix B.4)."""
MOST_SUBSETS_OF = 3
"""Features of which all subsets are fitted; of more, each is left out once."""


def run_study(
    source: NodeSource, fit: C2TFit, *, on_fit: Callable[[int], None] | None = None
) -> Study:
    """All tables; a fit and a pass over the held-out prompts for most of their rows.

    Args:
        on_fit: told after each row.
    """
    study = _Study(source, fit, on_fit or (lambda count: None))
    return Study(
        ablation=tuple(study.ablation()),
        hidden=tuple(study.hidden()),
        transfer=tuple(study.transfer()),
        fine_tuning=tuple(study.fine_tuning()),
    )


class _Study:
    def __init__(self, source: NodeSource, fit: C2TFit, on_fit: Callable[[int], None]) -> None:
        self.source, self.fit, self.config, self.on_fit = source, fit, fit.config, on_fit
        held_out = sorted(set(fit.judged.curve.category))
        self.categories = [name for name in held_out if self._usable(self._of(name))]

    def ablation(self) -> Iterator[StudyRow]:
        """Which features are worth what (Table 1)."""
        names = self.config.nodes.features
        for chosen in _subsets(len(names)):
            features = tuple(names[index] for index in chosen)
            nodes = self.config.nodes.model_copy(update={"features": features})
            config = self.config.model_copy(update={"nodes": nodes})
            columns = self.fit.sides.train.features[:, list(chosen)]
            rows = self.fit.sides.train.with_features(np.ascontiguousarray(columns))
            yield self._whole(" + ".join(features), rows, config)

    def hidden(self) -> Iterator[StudyRow]:
        """How large a network needs to be (appendix B.3)."""
        for hidden in HIDDEN:
            ffn = self.config.ffn.model_copy(update={"hidden": hidden})
            config = self.config.model_copy(update={"ffn": ffn})
            yield self._whole(f"hidden {hidden}", self.fit.sides.train, config)

    def transfer(self) -> Iterator[StudyRow]:
        """Fitted to one category, judged on each (sections 5.2, B.5)."""
        if len(self.categories) < 2:
            return
        yield from self._by_category("all", self.fit.sides.train, self.fit.judged.curve)
        for name in self.categories:
            rows = self.fit.sides.train.take(self._of(name))
            yield from self._by_category(name, rows, self._curve(fit_scorer(rows, self.config)))

    def fine_tuning(self) -> Iterator[StudyRow]:
        """Fitted to the other categories, then to a small share of this one (appendix B.4)."""
        if len(self.categories) < 2:
            return
        for name in self.categories:
            others = self.fit.sides.train.take(~self._of(name))
            few = self._few(name)
            start = fit_scorer(others, self.config)
            yield self._one("others", others, name, self._curve(start))
            if self._usable(few):
                rows = self.fit.sides.train.take(few)
                tuned, alone = (fit_scorer(rows, self.config, start=s) for s in (start, None))
                share = f"{SMALL_SHARE:.0%} of it"
                yield self._one(f"others, then {share}", rows, name, self._curve(tuned))
                yield self._one(f"{share} alone", rows, name, self._curve(alone))

    def _of(self, category: str) -> Bools:
        rows = self.fit.sides.train
        wanted = rows.categories.index(category) if category in rows.categories else -1
        found: Bools = rows.category == wanted
        return found

    def _few(self, category: str) -> Bools:
        """Rows of a small share of the category's prompts."""
        rows = self.fit.sides.train
        codes = np.unique(rows.prompt[self._of(category)])
        if len(codes) < 2:
            return np.zeros(len(rows.prompt), np.bool_)
        names = [rows.prompt_ids[code] for code in codes]
        split = split_prompts(names, held_out_frac=SMALL_SHARE, seed=self.config.seed + 1)
        chosen = [rows.prompt_ids.index(name) for name in split.held_out]
        return np.isin(rows.prompt, chosen)

    def _usable(self, chosen: Bools) -> bool:
        return len(np.unique(self.fit.sides.train.accepted[chosen])) == 2

    def _curve(self, scorer: FfnScorer, config: C2TConfig | None = None) -> Curve:
        rule = rule_of(scorer, config or self.config)
        return trace_curve(self.source, rule, self.fit.sides.split.held_out)

    def _whole(self, name: str, rows: NodeRows, config: C2TConfig) -> StudyRow:
        """Judged on all held-out prompts."""
        curve = self._curve(fit_scorer(rows, config), config)
        calibration = curve.calibration
        figures = {"auc": calibration.auc(), "ece": calibration.by_depth()[0].ece}
        return self._row(name, rows, "all", curve, self.fit.judged.control, **figures)

    def _by_category(self, name: str, rows: NodeRows, curve: Curve) -> Iterator[StudyRow]:
        for category in self.categories:
            yield self._one(name, rows, category, curve)

    def _one(self, name: str, rows: NodeRows, category: str, curve: Curve) -> StudyRow:
        """Judged on one category's held-out prompts."""
        control = self.fit.judged.control.of_category(category)
        return self._row(name, rows, category, curve.of_category(category), control)

    def _row(
        self, name: str, rows: NodeRows, tested_on: str, curve: Curve, control: Curve, **more: Any
    ) -> StudyRow:
        self.on_fit(1)
        recall = self.config.recall
        [own], [joint] = curve.tokens_at_recall(recall), control.tokens_at_recall(recall)
        return StudyRow(
            name=name,
            tested_on=tested_on,
            num_rows=len(rows.accepted),
            num_tokens=None if np.isnan(own) else float(own),
            joint_num_tokens=None if np.isnan(joint) else float(joint),
            **more,
        )


def _subsets(size: int) -> Iterator[tuple[int, ...]]:
    """All subsets of few features; of many, those that lack one, and the whole."""
    least = 1 if size <= MOST_SUBSETS_OF else size - 1
    for number in range(least, size + 1):
        yield from combinations(range(size), number)


def check_study(config: C2TConfig) -> None:
    """A study compares at a recall, so it needs one that the thresholds can be compared at."""
    if config.beta is not None:
        raise UsageError(
            "--study with --beta",
            expected="--recall, at which the fits are compared",
            found=f"--beta {config.beta:g}",
            fix="leave one of them out",
        )
