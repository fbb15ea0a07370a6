"""`specctl replay` and `show` on imported acceptance, and `replay` of a served batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import COST, passes, refuses, specctl
from tests.logs.import_cases import request, write_rows
from tests.replay.costs import table_model
from tests.replay.logs import random_traces

A = request("a", 6, prompt=1, eagle=[1, 4, 1, 3, 1, 2], ngram=[1, 1, 1, 1, 2, 1])
B = request("b", 3, prompt=2, eagle=[1, 1, 2], ngram=[1, 1, 1])
CHAIN = "chain:num_draft_tokens=2"


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two texts. eagle accepts 3, 0, 2, 0, 1 from the positions of `a`, and 0, 1 of `b`."""
    folder = tmp_path_factory.mktemp("imported")
    rows = ({**A, "category": "qa"}, {**B, "category": "code"})
    source = write_rows(folder / "log.jsonl", *rows)
    passes("import", source, "-o", folder / "out", "--offered-depth", "eagle=3,ngram=4")
    return folder / "out"


@pytest.fixture(scope="module")
def cost(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cost") / "cost_model.json"
    path.write_text(json.dumps(COST))
    return path


def replayed(folder: Path, *options: object) -> dict[str, Any]:
    found = specctl("replay", folder, *options, "--json")
    assert found.code == 0, found.err
    document: dict[str, Any] = json.loads(found.out)
    return document


def by_label(document: dict[str, Any]) -> dict[str, Any]:
    return {policy["policy"]: policy.get("pooled", policy) for policy in document["policies"]}


def test_chains_of_every_drafter_by_hand(imported: Path) -> None:
    """Chains of 2: `a` 1 (+2), 4 (0), 5 (1) and `b` 1 (0), 2 (1); ngram accepts once, at 4."""
    document = replayed(imported, "-p", "ar", "-p", CHAIN, "-p", "oracle")
    found = by_label(document)
    words = ("ar", f"eagle/{CHAIN}", f"ngram/{CHAIN}", "eagle/oracle", "ngram/oracle")
    assert tuple(found) == words
    counts = {word: (f["calls"], f["verified_tokens"]) for word, f in found.items()}
    assert counts == dict(zip(words, [(7, 7), (5, 15), (6, 18), (4, 9), (6, 7)], strict=True))
    assert found[words[1]]["against"]["calls"]["value"] == pytest.approx(5 / 7)
    assert document["drafters"]["eagle"] == {"offered_depth": 3, "offered_depth_inferred": False}
    assert document["source"]["name"] == "log.jsonl"


def test_a_chain_beyond_the_log_is_marked_with_bounds(imported: Path) -> None:
    """`a` accepted all three offered tokens at 1: five more would have ended the text there."""
    long = ("-p", "chain:num_draft_tokens=5", "--drafter", "eagle")
    (figures,) = by_label(replayed(imported, *long)).values()
    assert figures["is_marked"]
    assert figures["bounds"]["calls"] == {"low": 3.0, "high": 4.0}
    shown = " ".join(passes("replay", imported, *long).out.split())
    assert "calls between 3 and 4" in shown


def test_tables_name_the_drafters_and_what_they_offered(imported: Path) -> None:
    shown = passes("replay", imported, "-p", CHAIN, "-p", "ar", "--by-category").out
    for named in ("log.jsonl (specdecode-bench), code: 1 prompts", "eagle 3, ngram 4"):
        assert named in shown
    assert f"× is relative to eagle/{CHAIN}" in shown


def test_a_batch_of_one_is_the_replay_without_a_batch(imported: Path, cost: Path) -> None:
    """Waves of one request are the same rounds, at the same times."""
    options = ("-p", "ar", "-p", CHAIN, "-p", "oracle", "--cost-model", cost)
    alone = by_label(replayed(imported, *options))
    waves = by_label(replayed(imported, *options, "--k-table", "[[1,9,2]]"))
    for label, figures in alone.items():
        for name in ("calls", "verified_tokens", "num_tokens"):
            assert waves[label][name] == figures[name], (label, name)
        assert waves[label]["time_us"] == pytest.approx(figures["time_us"])
    same = ("calls", "verified_tokens", "time_us")
    chain, table = waves[f"eagle/{CHAIN}"], waves["eagle/k-table"]
    assert [table[name] for name in same] == [chain[name] for name in same]


def test_a_table_by_batch_size_by_hand(imported: Path, cost: Path) -> None:
    """Two draft tokens while both run, three once `a` is left, at its position 5.

    Steps of 2 + 4, 2 + 4 and 1 + 3 tokens; each costs 1150 + 10 a token + 1 a draft token.
    """
    options = ("--batch-size", 2, "--k-table", "[[1,1,3],[2,4,2]]", "--drafter", "eagle")
    document = replayed(imported, "-p", "ar", *options, "--cost-model", cost)
    table = by_label(document)["eagle/k-table"]
    assert (table["num_steps"], table["calls"], table["verified_tokens"]) == (3, 5, 16)
    assert table["time_us"] == pytest.approx(3 * 1150 + 16 * 10 + 11 * 1)
    assert document["load"]["order"] == "waves"
    assert "until it is empty" in " ".join(
        passes("replay", imported, "-p", "ar", *options).out.split()
    )


def test_times_of_a_measured_table_and_whose_they_are(imported: Path, tmp_path: Path) -> None:
    path = tmp_path / "cost_model.json"
    path.write_bytes(table_model().to_bytes())
    options = ("-p", CHAIN, "--cost-model", path)
    found = specctl("replay", imported, *options)
    assert found.code == 0
    for named in ("does not name its own", "stand for eagle and ngram", "'Test CPU'"):
        assert named in found.err
    assert "tokens/s" in found.out


def test_what_is_printed_is_what_is_written(imported: Path, tmp_path: Path) -> None:
    for load in ((), ("--batch-size", 2)):
        document = replayed(imported, "-p", CHAIN, *load, "-o", tmp_path)
        assert document == json.loads((tmp_path / "replay.json").read_text())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-p", "eagle2"), "more than accepted lengths"),
        (("-p", "svip"), "more than accepted lengths"),
        (("-p", "chain+survival"), "more than accepted lengths"),
        (("-p", "nonsense"), "nonsense"),
        (("-p", "ar,oracle,ar"), "each of them once"),
        (("-p", "oracle", "--drafter", "medusa"), "'medusa'"),
        (("-p", "oracle", "--drafter", "eagle", "--drafter", "eagle"), "each of them once"),
        (("-p", "ar", "--baseline", 2), "--baseline"),
        (("-p", "ar", "--arrival-rate", 3), "--arrival-rate"),
        (("-p", "ar", "--tpot-limit-ms", 3), "--tpot-limit-ms"),
        (("-p", "ar", "--batch-size", 2, "--by-category"), "--by-category"),
        (("-p", "ar", "--k-table", "[[2,3,4]]"), "batch size 1"),
        (("-p", "ar", "--batch-size", 0), "--batch-size"),
    ],
)
def test_refusals(imported: Path, options: tuple[object, ...], message: str) -> None:
    assert message in refuses(2, "replay", imported, *options)


