"""Where in `report.json` fits put what the manifest's figures are copied from."""

from __future__ import annotations

import re
from collections.abc import Iterator
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


def holders(report: Any, name: str) -> list[tuple[dict[Any, Any], str, Any]]:
    """What holds a metric where fits of its kind put it, and under which key.

    Returns:
        The object, the key in it, and the object `<name of the object>_interval` beside it, which
        some reports have, or None. Empty where no fit has such a metric, or the report has none.
    """
    for pattern, paths in _PATHS:
        part = re.fullmatch(pattern, name)
        if part is not None:
            word = part.group(1) if part.groups() else ""
            filled = [tuple(_filled(step, word) for step in path) for path in paths]
            return [found for path in filled if (found := _holder(report, path)) is not None]
    return []


def count_at(report: Any, paths: tuple[Path, ...]) -> Iterator[Any]:
    """What a report states at each of some paths."""
    for path in paths:
        found = _at(report, path)
        if found is not _NOTHING:
            yield found


def _filled(step: Step, word: str) -> Step:
    return step.replace("{}", word) if isinstance(step, str) else step


def _holder(report: Any, path: Path) -> tuple[dict[Any, Any], str, Any] | None:
    *before, key = path
    holder = _at(report, tuple(before))
    if not isinstance(holder, dict) or key not in holder:
        return None
    above = _at(report, tuple(before[:-1])) if before else _NOTHING
    beside = above.get(f"{before[-1]}_interval") if isinstance(above, dict) else None
    return holder, str(key), beside


def _at(tree: Any, path: Path) -> Any:
    found, above = tree, None
    for step in path:
        inner = _child(found, step, above)
        if inner is _NOTHING:
            return _NOTHING
        found, above = inner, found
    return found


def _child(tree: Any, step: Step, above: Any) -> Any:
    if isinstance(tree, dict):
        return tree.get(step, _NOTHING)
    if not isinstance(tree, list):
        return _NOTHING
    if step == CHOSEN:
        chosen = above.get("chosen", "") if isinstance(above, dict) else ""
        step = chosen if isinstance(chosen, int) else f"policy={chosen}"
    if isinstance(step, int) and not isinstance(step, bool):
        return tree[step] if -len(tree) <= step < len(tree) else _NOTHING
    field, _, wanted = str(step).partition("=")
    fits = (one for one in tree if isinstance(one, dict) and _says(one.get(field), wanted))
    return next(fits, _NOTHING)


def _says(value: Any, wanted: str) -> bool:
    return (f"{value:g}" if isinstance(value, int | float) else value) == wanted
