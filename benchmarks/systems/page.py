"""The generated part of docs/systems.md: the findings in sentences, then the tables.

python -m benchmarks.systems.page     the page anew, from benchmarks/results
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.systems.figures import BASE_TOKENS, Row, Side
from scripts.pages import interval, table, with_part
from specctl.replay.cost.model import CostModel

ROOT = Path(__file__).parents[2]
NAME = "systems-cpu.json"
RESULTS, PAGE = ROOT / "benchmarks/results", ROOT / "docs/systems.md"
PART = ("systems", "benchmarks/systems/page.py")
"""Name of the part of the page, and its script."""
LEAST_SUPPORT = 0.99
"""Of a row without a mark: the share of what its policy asked for that the log holds."""

# --------------------------------------------------------------------------- facts


def counts(side: Side) -> Row:
    """Prompts by category, and tokens."""
    from specctl.policy import RootOnly

    plain = side.sums([RootOnly()])[0]
    rounds = side.traces.scan("rounds").select("prompt_id", "category").unique().collect()
    categories = Counter(rounds["category"].cast(str).to_list())
    return {
        "categories": dict(sorted(categories.items())),
        "tokens": int(side.column(plain, "tokens").sum()),
    }


def clock_facts(model: CostModel) -> Row:
    """The error of a clock, and whether it failed its own check."""
    return {"time_error": model.time_error, "failed": model.failed_check is not None}


def rungs(ladder: Row) -> Row:
    """The rungs of a ladder over its best static one, and the largest gain of any policy."""
    found = {one["label"]: one["against_static"] for one in ladder["rungs"]}
    kinds = {one["kind"]: one["label"] for one in ladder["rungs"]}
    return {
        "static": ladder["best_static"],
        "setting": next(
            one["setting"] for one in ladder["rungs"] if one["label"] == ladder["best_static"]
        ),
        "plain": found[kinds["plain"]],
        "features": found[kinds["features"]],
        "headroom": ladder["split"]["headroom"],
    }


def judged(report: Row) -> Row:
    """The last setting of a relaxed acceptance beside the strict one."""
    row = report["data"]["rows"][-1]
    names = ("num_prompts", "num_checked", "accuracy", "strict_accuracy", "lost", "gained")
    of = {name: row["comparison"][name] for name in (*names, "speedup", "diverged")}
    return of | {
        "setting": row["setting"],
        "trial": row["trial"],
        "needed": report["data"]["needed"],
    }


# --------------------------------------------------------------------------- the page


def block(result: Row) -> str:
    """Sentences and tables."""
    clocks = list(result["clocks"])
    parts = [textwrap.fill(text, 100) for text in findings(result)]
    parts += ["### Time", textwrap.fill(_of_times(result), 100)]
    families = list(dict.fromkeys(row["family"] for row in result["times"]))
    of_times = {(row["family"], row["clock"]): row for row in result["times"]}
    parts.append(
        table(
            ("family", *clocks),
            [(name, *(_time(of_times[name, clock]) for clock in clocks)) for name in families],
        )
    )
    parts += ["### The papers' settings", textwrap.fill(PRESETS, 100)]
    changes = ("calls", "verified", *clocks)
    parts.append(
        table(
            ("system", "over", "τ", "calls", "verified tokens", *(f"time, {c}" for c in clocks)),
            [
                (
                    f"{row['system']}{_mark(row)}",
                    f"`{row['baseline']}`",
                    interval(row["value"]).text(".2f"),
                    *(percent(row["change"][name]) for name in changes),
                )
                for row in result["presets"]
            ],
        )
    )
    parts += ["### Tokens at equal depth and equal τ", textwrap.fill(EQUAL, 100)]
    parts.append(
        table(
            ("shape", "levels", *(f"N {size}" for size in BASE_TOKENS)),
            [
                (
                    f"{row['shape']}{_mark(row)}",
                    str(row["levels"]),
                    *(percent(row["tokens"].get(str(size))) for size in BASE_TOKENS),
                )
                for row in result["equal_depth"]
            ],
        )
    )
    parts += ["### The ladder", textwrap.fill(LADDER, 100)]
    parts.append(
        table(
            ("clock", "best static", "plain", "best by the draft's features", "largest gain"),
            [
                (
                    name,
                    f"{row['static']}, {row['setting']}",
                    percent(row["plain"], ratio=True),
                    percent(row["features"], ratio=True),
                    percent(row["headroom"]),
                )
                for name, row in result["ladders"].items()
            ],
        )
    )
    parts += ["### Acceptances that change the text"]
    parts += [textwrap.fill(text, 100) for text in lossy(result)]
    return "\n\n".join(parts) + "\n"


PRESETS = (
    "Each system as its paper sets it, over what it starts from, on the same prompts. τ is the "
    "mean acceptance length, bonus included; *calls* and *verified tokens* (roots counted) are "
    "sums."
)
EQUAL = (
    "Verified tokens a call over static trees of as many levels, at the τ that these reach with N "
    "nodes: deeper trees reach a τ with fewer tokens whatever prunes them. *Threshold* keeps every "
    "node whose joint probability reaches one value, and learns nothing. A dash: a curve does not "
    "reach that τ, or the tree has no more nodes than levels."
)
LADDER = (
    "Tokens/s over the best static setting: of plain decoding, of the best tree by the draft's own "
    "features (an estimate), and the largest gain that any policy can have with this drafter."
)


def findings(result: Row) -> Iterator[str]:
    """The gain on every clock, then the ground of the figures."""
    for clock in result["clocks"]:
        rows = [one for one in result["times"] if one["clock"] == clock]
        static, others = rows[0], rows[1:]
        best = min(others, key=lambda row: float(row["time"]["value"]))
        found, room = interval(best["time"]), result["ladders"][clock]["headroom"]
        verdict = (
            "saves" if found.high < 0 else "costs" if found.low > 0 else "changes nothing sure"
        )
        yield (
            f"**On the clock of {clock}** the fastest static setting is `{static['setting']}`, "
            f"{percent(static['over_plain'])} of speed over plain decoding. The best adaptive "
            f"family beside it, {best['family']}, {verdict}: {percent(best['time'])} of time a "
            f"token. The largest gain that any policy can have there is {percent(room)}."
        )
    options, sides = result["options"], result["prompts"]
    numbers = {side: sum(of["categories"].values()) for side, of in sides.items()}
    named = "; ".join(
        f"{side}: "
        + ", ".join(f"{name or 'no category'} {n}" for name, n in of["categories"].items())
        for side, of in sides.items()
    )
    errors = ", ".join(
        f"{name} {of['time_error']:.1%}{' (failed its own check)' * of['failed']}"
        if of["time_error"]
        else f"{name} unknown"
        for name, of in result["clocks"].items()
    )
    yield (
        f"Measured on {result['device']} ({result['num_cpus']} cores), {result['target']} and the "
        f"EAGLE-3 head `{result['head']}`, float32, greedy, at most {options['tokens']} tokens an "
        f"answer, one request. Policies are fitted and settings chosen on {numbers['choose']} "
        f"prompts; the figures are of {numbers['measure']} others, {sides['measure']['tokens']:,} "
        f"tokens ({named}). Every fit is made {options['fits']} times, on four fifths of its "
        "prompts drawn anew; 95 % intervals resample prompts and fits. Dense traces make counts "
        f"exact; times are of the clocks, whose errors beside them are: {errors}. A † marks rows "
        f"of which the log holds less than {LEAST_SUPPORT:.0%} of what the policy asks for; the "
        "rest counts as rejected."
        + "".join(f" The fit of {name} refuses these traces." for name in result["left_out"])
    )


def _of_times(result: Row) -> str:
    return (
        "Time a token over the fastest static setting (plain decoding, chains and trees of every "
        "depth), every family's setting chosen on the other prompts, for each clock: our own loop "
        "and llama.cpp as this machine runs them, and an H100 with Llama-3.1-8B, whose acceptance "
        "is not this pair's. The first row is that setting and its speed over plain decoding."
    )


def lossy(result: Row) -> Iterator[str]:
    """One sentence for each relaxed acceptance."""
    for name, of in result["lossy"].items():
        if of is None:
            yield f"{name}: not judged, since too few questions have an answer to compare with."
            continue
        trial = of["trial"]
        kept = "is certified" if trial["certified"] else "is not certified"
        more = f" (about {of['needed']} prompts would decide)" if of["needed"] else ""
        yield (
            f"{name} at {of['setting']:g}: {interval(of['speedup']).text('.3f')} of the strict "
            f"policy's tokens a call; {of['accuracy']:.1%} right answers of {of['num_checked']}, "
            f"strictly {of['strict_accuracy']:.1%} ({of['lost']} lost, {of['gained']} gained); "
            f"{interval(of['diverged']).text('.1%')} of the texts differ. A loss of at most "
            f"2 % {kept}{more}."
        )


def percent(row: Row | None, *, ratio: bool = False) -> str:
    """`-10.5 % [-11.3, -9.8]`; a dash where the figure is undefined."""
    if row is None or row["value"] is None:
        return "-"
    value, low, high = (
        "?" if row[name] is None else f"{100 * (row[name] - ratio):+.1f}"
        for name in ("value", "low", "high")
    )
    return f"{value} % [{low}, {high}]"


def _time(row: Row) -> str:
    shown = percent(row["over_plain"] if row["family"] == "static" else row["time"])
    return f"{shown} (`{row['setting']}`){_mark(row)}"


def _mark(row: Row) -> str:
    return " †" if row.get("support", 1) < LEAST_SUPPORT else ""


def written(text: str, result: Row) -> str:
    """The page with the block between its markers anew."""
    return with_part(text, *PART, f"\n{block(result)}\n")


def publish(result: Row) -> None:
    """The result and the page."""
    (RESULTS / NAME).write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    PAGE.write_text(written(PAGE.read_text("utf-8"), result), "utf-8")


if __name__ == "__main__":
    publish(json.loads((RESULTS / NAME).read_text("utf-8")))
