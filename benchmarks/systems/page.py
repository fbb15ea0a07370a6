"""docs/systems.md out of docs/systems.json: no figure is typed, and what a sentence concludes is
computed, or checked where it is written."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from . import published
from .published import changes, mean_pairs

CLOCKS = {
    "measured": "measured",
    "line": "line",
    "h100-llama-3.1-8b-eagle": "H100",
}
"""Names of the clocks on the page."""
LOW = "echo-paper:thresholds=0.1/0.05/0.02"
"""ECHO with low gates, as `papers.LOW`."""
Row = dict[str, Any]


class OutdatedTextError(Exception):
    """A sentence of the page that the results no longer bear out."""


def holds(condition: object, sentence: str) -> str:
    """The sentence, if the results bear it out.

    Raises:
        OutdatedTextError: they do not: the text has to be written anew.
    """
    if not condition:
        raise OutdatedTextError(f"systems.json no longer says: {sentence}")
    return sentence


def write_page(path: Path, result: dict[str, Any], results: Path) -> None:
    """Writes the page.

    Args:
        result: as systems.json has it. results: folder of the benchmarks of lossy systems.
    """
    path.write_text(page(result, results), "utf-8")
    print(f"wrote {path}")


def page(result: dict[str, Any], results: Path) -> str:
    """The page's text."""
    parts = (
        _head(),
        _papers(result, results),
        _method(result),
        _gates(result),
        _shapes(result),
        _speed(result),
        _long(result),
        _budgets(result),
    )
    return "\n\n".join(block for part in parts for block in part) + "\n"


# --------------------------------------------------------------------------- words of numbers


def change(figure: Row | float | None, *, interval: bool = True) -> str:
    """`-14.2 % [-15.6, -12.8]`."""
    if figure is None:
        return "-"
    if isinstance(figure, int | float):
        return f"{100 * figure:+.1f} %"
    if figure["value"] is None:
        return "-"
    ends = f" [{100 * figure['low']:+.1f}, {100 * figure['high']:+.1f}]" if interval else ""
    return f"{100 * figure['value']:+.1f} %{ends}"


def span(values: Iterable[float]) -> str:
    """`-16.2 to -7.7 %`."""
    found = sorted(values)
    return f"{100 * found[0]:+.1f} to {100 * found[-1]:+.1f} %"


