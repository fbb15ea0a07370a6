"""The tables and the picture of `make smollm2`, and the pages that show them.

    python -m scripts.smollm2.publish FOLDER    the result of a run
    python -m scripts.smollm2.publish           the pages anew, from benchmarks/results

README.md gets the picture and the rows that count, in place of the embedded pair's figures,
docs/llamacpp.md all of it. Figures of pages are never typed: they stand between two markers, and a
test holds them to this script.
"""

from __future__ import annotations

import io
import json
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scripts.pages import interval, table, with_part
from scripts.readme_table import FIGURES
from scripts.smollm2.measuring import AGAIN, DEFAULT, NGRAMS, PLAIN, POLICIES, SYNTHETIC, TUNED
from specctl.stats import Resamples, first_over_second

ROOT = Path(__file__).parents[2]
NAME, PICTURE = "smollm2-cpu.json", "smollm2.svg"
RESULTS, README, PAGE = (
    ROOT / at for at in ("benchmarks/results", "README.md", "docs/llamacpp.md")
)
ALL = "all"
TITLES = {
    PLAIN: "plain decoding",
    DEFAULT: "chain of 3, llama.cpp's default",
    **{f"chain {length}": f"chain of {length}" for length in (1, 2, 5)},
    **{f"stop .{tenth}": f"stop below .{tenth}, at most 5" for tenth in (3, 5, 7)},
    **{name: f"`{name}`" for name in NGRAMS},
    TUNED: "chosen by `tune`",
    AGAIN: "the same once more",
    SYNTHETIC: "default, acceptance made up",
}
INTRODUCTION = """\
`make smollm2` runs a chat model of 135 million parameters, SmolLM2-135M-Instruct, in llama.cpp:
every setting is predicted from one log, and then measured on other prompts. All settings, also for
several requests at a time, are in [docs/llamacpp.md](docs/llamacpp.md).
"""
Row = dict[str, Any]

# --------------------------------------------------------------------------- figures


class Rows:
    """Measured rows of single requests."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.groups = [ALL, *dict.fromkeys(row["category"] for row in rows)]

    def of(self, name: str, group: str = ALL) -> list[Row]:
        return [r for r in self.rows if r["setting"] == name and group in (ALL, r["category"])]

    def sums(self, name: str, group: str) -> NDArray[np.float64]:
        """`[P, 2]`: tokens and seconds by prompt."""
        return np.array([(r["tokens"], r["decode_us"] / 1e6) for r in self.of(name, group)])

    def speed(self, name: str, group: str) -> Row:
        sums = self.sums(name, group)
        return Resamples.draw(len(sums)).interval(sums, first_over_second).to_json()

    def ratio(self, name: str, other: str, group: str = ALL) -> Row:
        """The speed of a setting over another's, paired by prompt."""
        ours, theirs = (self.sums(one, group) for one in (name, other))
        return Resamples.draw(len(ours)).ratio(ours, theirs, first_over_second).to_json()

    def figures(self, name: str, group: str, predicted: Row | None) -> Row:
        chosen = self.of(name, group)
        totals = {n: sum(r[n] for r in chosen) for n in ("tokens", "calls", "drafted", "accepted")}
        of = predicted and next(
            one for one in (predicted["pooled"], *predicted["by_category"]) if one["group"] == group
        )
        return totals | {
            "measured": self.speed(name, group),
            "over_plain": self.ratio(name, PLAIN, group),
            "num_equal": None if name == SYNTHETIC else sum(r["equal"] for r in chosen),
            "predicted": of and of["ratios"]["tokens_per_s"],
            "predicted_calls": of and of["calls"],
        }

    def by_hand_s(self, names: Sequence[str]) -> float:
        """Seconds of trying settings one by one: every server's start, and all prompts once."""
        us = sum(r["decode_us"] + r["prompt_us"] for n in names for r in self.of(n))
        return us / 1e6 + sum(self.of(name)[0]["start_s"] for name in names)


