"""Signals of prompts: live rows and a replay of dense ones say the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest

from specctl.artifacts import Origin, save_artifact
from specctl.errors import TraceEmptyError
from specctl.logs.logged_draft import recent_text
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import TEXT_COLUMNS, DenseLog, LiveLog
from specctl.policy import Policy, ScoredTree
from specctl.runtime.load import load_pair, pair_domain
from specctl.runtime.words import resolve_policy
from specctl.watch.signals import (
    COLUMNS,
    COUNTS,
    SIGNALS,
    Prompts,
    _in_time,
    over,
    read_prompts,
    summed,
    watched,
)
from tests.artifacts.examples import EVIDENCE
from tests.cli.command import passes
from tests.policy.scorers import copy_table

LIMIT = ("--limit", 10, "--max-new-tokens", 16, "--threads", 1)
SERVED = {
    "threshold:min_level_prob=0.3:depth=6:top_k=4": "pruned",
    "chain:4": "chain",
    "confidence:threshold=0.5:window=5": "stop",
    "svip:window=5:top_k=4:num_tokens=12:keep_last=true": "stop of a tree",
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    folder = tmp_path_factory.mktemp("dense") / "traces"
    tree = ("--depth", 6, "--children", 4)
    passes("collect", "embedded", "-o", folder, "--dense", *tree, *LIMIT)
    return TraceSet.open(str(folder))


def served_as_replayed(words: object, dense: TraceSet, live: Path) -> Prompts:
    """The prompts of a live run of a policy, after a replay has said the same of each."""
    passes("collect", "embedded", "-o", live, "--policy", words, "--batch-size", 4, *LIMIT)
    policy = resolve_policy(str(words)).policy
    served, replayed = (
        read_prompts(traces, policy) for traces in (TraceSet.open(str(live)), dense)
    )
    place = {name: index for index, name in enumerate(replayed.ids)}
    order = [place[name] for name in served.ids]
    assert served.context.tolist() == replayed.context[order].tolist()
    assert served.category.tolist() == replayed.category[order].tolist()
    for name in COLUMNS:
        expected = replayed.column(name)[order]
        assert served.column(name) == pytest.approx(expected, abs=1e-4, nan_ok=True), name
    assert np.isfinite(served.column("surprise")).all()
    return served


@pytest.mark.parametrize("words", SERVED)
def test_live_rows_and_a_replay_say_the_same(words: str, dense: TraceSet, tmp_path: Path) -> None:
    """Also calibration, at the nodes that were verified, and whichever batch a prompt was in."""
    served = served_as_replayed(words, dense, tmp_path / "live")
    share = served.column("cut_short").sum() / served.column("whole").sum()
    assert 0 < share < 1
    assert all(time.startswith("20") for time in served.finished)


def test_a_scorer_that_reads_the_text_is_watched_on_rounds_alone(
    dense: TraceSet, tmp_path: Path
) -> None:
    """Its texts are put together from roots and accepted tokens."""
    sizes = {"depth": 6, "first_top_k": 1, "second_top_k": 1}
    scored = ScoredTree(scorer=copy_table(), predicts="conditional", beta=0.1, **sizes)
    pair = load_pair("embedded", "embedded", device="cpu")
    origin = Origin(pair=pair.fingerprint, evidence=EVIDENCE, domain=pair_domain(pair))
    save_artifact(tmp_path / "scored", Policy(shape=scored), origin, card="# scored\n")
    served_as_replayed(tmp_path / "scored", dense, tmp_path / "live")
    log = replace(LiveLog.open(TraceSet.open(str(tmp_path / "live"))), reads_text=True)
    texts = {}
    for chunk in DenseLog.open(dense).chunks(extra=TEXT_COLUMNS):
        positions = zip(chunk.positions.row_prompts, chunk.positions.context_tokens, strict=True)
        texts |= dict(zip(positions, recent_text(chunk, slice(None)).tolist(), strict=True))
    for chunk in log.chunks(extra=TEXT_COLUMNS):
        positions = zip(chunk.positions.row_prompts, chunk.positions.context_tokens, strict=True)
        assert chunk.recent.tolist() == [texts[one] for one in positions]


def test_rounds_of_another_policy_are_no_reference(dense: TraceSet, tmp_path: Path) -> None:
    live = tmp_path / "live"
    passes("collect", "embedded", "-o", live, "--policy", "eagle2", "--limit", 1, *LIMIT[2:])
    with pytest.raises(TraceEmptyError, match="hold no rounds of the policy"):
        read_prompts(TraceSet.open(str(live)), resolve_policy("chain").policy)


def rounds_of(**columns: list[object]) -> pl.DataFrame:
    """Rounds of the policy, one a request."""
    names = dict(zip(("verified", "accepted", "emitted"), COUNTS[1:], strict=True))
    table = pl.DataFrame({names.get(name, name): of for name, of in columns.items()})
    return table.with_columns(category=pl.lit("x"), context_tokens=7, is_first=True,
                              other_policy=False)  # fmt: skip


def test_sums_of_rounds_by_hand() -> None:
    """Two prompts; the last round of the first is cut by the end of its text at depth 2."""
    found = summed(
        rounds_of(
            prompt_id=["b", "b", "a"],
            offered_depth=[5, 5, 2],
            verified=[9, 9, 3],
            accepted=[5, 2, 0],
            emitted=[6, 2, 1],
            whole=[True, False, True],
        )
    )
    assert found.ids.tolist() == ["b", "a"]
    first, second = (dict(zip(COLUMNS, row, strict=True)) for row in found.sums)
    assert (first["calls"], first["tokens"], first["verified"]) == (2, 8, 18)
    assert [first[f"tried_{d}"] for d in (1, 2, 3, 4)] == [2, 2, 1, 2]
    assert [first[f"accepted_{d}"] for d in (1, 2, 3, 4)] == [2, 2, 1, 2]
    assert [second[f"tried_{d}"] for d in (1, 2, 3, 4)] == [1, 0, 0, 0]
    assert second["accepted_1"] == 0
    assert (first["whole"], second["whole"]) == (1, 1)


def test_a_round_is_cut_short_where_the_target_refused_nothing() -> None:
    """No draft; all accepted; one refused; all refused."""
    verified, accepted = [1, 5, 5, 5], [0, 4, 3, 0]
    emitted: list[object] = [one + 1 for one in accepted]
    found = summed(rounds_of(prompt_id=[*"abcd"], offered_depth=[4] * 4, verified=[*verified],
                             accepted=[*accepted], emitted=emitted, whole=[True] * 4))  # fmt: skip
    assert found.column("cut_short").tolist() == [1, 1, 0, 0]


def prompts_of(*rows: tuple[str, str, float]) -> Prompts:
    """Prompts of one call each, of a category, with so many tokens."""
    sums = np.zeros((len(rows), len(COLUMNS)))
    sums[:, COLUMNS.index("calls")] = 1
    sums[:, COLUMNS.index("tokens")] = [tokens for _, _, tokens in rows]
    names, categories = (np.array([row[at] for row in rows], object) for at in (0, 1))
    return Prompts(names, categories, np.full(len(rows), "", object), np.ones(len(rows)), sums)


def test_prompts_stand_in_order_of_time_over_all_sets() -> None:
    """Two writers, each with a set: what one of them finishes later comes behind what is there."""

    def segment(minute: int, *names: str) -> SimpleNamespace:
        return SimpleNamespace(name=f"20260131T12{minute:02}00000Z-ab", prompt_ids=names)

    prompts = prompts_of(*((name, "x", 1) for name in "abcd"))
    first, second = [segment(1, "b"), segment(3, "a")], [segment(2, "c")]
    for more, order in (([], "bca"), ([segment(4, "d")], "bcad")):
        parts = [SimpleNamespace(segments=first), SimpleNamespace(segments=[*second, *more])]
        found = _in_time(prompts.take(slice(len(order))), SimpleNamespace(parts=parts))  # type: ignore[arg-type]
        assert "".join(found.ids) == order
    assert found.finished[1] == "2026-01-31 12:02:00"


def test_what_neither_side_tells_is_not_watched() -> None:
    """No level was drafted, so nothing is said of acceptance; one category is no mix."""
    some = prompts_of(("a", "x", 1), ("b", "x", 2))
    found = watched(some, some)
    assert "acceptance" not in found
    assert "categories" not in found
    assert set(found["tokens per call"]) == {"tokens per call"} <= set(SIGNALS)
    mixed = watched(some, prompts_of(("c", "new", 1)))["categories"]
    assert over(mixed["category other"][1]).tolist() == [1.0]