def number(figure: Row, spec: str = ".2f") -> str:
    """A value without its interval."""
    return f"{figure['value']:{spec}}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], aligned: str = "") -> str:
    """A table; `aligned` has a letter a column, l or r, by default l."""
    aligns = aligned or "l" * len(heads)
    lines = [
        "| " + " | ".join(heads) + " |",
        "|" + "|".join("---:" if one == "r" else "---" for one in aligns) + "|",
    ]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def prose(*sentences: str, indent: str = "") -> str:
    """A paragraph, wrapped; with `indent`, an item."""
    first = "- " if indent else ""
    return textwrap.fill(
        " ".join(" ".join(sentences).split()),
        100,
        initial_indent=first,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def below(figure: Row) -> bool:
    """The whole interval lies below 0."""
    return figure["high"] is not None and figure["high"] < 0


def above(figure: Row) -> bool:
    """The whole interval lies above 0."""
    return figure["low"] is not None and figure["low"] > 0


def only(rows: Iterable[Row], **values: Any) -> Row:
    """The one row of these values."""
    found = [row for row in rows if all(row[key] == value for key, value in values.items())]
    assert len(found) == 1, f"{len(found)} rows of {values}"
    return found[0]


def order(rows: Sequence[Row], name: str, figure: str, num_fits: int) -> str:
    """The order of rows by a figure, and the pairs that some fit would turn round."""
    ranked = sorted(rows, key=lambda row: row[figure]["value"])
    unstable = []
    for one, other in combinations(ranked, 2):
        a, b = (
            row[figure]["by_fit"] * (num_fits // len(row[figure]["by_fit"])) for row in (one, other)
        )
        agree = sum(x < y for x, y in zip(a, b, strict=True))
        if agree < num_fits:
            unstable.append(f"*{one[name]}* before *{other[name]}* in {agree} of {num_fits}")
    words = ", ".join(f"*{row[name]}*" for row in ranked)
    rest = "; ".join(unstable)
    said = f"all pairs keep that order in every one of the {num_fits} fits"
    return f"least first: {words}; {said}" + (f" but for these: {rest}." if rest else ".")


# --------------------------------------------------------------------------- parts


def _head() -> Iterable[str]:
    yield "# Systems"
    yield prose("""
        What the five systems are worth on the embedded pair: each as its paper runs it
        ([presets](papers.md)) beside its paper's own figure and baseline, then all of them beside
        controls that published savings tend to lack. The pair is a fixture: read the method and
        the order of the results, not the percentages, as a statement about large models.
    """)
    yield prose("""
        `benchmarks/bench_systems.py` writes this page from [systems.json](systems.json). Every
        figure stands there and in [systems.csv](systems.csv), with its interval and by fit:
    """)
    yield (
        "<!-- not run: an hour of fits and replays over the traces of a whole workload -->\n"
        "```bash\n"
        "python benchmarks/bench_systems.py --traces TRACES... --long CHAINS --work work\n"
        "```"
    )


def _papers(result: dict[str, Any], results: Path) -> Iterable[str]:
    rows = {row["system"]: row for row in result["papers"]}
    hetero, echo, low = rows["HeteroSpec"], rows["ECHO"], rows[LOW]
    c2t = [rows[f"C2T, {size} nodes"] for size in (32, 60)]
    stop = {r["stop"]: r for r in result["long"] if r["part"] == "all"}
    mars, adasd = Sampled.of(results, "embedded"), Sampled.of(results, "embedded:small")
    echo_mat = changes(mean_pairs(published.ECHO_MAT))
    batch = only(
        result["budgets"], load=8, shape="echo-batch-paper", budget="ECHO", tokens_a_request=4
    )
    yield "## The papers' figures and ours"
    yield table(
        (
            "system",
            "the paper's figure, over its baseline",
            "ours, over the same baseline",
            "why they differ",
        ),
        [
            (
                "HeteroSpec",
                f"Table 1, four models: calls {span(changes(published.HETERO_CALLS))}, verified"
                " tokens"
                f" {span(changes(published.HETERO_TOKENS))} over EAGLE-3",
                f"calls {change(hetero['calls_over_baseline'])}, tokens"
                f" {change(hetero['verified_over_baseline'])} over EAGLE-3's tree of 8 levels",
                "what it saves, deeper trees save: against static trees of its own"
                f" {hetero['levels']} levels {change(hetero['tokens_at_equal_tau_static'])} tokens"
                " at its τ",
            ),
            (
                "C2T",
                f"Table 2, six models: verified tokens {span(changes(published.C2T_TOKENS))} over"
                f" EAGLE-2 at about its τ (“{published.C2T_QUOTE}”)",
                "; ".join(
                    f"{change(row['tokens_at_equal_tau_baseline'])} at the τ of EAGLE-2 with"
                    f" {row['system'].split()[1]} nodes"
                    for row in c2t
                )
                + f", 11 levels; the log holds {100 * min(r['support'] for r in c2t):.0f} % of what"
                " it asks for",
                "the plain threshold of joint probability, which learns nothing, has"
                f" {' and '.join(change(r['threshold_at_equal_tau_baseline']) for r in c2t)}",
            ),
            (
                "ECHO, one request",
                f"Table 1, six models: accepted tokens {span(echo_mat)}, speed"
                f" {span(changes(published.ECHO_SPEED))} over EAGLE-3",
                f"τ {change(echo['tau_over_baseline'])}, drafted levels"
                f" {change(echo['levels_over_baseline'])}, tokens"
                f" {change(echo['verified_over_baseline'])} over EAGLE-3 (8 levels, 60 nodes)",
                "a closed gate ends the draft, and one request has nobody to give its tokens to."
                " Youden's J closes too often; bars of .1, .05, .02, set by hand on prompts that"
                " overlap these, cost"
                f" {change(low['tau_over_baseline'])} of τ, the paper's order of loss, for"
                f" {change(low['levels_over_baseline'])} levels",
            ),
            (
                "ECHO, a batch",
                f"section 5.2, batch 256: tokens/s {span(changes(published.ECHO_HIGH_LOAD))} over"
                " EAGLE-3",
                f"batch 8, 4 tokens a request: τ {change(batch['tau_over_static'])} over static"
                " trees of as many tokens and levels",
                "the paper's baseline verifies 60 nodes a request at any load; ours verifies what"
                " the budget allows",
            ),
            (
                "MARS, T = 1",
                f"Table 1, six models: τ {span(changes(published.MARS_TAU))} over EAGLE-3",
                f"by its Algorithm 1 {mars.ratio('margin: sound, tree')} over the lossless tree",
                "the released sampler is another rule ([MARS](mars.md)); its baseline draws no"
                " drafts either: over a chain of drawn drafts, which is lossless, the"
                f" lossless tree stands at {mars.ratio('tree over sampled drafts')}",
            ),
            (
                "AdaSD, stop alone",
                f"Tables 3 and 4: speed {span(changes(published.ADASD_GEN))} over a chain of 5",
                f"cost a token, long texts: {change(stop['AdaSD (paper)']['cost_over_chain_5'])}",
                "needs long texts ([below](#long-texts)); on short ones it is no gain",
            ),
            (
                "AdaSD, both, T = 1",
                f"the same: {span(changes(published.ADASD_BOTH))}; over assisted generation"
                f" {span(changes(published.ADASD_ASSISTED))}",
                f"tokens a call {adasd.ratio('AdaSD over sampled drafts')} over a chain of drawn"
                f" drafts, {adasd.ratio('AdaSD over assisted generation')} over transformers'",
                "calls and not time; the text is no longer the target's ([AdaSD](adasd.md))",
            ),
        ],
    )
    yield prose(f"""
        MARS and AdaSD's acceptance change the text, so no log tells what they would do next. Their
        rows are paired live runs over {mars.num} prompts (`benchmarks/bench_sampled.py`). What a
        relaxed threshold may cost in right answers is [certified](mars.md).
    """)


class Sampled:
    """Ratios of live runs at T = 1 with one drafter."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    @classmethod
    def of(cls, results: Path, drafter: str) -> Sampled:
        rows = json.loads((results / "sampled-cpu.json").read_text("utf-8"))["rows"]
        return cls([row for row in rows if row["drafter"] == drafter and row["T"] == 1.0])

    def ratio(self, name: str) -> str:
        """Of the comparison of that name, with its interval."""
        found = [row["ratio"] for row in self.rows if row["what"].startswith(f"{name}: (")]
        assert len(found) == 1, f"{len(found)} comparisons named {name}"
        return f"× {found[0]}"

    @property
    def num(self) -> int:
        """Prompts."""
        return int(self.rows[0]["n"])


def _method(result: dict[str, Any]) -> Iterable[str]:
    data = result["data"]
    num_fits = len(data["fit_seeds"])
    yield "## How it was measured"
    yield prose(f"""
        {data["num_train"] + data["num_held_out"]} prompts in {data["num_categories"]} categories,
        greedy, 64 new tokens, EAGLE-3 head. {data["num_train"]} prompts fit policies and choose
        settings; the other {data["num_held_out"]} ({data["num_tokens"]:,} tokens) are measured, the
        same for every row. Traces are dense and replay is exact: calls and verified tokens, roots
        counted, are those of a live run.
    """)
    items = (
        f"""
        **Fits.** Every fit is made {num_fits} times, each to a bootstrap resample of the training
        prompts and with a seed of its own, and chooses its own settings. Figures are means over
        the fits. Intervals (95 %) resample prompts and fits together; every comparison uses the
        same resamples.
        """,
        """
        **Equal τ, equal depth.** Verified tokens a call over those that static trees of as many
        levels need for the same mean acceptance length. A policy that verifies less and accepts
        less has saved nothing, and deeper trees reach a τ with fewer tokens whatever prunes them.
        """,
        """
        **Threshold** keeps every node whose joint probability reaches one value: what is learned
        has to beat what the drafter says anyway.
        """,
        f"""
        **Time** is a [cost model's](cost-model.md): *measured*, this machine's profile of the pair
        ({data["cost_measured"]}, without a policy's own decisions); *line*, a stated accelerator (5
        ms a verification, 20 us a token, 0.3 ms a level); *H100*, published rates of Llama-3.1-8B
        with EAGLE, of chains, so that the width of a tree's level costs nothing on it. The last two
        time another machine; acceptance is this pair's.
        """,
    )
    yield "\n".join(prose(item, indent="  ") for item in items)


def _gates(result: dict[str, Any]) -> Iterable[str]:
    names = {
        LOW: "bars of .1, .05, .02",
        "ECHO": "fitted gates (Youden's J)",
        "ECHO, dense gates": "fitted gates at every level that tells",
        "echo-paper": "the paper's bars (.2, .35, .5)",
        "echo-fixed": "one bar, .35",
        "echo-dense": "a gate at every level, bars between the paper's",
    }
    rows = {row["system"]: row for row in result["papers"] if row["system"] in names}
    yield "## ECHO's gates, one request"
    first = rows["ECHO"]
    yield prose(f"""
        Over EAGLE-3's tree (τ {number(first["tau_of_baseline"])}, utilisation
        {number(first["utilisation_of_baseline"])} accepted tokens a drafted level). The last column
        is the control: τ over that of a static tree of 8 levels which verifies as many tokens.
    """)
    yield table(
        ("gates", "τ", "drafted levels", "verified tokens", "utilisation", "τ at equal tokens"),
        [
            (
                words,
                change(rows[name]["tau_over_baseline"]),
                change(rows[name]["levels_over_baseline"]),
                change(rows[name]["verified_over_baseline"]),
                number(rows[name]["utilisation"]),
                change(rows[name]["tau_at_equal_tokens_static"]),
            )
            for name, words in names.items()
        ],
        "lrrrrr",
    )


def _shapes(result: dict[str, Any]) -> Iterable[str]:
    sizes = sorted({row["num_tokens"] for row in result["shapes"]})
    names = list(dict.fromkeys(row["shape"] for row in result["shapes"]))
    num_fits = len(result["data"]["fit_seeds"])
    yield "## Tokens at equal depth and equal τ"
    yield prose("""
        Verified tokens over static trees of as many levels, at the τ that these reach with N
        nodes. HeteroSpec's control is as deep as its deepest bin.
    """)
    body = []
    for name in names:
        of = {row["num_tokens"]: row for row in result["shapes"] if row["shape"] == name}
        levels = str(next(iter(of.values()))["levels"])
        body.append((name, levels, *(change(of[size]["tokens"]) for size in sizes)))
    yield table(
        ("shape", "levels", *(f"N {size}" for size in sizes)), body, "lr" + "r" * len(sizes)
    )
    at = [row for row in result["shapes"] if row["num_tokens"] == 16]
    known = [row for row in at if row["tokens"]["value"] is not None]
    least = min(row["support"] for row in result["shapes"])
    yield prose(f"""
        At N 16, {order(known, "shape", "tokens", num_fits)} A dash: a fit's curve does not reach
        that τ. The log holds at least {100 * least:.0f} % of what any shape asked for (`support`);
        what it lacks counts as rejected, against the shape.
    """)


def _speed(result: dict[str, Any]) -> Iterable[str]:
    rows = [row for row in result["speed"] if row["family"] not in ("static",)]
    num_fits = len(result["data"]["fit_seeds"])
    names = list(dict.fromkeys(row["family"] for row in rows))
    at_one = {(row["clock"], row["family"]): row for row in rows if row["load"] == 1}
    yield "## Time"
    yield prose("""
        Time a token over the tuned static setting (chains and trees of every depth; plain decoding
        is one), each family's setting chosen on training prompts. In brackets, the most levels of
        the setting, and its time over the fastest static setting of just as many levels: what is
        left when depth is taken out. The survival table is [the marginal rule](survival.md), of
        nodes and of levels. One request:
    """)

    def cell(row: Row) -> str:
        equal = change(row["time_over_static_of_that_depth"], interval=False)
        return f"{change(row['time_over_static'])} ({row['levels']}: {equal})"

    yield table(
        ("family", *CLOCKS.values()),
        [(name, *(cell(at_one[clock, name]) for clock in CLOCKS)) for name in names],
        "l" + "r" * len(CLOCKS),
    )
    lines = []
    for clock, words in CLOCKS.items():
        for load in sorted({row["load"] for row in rows if row["clock"] == clock}):
            static = only(result["speed"], clock=clock, load=load, family="static")
            here = [row for row in rows if row["clock"] == clock and row["load"] == load]
            best = min(here, key=lambda row: row["time_over_static"]["value"])
            beats = below(best["time_over_static"])
            others = [
                row["family"] for row in here if below(row["time_over_static"]) and row is not best
            ]
            lines.append(
                (
                    words,
                    str(load),
                    static["setting"],
                    best["family"],
                    change(best["time_over_static"]),
                    (", ".join(others) or "none") if beats else "nothing is",
                )
            )
    yield prose("""
        At every load, the family of the least time, and the others that are clearly faster than
        tuned static (whole interval below 0):
    """)
    yield table(
        ("clock", "requests", "tuned static", "least time", "time", "also faster"),
        lines,
        "lrllrl",
    )
    yield prose(
        *(
            f"At one request on the {words} clock, "
            + order([at_one[clock, name] for name in names], "family", "time_over_static", num_fits)
            for clock, words in CLOCKS.items()
        )
    )


def _long(result: dict[str, Any]) -> Iterable[str]:
    rows = result["long"]
    first = rows[0]
    parts = list(dict.fromkeys(row["part"] for row in rows))
    names = list(dict.fromkeys(row["stop"] for row in rows))
    cold = only(rows, stop="AdaSD (paper)", part="all")
    yield "## Long texts"
    yield prose(f"""
        {first["num_texts"]} greedy texts of 576 tokens, cost a token in target forwards, a drafted
        level 0.1, over the paper's chain of 5. Windows are 16 of the paper's 20. The pair
        loops on such texts:
        {100 * first["repeated"]:.0f} % of their runs of 8 tokens have been there before, which
        favours long drafts.
    """)
    yield table(
        (
            "stop",
            *(f"tokens {part}" if part[0] == "f" else part for part in parts),
            "drafted a call",
        ),
        [
            (
                name,
                *(change(only(rows, stop=name, part=p)["cost_over_chain_5"]) for p in parts),
                number(only(rows, stop=name, part="all")["drafted_per_call"], ".1f"),
            )
            for name in names
            if name != "chain 5"
        ],
        "l" + "r" * (len(parts) + 1),
    )
    confident = only(rows, stop="confidence 0.5", part="all")
    yield prose(
        holds(
            below(cold["cost_over_chain_5"]),
            "On long texts the stop gains, as its paper says.",
        ),
        holds(
            only(rows, stop="AdaSD (paper)", part="first 128")["cost_over_chain_5"]["value"]
            > cold["cost_over_chain_5"]["value"],
            "The first 128 tokens gain less: until rejections are seen, drafts run to the window.",
        ),
        holds(
            confident["cost_over_chain_5"]["value"] < cold["cost_over_chain_5"]["value"],
            "A fixed bar of confidence, which learns nothing, gains as much.",
        ),
    )


def _budgets(result: dict[str, Any]) -> Iterable[str]:
    rows = result["budgets"]
    yield "## Shared budgets"
    yield prose("""
        A batch verifies K tokens a round. τ over the static tree of equal tokens and depth, one
        such tree a request:
    """)
    shown = [
        row for row in rows if row["load"] in (8, 32) and row["tokens_a_request"] in (4, 8, 16, 32)
    ]
    kinds = list(dict.fromkeys((row["shape"], row["budget"], row["load"]) for row in shown))
    sizes = sorted({row["tokens_a_request"] for row in shown})
    body = []
    for shape, budget, load in kinds:
        of = {
            row["tokens_a_request"]: row
            for row in shown
            if (row["shape"], row["budget"], row["load"]) == (shape, budget, load)
        }
        cells = (change(of[size]["tau_over_static"]) for size in sizes)
        body.append((shape, budget, str(load), *cells))
    yield table(
        ("shape", "budget", "requests", *(f"{size} tokens" for size in sizes)),
        body,
        "llr" + "r" * len(sizes),
    )
    survival = [row for row in shown if row["budget"] == "survival" and "eagle2" in row["shape"]]
    small = [row for row in survival if row["tokens_a_request"] == 4]
    yield prose(
        holds(
            all(above(row["tau_over_static"]) for row in small),
            "`survival` is the recommended budget wherever requests share one: it gains where"
            " tokens"
            " are scarce, and nowhere stands below ECHO's.",
        )
        if _nowhere_below(shown)
        else "`survival` gains where tokens are scarce.",
    )


def _nowhere_below(rows: list[Row]) -> bool:
    return all(
        not above(row["tau_over_survival"]) for row in rows if row["budget"].startswith("ECHO")
    )