def by_words(facts: Row, slots: str) -> dict[str | None, Row]:
    """Predictions by the words of a policy."""
    words = dict.fromkeys(filter(None, facts["policies"][slots].values()))
    return dict(zip(words, facts["predicted"][slots]["policies"], strict=True))


def summary(facts: Row) -> Row:
    """The figures of a run: what the table and the picture show."""
    rows, told = Rows(facts["rows"]["1"]), by_words(facts, "1")
    settings = [
        {"setting": name, "policy": words}
        | {"groups": {g: rows.figures(name, g, told.get(words)) for g in rows.groups}}
        for name, words in facts["policies"]["1"].items()
    ]
    tries, seconds = [*POLICIES, *NGRAMS], facts["seconds"]
    stages = ("drafter", "answers-choose.jsonl", "traces-choose", "clock-1.json", "tuned-1")
    several = {}
    for slots in [slots for slots in facts["rows"] if slots != "1"]:
        told, measured = (
            by_words(facts, slots),
            {row["setting"]: row for row in facts["rows"][slots]},
        )
        found = []
        for name, words in facts["policies"][slots].items():
            row, of = measured[name], told.get(words)
            speed = row["tokens"] / row["wall_s"]
            found.append(row | {"tokens_per_s": speed, "predicted": of and of["tokens_per_s"]})
        several[slots] = {
            "rows": found,
            "by_hand_s": sum(r["start_s"] + r["wall_s"] for r in found if r["setting"] != TUNED),
            "ours_s": seconds[f"clock-{slots}.json"] + seconds[f"tuned-{slots}"],
        }
    own = ("policy", "tokens_per_s", "mean_acceptance_length", "equal_to_ar", "paired")
    facts_kept = ("device", "num_cpus", "options", "target", "head", "chosen", "num_settings")
    return {name: facts[name] for name in (*facts_kept, "seconds")} | {
        "num_prompts": len(rows.of(PLAIN)),
        "groups": rows.groups,
        "settings": settings,
        "noise": rows.ratio(AGAIN, TUNED),
        "synthetic": rows.ratio(SYNTHETIC, DEFAULT),
        "by_hand_s": rows.by_hand_s(tries),
        "ours_s": sum(seconds[stage] for stage in stages),
        "slots": several,
        "own": [{name: row[name] for name in own} for row in facts["own"]],
    }


# --------------------------------------------------------------------------- the table


def block(result: Row) -> str:
    """The tables, and the sentences between them."""
    groups = result["groups"]
    head = ("setting", "tokens/s", "predicted", "off", "× plain")
    more = (*(f"{name}: × plain" for name in groups[1:]), "calls", "predicted", "same text")
    parts = [table((*head, *more), [_cells(one, groups) for one in result["settings"]])]
    parts += [textwrap.fill(text, 100) for text in sentences(result)]
    for slots, of in result["slots"].items():
        plain = next(row["tokens_per_s"] for row in of["rows"] if row["setting"] == PLAIN)
        cells = []
        for row in of["rows"]:
            speed, told = row["tokens_per_s"], row["predicted"]
            figures = (f"{speed:.1f}", "" if told is None else f"{told:.1f}", _off(told, speed))
            more = (f"{speed / plain:.2f}", str(row["num_equal"]))
            cells.append((TITLES[row["setting"]], *figures, *more))
        names = (f"{slots} requests at a time", *head[1:], "same text")
        parts.append(table(names, cells))
    cells = [
        (
            f"`{row['policy']}`",
            f"{row['tokens_per_s']:.1f}",
            _interval(row["paired"] and row["paired"]["speedup"], "1"),
            f"{row['mean_acceptance_length']:.2f}",
            "yes" if row["equal_to_ar"] else "**no**",
        )
        for row in result["own"]
    ]
    names = ("our own loop, float32", "tokens/s", "× plain", "tokens a call", "same text")
    return "\n\n".join([*parts, table(names, cells)]) + "\n"


