"""Where in `report.json` fits put what the manifest's figures are copied from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

Step = str | int
Path = tuple[Step, ...]
CHOSEN = "@chosen"
"""The element of a list that the `chosen` beside the list means: its index, or its `policy`."""
_ROW = ("rows", CHOSEN)
_CLIP = ("clip", "rows", CHOSEN)
_TUNED = ("policies", CHOSEN)
_PATHS: tuple[tuple[str, tuple[Path, ...]], ...] = (
    (r"held_out_auc_level_(\d+)", (("levels", "level={}", "held_out_auc"),)),
    (r"jaccard_depth_(\d+)", (("stability", "max_leaf_depth={}", "jaccard"),)),
    (r"change_at_recall_([\d.e-]+)", (("comparisons", "recall={}", "change"),)),
    (r"held_out_label_(log_loss)", (("label", "{}"),)),
    (r"held_out_(ece)", (("calibration", 0, "{}"),)),
    (r"held_out_(auc|joint_auc)", (("{}",),)),
    (r"held_out_(loss_frac)", (("recall", "{}"),)),
    (r"held_out_cost", (("stop", "rows", -1, "held_out_cost"),)),
    (r"against_best_chain", (("stop", "rows", -1, "against"),)),
    (r"(entropy|distance)_auc", (("stop", "{}", "auc"),)),
    (r"(support)", (("stop", "rows", -1, "{}"),)),
    (r"max_threshold", ((*_CLIP, "clip"),)),
    (r"(theta)", ((*_ROW, "{}"),)),
    (
        r"(tokens_per_call)",
        ((*_ROW, "comparison", "{}"), ("stop", "rows", -1, "{}")),
    ),
    (
        r"(speedup|recovery|diverged|accuracy)",
        ((*_ROW, "comparison", "{}"), (*_CLIP, "comparison", "{}")),
    ),
    (r"(mean_loss|p_value|max_certifiable)", ((*_ROW, "trial", "{}"), (*_CLIP, "trial", "{}"))),
    (r"(num_checked|strict_accuracy)", (("{}",), ("clip", "{}"))),
    (r"(spearman_phi_tcr|spearman_phi_accepted)", (("{}",),)),
    (r"held_out_against_static", ((*_TUNED, "held_out", "against"),)),
    (r"held_out_static_rate", (("policies", 0, "held_out", "rate"),)),
    (r"train_(rate)", ((*_TUNED, "train", "{}"),)),
    (r"(num_settings)", (("{}",),)),
    (
        r"held_out_(\w+)",
        (("held_out", "{}"), ("replayed", "gates", "{}"), (*_TUNED, "held_out", "{}")),
    ),
)
"""By the name of a metric; `{}` is the part of the name in brackets, `FIELD={}` the element of a
list that has it there. The first line whose name fits is the metric's."""
PROMPTS: dict[str, tuple[Path, ...]] = {
    "train": (
        ("prompts", "train"),
        ("num_prompts", "train"),
        ("sides", "train", "num_prompts"),
        ("stop", "num_prompts", "train"),
    ),
    "held_out": (
        ("prompts", "held_out"),
        ("num_prompts", "held_out"),
        ("sides", "held_out", "num_prompts"),
        ("stop", "num_prompts", "held_out"),
    ),
    "paired": (("num_prompts",),),
}
"""Number of prompts by side of the split."""
_NOTHING = object()


class Report:
    """A report that is asked for many figures: what it takes to search it is paid once.

    Attributes:
        tree: the value of `report.json`.
    """

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self._elements: dict[tuple[int, str], dict[str, Any]] = {}

    def holders(self, name: str) -> list[tuple[dict[Any, Any], str, Any]]:
        """What holds a metric where fits of its kind put it, and under which key.

        Returns:
            The object, the key in it, and the object `<name of the object>_interval` beside it,
            which some reports have, or None. Empty where no fit has such a metric, or the report
            has none.
        """
        for pattern, paths in _PATHS:
            part = re.fullmatch(pattern, name)
            if part is not None:
                word = part.group(1) if part.groups() else ""
                filled = [tuple(_filled(step, word) for step in path) for path in paths]
                return [found for path in filled if (found := self._holder(path)) is not None]
        return []

    def at(self, paths: Iterable[Path]) -> list[Any]:
        """What it states at those of some paths that it has."""
        return [found for path in paths if (found := self._at(path)) is not _NOTHING]

    def _holder(self, path: Path) -> tuple[dict[Any, Any], str, Any] | None:
        *before, key = path
        holder = self._at(tuple(before))
        if not isinstance(holder, dict) or key not in holder:
            return None
        above = self._at(tuple(before[:-1])) if before else _NOTHING
        beside = above.get(f"{before[-1]}_interval") if isinstance(above, dict) else None
        return holder, str(key), beside

    def _at(self, path: Path) -> Any:
        found, above = self.tree, None
        for step in path:
            inner = self._child(found, step, above)
            if inner is _NOTHING:
                return _NOTHING
            found, above = inner, found
        return found

    def _child(self, tree: Any, step: Step, above: Any) -> Any:
        if isinstance(tree, dict):
            return tree.get(step, _NOTHING)
        if not isinstance(tree, list):
            return _NOTHING
        if step == CHOSEN:
            chosen = above.get("chosen", "") if isinstance(above, dict) else ""
            return self._element(tree, "policy", chosen)
        field, _, wanted = str(step).partition("=")
        return self._element(tree, field, step if isinstance(step, int) else wanted)

    def _element(self, tree: list[Any], field: str, wanted: Any) -> Any:
        """The element at an index, or the first one that has a text in a field."""
        if isinstance(wanted, int) and not isinstance(wanted, bool):
            return tree[wanted] if -len(tree) <= wanted < len(tree) else _NOTHING
        if not isinstance(wanted, str):
            return _NOTHING
        key = (id(tree), field)  # lists of `self.tree`, which lives as long
        if key not in self._elements:
            said = ((_said(one.get(field)), one) for one in tree if isinstance(one, dict))
            self._elements[key] = {text: one for text, one in reversed(list(said)) if text}
        return self._elements[key].get(wanted, _NOTHING)


def _filled(step: Step, word: str) -> Step:
    return step.replace("{}", word) if isinstance(step, str) else step


def _said(value: Any) -> str | None:
    """A value as a path says it: `recall=0.5`."""
    if isinstance(value, int | float):
        return f"{value:g}"
    return value if isinstance(value, str) else None