def test_an_import_stands_alone(imported: Path) -> None:
    assert "one import by itself" in refuses(2, "replay", imported, imported, "-p", "ar")


def test_a_damaged_import(imported: Path, tmp_path: Path) -> None:
    (tmp_path / "import.json").write_bytes((imported / "import.json").read_bytes())
    assert "positions.parquet" in refuses(4, "replay", tmp_path, "-p", "ar")
    assert "positions.parquet" in refuses(4, "show", tmp_path)


def test_show(imported: Path) -> None:
    shown = json.loads(passes("show", imported, "--json").out)
    assert shown["header"]["drafters"]["eagle"]["offered_depth"] == 3
    text = passes("show", imported).out
    assert shown["digest"] in text
    assert "ngram" in text


# --------------------------------------------------------------------------- dense, at a load


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense") / "traces"
    random_traces(folder, num_prompts=6, depth=4, top_k=3)
    return folder


TREE = "eagle2:depth=3:top_k=3:num_tokens=8"


def test_rare_arrivals_are_served_alone(dense: Path, cost: Path) -> None:
    """As in the replay, but for two texts that are served twice (`test_batch_laws` is exact)."""
    options = ("-p", TREE, "--cost-model", cost)
    alone = by_label(replayed(dense, *options))[TREE]["ratios"]["mean_acceptance_length"]
    served = replayed(dense, *options, "--arrival-rate", 1e-3)["policies"][0]
    assert served["num_requests"] == 8  # the log of six once, then two again
    whole = served["whole"]["mean_acceptance_length"]["value"]
    assert whole == pytest.approx(alone["value"], rel=0.1)
    assert served["whole"]["requests_per_step"]["value"] == 1.0


def test_a_served_batch_with_budgets_and_goodput(dense: Path, cost: Path, tmp_path: Path) -> None:
    budgets = ("-p", f"{TREE}+survival:max_tokens=12", "-p", f"{TREE}+survival")
    load = ("--batch-size", 3, "--cost-model", cost)
    options = ("-p", "ar", *budgets, *load, "--tpot-limit-ms", 1)
    document = replayed(dense, *options, "-o", tmp_path)
    assert document == json.loads((tmp_path / "replay.json").read_text())
    plain, fixed, _ = document["policies"]
    assert plain["steady"]["verified_per_step"]["value"] == 3.0
    assert fixed["steady"]["verified_per_step"]["value"] <= 12
    assert plain["steady"]["goodput_share"]["value"] == 0.0
    assert fixed["against"]["tokens_per_s"]["low"] > 1
    shown = " ".join(specctl("replay", dense, "-p", budgets[1], *load).out.split())
    assert "batch size 3, closed loop, 8 runs of 24 requests" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--batch-size", 2), "specctl profile"),
        (("--arrival-rate", 0.0, "--cost-model", "COST"), "arrival_rate_per_s"),
        (("--batch-size", 2, "--by-category"), "--by-category"),
        (("--tpot-limit-ms", 5), "--tpot-limit-ms"),
        (("--drafter", "eagle"), "--drafter"),
        (("--k-table", "[[1,4,5]]"), "--k-table"),
    ],
)
def test_loads_that_are_refused(
    dense: Path, cost: Path, options: tuple[object, ...], message: str
) -> None:
    given = [cost if option == "COST" else option for option in options]
    found = specctl("replay", dense, "-p", "ar", *given)
    assert (found.code, found.out) == (2, "")
    assert message in found.err.splitlines()[-1]
