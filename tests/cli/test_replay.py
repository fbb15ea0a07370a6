"""`specctl replay` and `fit cart` on dense traces, from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import COST, passes, refuses, specctl
from tests.replay.logs import random_traces


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense") / "traces"
    random_traces(folder, num_prompts=6, depth=6, top_k=3)
    return folder


def test_a_table_for_people(dense: Path) -> None:
    shown = passes("replay", dense, "-p", "ar", "-p", "eagle2:depth=4:top_k=3:num_tokens=9").out
    assert "6 prompts, 768 tokens, greedy" in shown
    assert "eagle2:depth=4:top_k=3:num_tokens=9" in shown
    assert "× is relative to ar" in shown


def test_json_for_scripts_and_a_file_of_the_same(dense: Path, tmp_path: Path) -> None:
    options = ("-p", "ar", "-p", "chain", "--baseline", "2", "-o", tmp_path / "out", "--json")
    found = specctl("replay", dense, *options)
    document = json.loads(found.out)
    assert document == json.loads((tmp_path / "out" / "replay.json").read_text())
    assert document["baseline"] == "chain"
    assert document["support"] == {"top_k": 3, "width": 3, "depth": 6, "nested": True}
    plain, chain = document["policies"]
    assert plain["pooled"]["calls"] == plain["pooled"]["num_tokens"] == 768
    assert chain["pooled"]["against"]["calls"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert [figures["group"] for figures in chain["by_category"]] == ["arithmetic", "code", "prose"]


def test_threads_change_nothing(dense: Path) -> None:
    options = ("-p", "eagle2:depth=5:top_k=2:num_tokens=8", "-p", "svip", "--json")
    one, two = (specctl("replay", dense, *options, "--threads", n).out for n in ("1", "2"))
    assert one == two


def test_a_cost_model_adds_times_and_says_whose_they_are(dense: Path, tmp_path: Path) -> None:
    cost = tmp_path / "cost_model.json"
    cost.write_text(json.dumps(COST))
    found = specctl("replay", dense, "-p", "ar", "-p", "chain", "--cost-model", cost, "--json")
    plain, _ = json.loads(found.out)["policies"]
    assert plain["pooled"]["time_us"] == pytest.approx(768 * 1060.0)
    assert "'made up', not measured here" in found.err


def test_what_the_log_lacks_is_said(dense: Path) -> None:
    found = specctl("replay", dense, "-p", "eagle2:depth=8:top_k=3:num_tokens=12")
    assert "num_tokens=12*" in found.out
    assert "calls between" in found.out


def test_fit_and_replay_of_the_fit(dense: Path, tmp_path: Path) -> None:
    base = "eagle2:depth=3:top_k=3:num_tokens=8"
    options = ("--filter", "all", "--max-leaf-depth", "2", "--held-out", "0.3", "--json")
    fitted = specctl("fit", "cart", dense, "-o", tmp_path / "hetero", "--base", base, *options)
    assert fitted.code == 0, fitted.err
    found = specctl("replay", dense, "-p", base, "-p", tmp_path / "hetero", "--json")
    assert [p["policy"] for p in json.loads(found.out)["policies"]] == [base, "hetero"]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("-p", "nonsense"), 2, "nonsense"),
        (("-p", "ar", "-p", "ar"), 2, "each of them once"),
        (("-p", "ar", "--baseline", "2"), 2, "--baseline"),
        (("-p", "ar", "--cost-model", "/nowhere.json"), 4, "cost model /nowhere.json"),
        ((), 2, "--policy"),
    ],
)
def test_refusals(dense: Path, options: tuple[str, ...], code: int, message: str) -> None:
    assert message in refuses(code, "replay", dense, *options)


def test_live_traces_are_refused(traces: Path) -> None:
    assert "collect with --dense" in refuses(4, "replay", traces, "-p", "ar")


def test_the_process_loads_no_models(dense: Path) -> None:
    """Scoring must start at once: transformers alone takes seconds to import."""
    script = (
        "import sys; from specctl.cli import main; sys.argv = ['specctl', 'replay', "
        f"{str(dense)!r}, '-p', 'eagle2:depth=4:top_k=3:num_tokens=9', '--json']\n"
        "try: main()\n"
        "except SystemExit: print('transformers' in sys.modules, file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.stderr == "False\n"


def test_show_says_positions_of_dense_traces(dense: Path) -> None:
    shown = passes("show", dense).out
    assert "positions" in shown
    assert "mean path" in shown
    assert "τ" not in shown, "positions overlap: no acceptance length is read off them"