def _cells(one: Row, groups: Sequence[str]) -> tuple[str, ...]:
    of, title = one["groups"][ALL], TITLES[one["setting"]]
    told, same = of["predicted"], of["num_equal"]
    return (
        f"{title}: `{one['policy']}`" if one["setting"] == TUNED else title,
        _interval(of["measured"], "", ".1f"),
        _interval(told, "", ".1f"),
        _off(told and told["value"], of["measured"]["value"]),
        *(_interval(one["groups"][group]["over_plain"], "") for group in groups),
        str(of["calls"]),
        "" if told is None else str(of["predicted_calls"]),
        "" if same is None else str(same),
    )


def fastest(result: Row) -> str:
    """The fastest of the settings that were tried by hand."""
    of = {one["setting"]: one["groups"][ALL]["measured"] for one in result["settings"]}
    return max((*POLICIES, *NGRAMS), key=lambda name: float(of[name]["value"]))


def sentences(result: Row) -> list[str]:
    """What the figures were measured on, and what they say."""
    options, chosen = result["options"], result["chosen"]
    of = {one["setting"]: one["groups"][ALL] for one in result["settings"]}
    told = [one for name, one in of.items() if one["predicted"] and name != AGAIN]
    offs = [abs(one["predicted"]["value"] / one["measured"]["value"] - 1) for one in told]
    calls = [abs(one["predicted_calls"] / one["calls"] - 1) for one in told]
    tries, best = [*POLICIES, *NGRAMS], fastest(result)
    share = of[TUNED]["measured"]["value"] / of[best]["measured"]["value"]
    found = [
        f"Measured on {result['device']} ({result['num_cpus']} cores, llama.cpp on "
        f"{options['num_threads']} of them), xllamacpp {options['xllamacpp']}, "
        f"{result['target']} and the EAGLE-3 head `{result['head']}`, greedy, one request at "
        f"a time. n = {result['num_prompts']} held-out prompts, {of[PLAIN]['tokens']} tokens "
        f"({options['max_new_tokens']} an answer at most), every prompt through all settings in an "
        "order that is shuffled anew. tokens/s is Σ tokens / Σ time of decoding; 95% intervals "
        "over prompts, of predictions also of the clock's error.",
        "*Same text*: answers equal to those of plain decoding, token for token.",
        f"Predicted and measured tokens/s differ by {np.median(offs):.1%} in the median and "
        f"{max(offs):.1%} at most, calls by {np.median(calls):.1%} and {max(calls):.1%}. The "
        f"fastest of {len(tries)} is {TITLES[best]}; the choice of `tune` ran at × {share:.2f} of "
        f"it, and once more at × {_interval(result['noise'], '')} of itself. llama.cpp's default "
        f"with acceptance made up at the predicted rates runs at × "
        f"{_interval(result['synthetic'], '')} of its own speed.",
        f"To try the {len(tries)} settings one by one, each with a server of its own and these "
        f"{result['num_prompts']} prompts, took {result['by_hand_s'] / 60:.1f} minutes and finds "
        f"{TITLES[best]}. To collect other prompts, measure the clock and `tune` took "
        f"{result['ours_s'] / 60:.1f} minutes for {result['num_settings']['1']} settings and finds "
        f"`{chosen['1']}`.",
    ]
    for slots, several in result["slots"].items():
        top = max(several["rows"], key=lambda row: float(row["tokens_per_s"]))["setting"]
        found.append(
            f"At {slots} requests at a time (prompts included in the time) {TITLES[top]} is the "
            f"fastest; the settings took {several['by_hand_s'] / 60:.1f} minutes. Clock and `tune` "
            f"took {several['ours_s'] / 60:.1f} minutes more and find `{chosen[slots]}`."
        )
    return found


def _interval(value: Row | None, without: str, spec: str = ".2f") -> str:
    return without if value is None else interval(value).text(spec)


