"""`specctl tune` and `fit auto` as typed: refusals, the document, an artifact that runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import synthetic_trace
from specctl.artifacts import Artifact, load_artifact
from specctl.artifacts.manifest import Domain
from specctl.cli.fitting import FITS
from specctl.errors import OutputError, SpecctlError, TraceEmptyError
from specctl.logs.trace_set import TraceSet
from specctl.policy import Policy, SurvivalBudget
from specctl.replay.config import TuneConfig
from specctl.replay.tune.candidates import parse_families
from specctl.replay.tune.search import TuneSearch
from specctl.replay.tune.tuning import attempts, families_of, prepare, publish
from specctl.replay.tune.verdict import FitOutcome, TuneResult
from specctl.runtime.load import load_pair
from tests.artifacts.examples import PAIR, write_artifact
from tests.cli.command import Outcome, passes, refuses, specctl
from tests.replay.logs import random_traces
from tests.replay.tune_cases import Stated, linear_file

SMALL = ("--held-out", 0.5, "--threads", 1, "--seed", 3)
SVIP = ("--family", "svip")
Verb = tuple[object, ...]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    """Short random texts, said to be the embedded pair's, so that what is tuned on them runs."""
    pair = load_pair("embedded", "embedded", device="cpu").fingerprint
    digests = {f"{part}_digest": getattr(pair, f"{part}_digest") for part in PARTS}
    folder = tmp_path_factory.mktemp("dense") / "traces"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic_trace, "DIGESTS", digests)
        patch.setattr(synthetic_trace, "POSITIONS", 12)
        return random_traces(folder, num_prompts=24, depth=3, top_k=2)


PARTS = ("target", "drafter", "tokenizer")


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return linear_file(tmp_path_factory.mktemp("costs") / "cost_model.json")


@pytest.fixture(scope="module")
def verb(folder: Path, costs: Path) -> Verb:
    return ("tune", folder, "--cost-model", costs)


def tune(*arguments: object) -> Outcome:
    """A run that must succeed, and be quiet."""
    outcome = specctl(*arguments)
    assert outcome.code == 0, outcome
    assert outcome.err == ""
    return outcome


