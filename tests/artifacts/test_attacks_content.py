"""Content that must not be loaded: cost, evidence, privacy, text (notes/reliability.md, 3.3)."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specctl.artifacts import Evidence, load_artifact, save_artifact
from specctl.artifacts.limits import MAX_TABLE_BYTES, check_cost, full_slots, table_bytes
from specctl.artifacts.privacy import check_private
from specctl.artifacts.text_warning import find_active_text
from specctl.errors import ArtifactError
from specctl.policy.build import build_shape
from specctl.policy.growing import pool_capacity
from specctl.policy.records import FullTree, Policy, ScoredTree, TreesScorer
from specctl.policy.scoring import build_log_odds
from tests.artifacts.attacks import checked, refused
from tests.artifacts.examples import (
    EVIDENCE,
    ORIGIN,
    POLICIES,
    replace_file,
    sha,
    write_artifact,
)
from tests.artifacts.hostile.policies import stumps
from tests.artifacts.secret_words import SECRETS
from tests.policy.scorers import random_trees

# ------------------------------------------------------------------ cost


WIDE = random_trees(0, 2, 3).model_copy(update={"features": ("joint_prob",) * 33})
LONELY = TreesScorer(
    features=("joint_prob",),
    roots=tuple(range(4097)),
    **dict.fromkeys(("feature", "left", "right"), (-1,) * 4097),
    **dict.fromkeys(("threshold", "value"), (0.0,) * 4097),
)
COSTLY = {
    "tables of 3 GB": Policy(shape=ScoredTree(scorer=stumps(21_000), beta=0.1)),
    "33 features": Policy(shape=ScoredTree(scorer=WIDE, beta=0.1)),
    "4097 trees": Policy(shape=ScoredTree(scorer=LONELY, beta=0.1)),
    "a pool of 8 million": Policy(shape=FullTree(depth=64, top_k=64)),
}


@pytest.mark.parametrize("name", COSTLY)
def test_lawful_records_that_cost_too_much_are_refused(name: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        check_cost(COSTLY[name])
    checked(caught.value, "E_COST")


@pytest.mark.parametrize("name", POLICIES)
def test_examples_cost_little(name: str) -> None:
    check_cost(POLICIES[name])


def test_estimates_are_what_is_built() -> None:
    trees = random_trees(1, 20, 9)
    tables = build_log_odds(trees).alive  # type: ignore[attr-defined]
    assert table_bytes(trees) == sum(table.numel() * 8 for table in tables) < MAX_TABLE_BYTES
    for shape in (FullTree(), FullTree(depth=3, top_k=4, width=2), FullTree(nested=False)):
        assert full_slots(shape) == pool_capacity(build_shape(shape))


# ------------------------------------------------------------------ the report


@pytest.mark.parametrize("report", [b"{", b'{"a":NaN}', b'{"a":1,"a":2}', b"[" * 10**5])
def test_a_report_that_is_no_json_is_refused(report: bytes, folder: Path) -> None:
    replace_file(folder, "report.json", report)
    assert "report.json" in str(refused(folder, "E_MANIFEST"))


# ------------------------------------------------------------------ privacy

HARMLESS = {
    "digest": sha("a"),
    "commit": "0123456789abcdef" * 2 + "01234567",
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "path": "/srv/traces/chat@2026-01-31",
    "url": "https://huggingface.co/Qwen/Qwen3-8B",
    "bucket": "s3://bucket/registry:443/x@prod",
    "card": "The drafter's tokens are a secret sauce: none. Token budget: 48.",
    "base64": "q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQq83vEjRWeJA=",
    "path of prompts": "prompts/held-out.jsonl",
}


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_refused_wherever_it_stands_and_never_repeated(name: str) -> None:
    secret = SECRETS[name]
    places: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"fit": {"note": secret}}, {}),
        ({"fit": {"deep": [{"x": ["y", secret]}]}}, {}),
        ({"fit": {secret: 1}}, {}),
        ({}, {"README.md": f"# card\n\n{secret}\n"}),
    ]
    for manifest, texts in places:
        with pytest.raises(ArtifactError) as caught:
            check_private(manifest, texts)
        checked(caught.value, "E_PRIVACY")
        assert secret not in str(caught.value).replace(", a key", "")


@pytest.mark.parametrize(
    "fit",
    [
        {"db": {"password": "x"}},
        {"API_KEY": "short"},
        {"prompt": "p" * 300},
        {"prompts": ["What is my salary?"]},
        {"messages": [{"role": "user"}]},
        {"token_ids": [1, 2, 3]},
        {"response": "two\nlines"},
    ],
    ids=lambda fit: next(iter(fit)),
)
def test_names_that_promise_secrets_or_texts_are_refused(fit: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError) as caught:
        check_private({"fit": fit}, {})
    checked(caught.value, "E_PRIVACY")


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_no_secret_passes(name: str) -> None:
    text = HARMLESS[name]
    check_private(
        {"fit": {"note": text, "prompts": "prompts.jsonl", "num_tokens": 48}}, {"c": text}
    )
    check_private({"policy": {"acceptance": {"deny_token_ids": [1, 2, 3]}}}, {})


@pytest.mark.parametrize("name", SECRETS)
def test_a_report_is_looked_at_like_the_manifest(name: str) -> None:
    for report in ({"rows": [{"note": SECRETS[name]}]}, {"rows": {SECRETS[name]: 1}}):
        with pytest.raises(ArtifactError) as caught:
            check_private({}, {}, report)
        checked(caught.value, "E_PRIVACY")
        assert "report.json" in str(caught.value)


@pytest.mark.parametrize(
    ("fit", "place"),
    [
        ({"a": {"b.c": [["x", {"d": "<|user|>"}]]}}, "config.json.fit.a.b.c.d"),
        ({"a": [1, "ok", "[INST]"]}, "config.json.fit.a"),
        ({"a": {"hf_" + "a" * 30: 1}}, "config.json.fit.a, a key"),
        ({"db.password": "x"}, "config.json.fit.db.password"),
    ],
    ids=["deep", "in a list", "a key", "a dotted name"],
)
def test_a_refusal_names_the_place(fit: dict[str, Any], place: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        check_private({"fit": fit}, {})
    assert checked(caught.value, "E_PRIVACY").field == place


def test_privacy_holds_for_writer_and_reader(tmp_path: Path) -> None:
    origin = replace(ORIGIN, fit={"kind": "cart", "note": SECRETS["hub"]})
    with pytest.raises(ArtifactError) as caught:
        save_artifact(tmp_path / "a", POLICIES["chain"], origin, card="# a\n")
    checked(caught.value, "E_PRIVACY")
    assert not (tmp_path / "a").exists()
    folder = write_artifact(tmp_path / "b")
    replace_file(folder, "README.md", SECRETS["aws"].encode())
    refused(folder, "E_PRIVACY")
    folder = write_artifact(tmp_path / "c")
    report = {"held_out_mse": 0.25, "prompt": SECRETS["prompt"]}
    replace_file(folder, "report.json", json.dumps(report).encode())
    refused(folder, "E_PRIVACY")


# ------------------------------------------------------------------ text for people


@pytest.mark.parametrize(
    "text", ["a\x1b[2Jb", "a\u202eb", "zero\u200bwidth", "<script>x</script>", "[x](javascript:x)"]
)
def test_active_text_in_a_card_is_said_and_loads(
    text: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replace_file(folder, "README.md", text.encode())
    with caplog.at_level(logging.WARNING, logger="specctl.artifacts"):
        load_artifact(folder)
    assert "W_TEXT README.md" in caplog.text
    assert "\x1b" not in caplog.text


def test_a_plain_card_is_not_warned_of() -> None:
    assert find_active_text("# Title\n\n| a < b | `x<y>` |\n\ttab é λ*") is None
    assert isinstance(EVIDENCE, Evidence)