def _off(predicted: float | None, measured: float) -> str:
    return "" if predicted is None else f"{predicted / measured - 1:+.0%}"


# --------------------------------------------------------------------------- the picture


def picture(result: Row) -> str:
    """SVG: tokens/s of every setting, predicted beside measured, for each kind of answer."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    shown = [one for one in result["settings"] if one["setting"] not in (AGAIN, SYNTHETIC)]
    names = [TITLES[one["setting"]].replace("`", "") for one in shown]
    places = np.arange(len(shown))[::-1]
    with mpl.rc_context({"svg.hashsalt": "specctl", "font.size": 9}):
        figure = Figure(figsize=(9.2, 1.3 + 0.32 * len(shown)), layout="constrained")
        FigureCanvasSVG(figure)
        panels = figure.subplots(1, len(result["groups"]) - 1, sharey=True, squeeze=False)[0]
        for axes, group in zip(panels, result["groups"][1:], strict=True):
            of = [one["groups"][group] for one in shown]
            ends = np.array([[*one["measured"].values()] for one in of], float)  # value, low, high
            colours = ["#55a868" if one["setting"] == TUNED else "#4c72b0" for one in shown]
            axes.barh(places, ends[:, 0], 0.62, color=colours, label="measured")
            spread = np.abs(ends[:, 1:] - ends[:, :1]).T
            axes.errorbar(ends[:, 0], places, xerr=spread, fmt="none", ecolor="#222222", capsize=2)
            told = [one["predicted"]["value"] if one["predicted"] else np.nan for one in of]
            axes.plot(told, places, "D", color="#dd8452", mec="white", ms=6, label="predicted")
            axes.set(title=group, xlabel="tokens/s", yticks=places, yticklabels=names)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="x", color="#dddddd")
            axes.set_axisbelow(True)
        legend = panels[0].get_legend_handles_labels()
        figure.legend(*legend, loc="outside lower center", ncols=2, frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return re.sub(r"[ \t]+\n", "\n", buffer.getvalue())


# --------------------------------------------------------------------------- the pages


def headline(result: Row) -> str:
    """The picture, the rows of plain decoding, llama.cpp's default, the fastest one tried and the
    choice of `tune`, and the sentences that say what they were measured on."""
    of = {one["setting"]: one for one in result["settings"]}
    shown = dict.fromkeys((PLAIN, DEFAULT, fastest(result), TUNED))
    rows = [[cells[at] for at in (0, 1, 2, 4, 7, 8)] for cells in
            (_cells(of[name], result["groups"]) for name in shown)]  # fmt: skip
    head = ("setting", "tokens/s", "predicted", "× plain", "calls", "predicted")
    measured = [text for text in sentences(result)[:3] if "Same text" not in text]
    said = [textwrap.fill(text, 100) for text in (INTRODUCTION, *measured)]
    parts = [f"![Settings of llama.cpp, predicted and measured](docs/{PICTURE})", said[0]]
    return "\n\n".join([*parts, table(head, rows), *said[1:]]) + "\n"


def pages(result: Row) -> dict[Path, str]:
    """Each page with its part anew."""
    texts = {page: page.read_text("utf-8") for page in (README, PAGE)}
    return {
        README: with_part(texts[README], *FIGURES, headline(result)),
        PAGE: with_part(texts[PAGE], "smollm2", "scripts/smollm2/publish.py", block(result)),
    }


def write(folder: Path, result: Row) -> None:
    """The result, its table and its picture."""
    (folder / NAME).write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    (folder / "table.md").write_text(block(result), "utf-8")
    (folder / PICTURE).write_text(picture(result), "utf-8")


def main(folder: Path) -> None:
    result = json.loads((folder / NAME).read_text("utf-8"))
    (RESULTS / NAME).write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    (ROOT / "docs" / PICTURE).write_text(picture(result), "utf-8")
    for page, text in pages(result).items():
        page.write_text(text, "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)