@pytest.fixture(scope="module")
def written(verb: Verb, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run of `tune -o`: what it printed, and its folder with the document and the artifact."""
    out = tmp_path_factory.mktemp("tuned")
    shown = tune(*verb, "-o", out, *SVIP, *SMALL).out
    document = json.loads((out / "tune.json").read_text())
    made = {"folder": out, "document": document, "artifact": load_artifact(out / "policy")}
    return SimpleNamespace(out=" ".join(shown.split()), **made)


def test_table_and_document_agree(verb: Verb, written: SimpleNamespace) -> None:
    document, out = written.document, written.folder
    wrote = f"wrote {out}/policy, {written.artifact.digest[:19]}"
    for named in (document["chosen"], "svip", f"{document['num_settings']} settings", wrote):
        assert str(named) in written.out
    published = json.loads((out / "policy" / "report.json").read_text())
    assert published == {key: of for key, of in document.items() if key != "scored_prompts"}
    again = json.loads(tune(*verb, *SVIP, *SMALL, "--json").out)
    assert again == {**document, "artifact_digest": None}
    assert TuneResult.model_validate_json(json.dumps(document)).to_json() == document
    assert (document["kind"], document["is_simulated"]) == ("tune", False)
    assert sum(document["num_prompts"].values()) == 24


def test_the_manifest_carries_the_evidence(written: SimpleNamespace) -> None:
    document, manifest = written.document, written.artifact.manifest
    evidence, fit, chosen = manifest.evidence, manifest.fit, document["policies"][0]
    assert evidence is not None
    assert fit is not None
    assert evidence.trace_digest == document["traces_digest"]
    for side in ("train", "held_out"):
        assert evidence.splits[side].num_prompts == document["num_prompts"][side]
        assert evidence.splits[side].num_rounds == chosen[side]["num_rounds"]
    assert evidence.metrics["held_out_rate"].low == chosen["held_out"]["rate"]["low"]
    assert evidence.metrics["num_settings"].value == document["num_settings"]
    assert (fit["kind"], fit["seed"], fit["cost_model"]) == ("tune", 3, document["cost_model"])
    card = (written.folder / "policy" / "README.md").read_text()
    digests = document["traces_digest"], document["cost_model"]
    for words in (*digests, "held out", "Limits", "## Finalists"):
        assert words in card


def run_elsewhere(*options: object) -> Any:
    """`run --json` of a policy from traces that do not say on what machine they were made."""
    outcome = specctl("run", "embedded", *options, "--device", "cpu", "--json")
    assert outcome.code == 0, outcome
    assert outcome.err.startswith(
        "warning: W_DOMAIN hardware, dtype: the artifact does not record this"
    )
    assert outcome.err.count("\n") == 1
    return json.loads(outcome.out)


def test_what_is_tuned_runs_and_replays(folder: Path, written: SimpleNamespace) -> None:
    policy = written.folder / "policy"
    rows = run_elsewhere("--compare", f"ar,{policy}", "--limit", 2, "--max-new-tokens", 8)
    assert rows[1]["equal_to_ar"] is True
    assert rows[1]["artifact_digest"] == written.artifact.digest
    replayed = json.loads(passes("replay", folder, "-p", policy, "--json").out)
    num_prompts = written.document["num_prompts"]
    assert replayed["num_prompts_left_out"] == num_prompts["train"], "it was chosen on them"
    assert replayed["policies"][0]["pooled"]["num_prompts"] == num_prompts["held_out"]


def test_a_batch_under_arrivals(verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specctl.replay.tune.tuning.NUM_RUNS", 2)
    load = ("--batch-size", 2, "--arrival-rate", 5, "--objective", "goodput")
    grids = ("--family", "chain:2+survival", "--grid", "max_tokens=3,6")
    limit = ("--tpot-limit-ms", 2, "--packing", "padded", "--factor", 2)
    shown = tune(*verb, *load, *grids, *limit, *SMALL, "--json").out
    found = json.loads(shown)
    assert found["is_simulated"] is True
    assert found["load"] == {"batch_size": 2, "arrival_rate_per_s": 5}
    assert "padded" in found["approximations"]
    assert found["families"][-1]["num_settings"] == 2
    assert 0 < found["policies"][0]["held_out"]["good_share"]["value"] <= 1


def test_a_winning_budget_takes_its_costs(traces: TraceSet, costs: Path, tmp_path: Path) -> None:
    """The evaluator states that budgets win; the artifact must then run without a cost model."""

    def time_us(policy: Policy, prompt: str) -> float:
        del prompt
        return 500.0 if isinstance(policy.budget, SurvivalBudget) else 1000.0

    families = ("eagle2:depth=2:top_k=2+survival",)
    config = TuneConfig(families=families, batch_size=2, held_out_frac=0.5)
    tuned = prepare(traces, config, costs).run(Stated(time_us))
    assert tuned.result.beats_static
    artifact = publish(tuned, tmp_path, traces.fingerprint, Domain())
    budget = artifact.policy.budget
    assert isinstance(budget, SurvivalBudget)
    assert budget.costs is not None
    assert budget.costs.token_counts[0] == 2
    options = ("--limit", 2, "--max-new-tokens", 8, "--batch-size", 2)
    rows = run_elsewhere("--compare", f"ar,{tmp_path / 'policy'}", *options)
    assert rows[1]["equal_to_ar"] is True


def test_a_place_that_cannot_be_written_is_refused_first(
    verb: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: TuneSearch, evaluate: object) -> None:
        raise AssertionError("the search must not start")

    monkeypatch.setattr(TuneSearch, "run", never)
    (tmp_path / "file").touch()
    outcome = specctl(*verb, *SMALL, "-o", tmp_path / "file")
    assert outcome.code == 6
    assert "choose another --out" in outcome.err


NO_SPOT = TraceEmptyError("fit echo: expected a sweet spot, found none", hint="lower --delta")
NO_ROOM = OutputError("fits: expected room, found none", hint="free some")


def tried(out: Path, **fits: str | SpecctlError) -> list[FitOutcome]:
    """Fits by name: each writes an artifact of a kind, or is refused."""

    def writes(kind: str | SpecctlError) -> Any:
        def write(folder: Path) -> Artifact:
            if isinstance(kind, SpecctlError):
                raise kind
            return load_artifact(write_artifact(folder, kind))

        return write

    return list(attempts({name: writes(kind) for name, kind in fits.items()}, out))


def test_fits_go_on_past_one_that_is_refused_and_not_past_a_full_disk(tmp_path: Path) -> None:
    found = tried(tmp_path, hetero="hetero", echo=NO_SPOT, ddd="ddd")
    assert [outcome.refusal is None for outcome in found] == [True, False, True]
    sentence = found[1].sentence()
    assert sentence.startswith("fit echo: fit echo: expected a sweet spot, found none")
    digest = load_artifact(tmp_path / "fits" / "hetero").digest
    assert found[0].sentence() == f"fit hetero: artifact {digest}"
    with pytest.raises(OutputError):
        tried(tmp_path / "full", hetero=NO_ROOM, ddd="ddd")
    assert not (tmp_path / "full" / "fits" / "ddd").exists()


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_families_are_known_to_tune(tmp_path: Path, is_shared: bool) -> None:  # noqa: FBT001
    kinds = {"hetero": "hetero", "c2t": "c2t_ffn", "echo": "echo"}
    found = tried(tmp_path, **kinds, survival=NO_SPOT)
    names = families_of(found, tmp_path, is_shared=is_shared)
    families = parse_families(names, (), PAIR)
    assert [family.name for family in families] == list(names)
    assert any(family.budget for family in families) == is_shared
    fitted = {Path(family.name).name for family in families if family.artifact is not None}
    budgets = {"hetero+survival", "c2t+survival", "echo+survival", "echo+echo_budget"}
    assert fitted == {*kinds, *(budgets if is_shared else ())}


@pytest.mark.parametrize("skip", [["c3t"], list(FITS)])
def test_names_to_skip_are_checked_before_anything_is_read(tmp_path: Path, skip: list[str]) -> None:
    fit = ("fit", "auto", tmp_path, "-o", tmp_path / "out", "--cost-model", "x")
    line = refuses(2, *fit, *(f"--skip={name}" for name in skip))
    assert "--skip" in line
    assert not (tmp_path / "out").exists()
