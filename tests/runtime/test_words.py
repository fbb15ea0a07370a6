"""Policies by name: words, settings of every type, budgets behind `+`, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specctl.artifacts.manifest import REPORT_JSON
from specctl.errors import LossyPolicyError, RegistryError, UsageError
from specctl.policy import (
    Chain,
    DynamicDepth,
    EntropyBins,
    JointThreshold,
    MarginalBudget,
    Mars,
    OptTree,
    PerRequest,
    Policy,
    SignalStop,
    StaticTree,
    StepCost,
    SurvivalBudget,
)
from specctl.policy.families import WORDS
from specctl.registry import init_registry
from specctl.runtime.words import check_words, fitted_folders, resolve_policies, resolve_policy
from tests.artifacts.examples import PAIR, write_artifact

COSTS = StepCost(token_counts=(1, 9), step_us=(100.0, 120.0))
PAGE = Path(__file__).parents[2] / "docs" / "policies.md"


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        ("chain:num_draft_tokens=6", Policy(shape=Chain(num_draft_tokens=6))),
        ("chain:6", Policy(shape=Chain(num_draft_tokens=6))),
        ("eagle2:4x2/8", Policy(shape=StaticTree(depth=4, top_k=2, num_tokens=8))),
        ("eagle2:4x2", Policy(shape=StaticTree(depth=4, top_k=2))),
        (
            "stop:signal=confidence:threshold=0.4:window=10",
            Policy(shape=SignalStop(signal="confidence", threshold=0.4, window=10)),
        ),
        ("svip", Policy(shape=SignalStop(signal="sqrt_entropy", threshold=0.3, keep_last=False))),
        (
            "svip:threshold=1e-1:keep_last=true",
            Policy(shape=SignalStop(signal="sqrt_entropy", threshold=0.1)),
        ),
        (
            "ddd:check_levels=3/5:min_beam_logp=-0.5:depth=6",
            Policy(shape=DynamicDepth(check_levels=(3, 5), min_beam_logp=-0.5, depth=6)),
        ),
        ("opt_tree:min_gain=1", Policy(shape=OptTree(min_gain=1.0))),
        (
            "threshold:min_prob=0.1:num_tokens=24",
            Policy(shape=JointThreshold(min_prob=0.1, num_tokens=24)),
        ),
        (
            "eagle2:depth=6+survival:max_tokens=64",
            Policy(shape=StaticTree(), budget=SurvivalBudget(max_tokens=64)),
        ),
        (
            "eagle2+survival:max_tokens=64+mars:theta=0.95",
            Policy(
                shape=StaticTree(),
                budget=SurvivalBudget(max_tokens=64),
                acceptance=Mars(theta=0.95),
            ),
        ),
    ],
)
def test_words_and_settings(spec: str, policy: Policy) -> None:
    named = resolve_policy(spec, allow_lossy=True)
    assert (named.policy, named.label) == (policy, spec)
    if not policy.lossless:
        with pytest.raises(LossyPolicyError, match="pass allow_lossy=True"):
            resolve_policy(spec)


def test_words_replace_parts_of_an_artifact(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "a+b", "hetero")
    whole, composed = resolve_policy(str(folder)), resolve_policy(f"{folder}+survival:max_tokens=9")
    assert whole.artifact_digest is not None
    assert composed.artifact_digest is None, "no artifact holds this policy"
    assert [part for part, _ in composed.parts] == ["shape"]
    assert composed.policy.shape == whole.policy.shape
    assert composed.policy.budget == SurvivalBudget(max_tokens=9)
    assert composed.label == "hetero+survival:max_tokens=9"
    assert composed.policy.name == "hetero+survival"


def test_an_artifact_behind_a_plus_gives_its_budget(tmp_path: Path) -> None:
    first, second = (write_artifact(tmp_path / kind, kind) for kind in ("hetero", "ddd"))
    named = resolve_policy(f"{first}+{second}")
    assert isinstance(named.policy.shape, EntropyBins)
    assert isinstance(named.policy.budget, SurvivalBudget)
    assert [part for part, _ in named.parts] == ["shape", "budget"]
    with pytest.raises(UsageError, match="no budget or acceptance"):
        resolve_policy(f"{second}+{first}")


@pytest.mark.parametrize("spec", ["chain", "chain:6", "eagle2+survival:max_tokens=64"])
def test_a_folder_does_not_shadow_a_word(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a command means does not depend on who made a folder where it is run."""
    monkeypatch.chdir(tmp_path)
    wanted = resolve_policy(spec)
    for word in ("chain", "eagle2", "survival", "survival:max_tokens=64", spec):
        write_artifact(tmp_path / word, "hetero")
    assert resolve_policy(spec) == wanted
    named = resolve_policy("./chain")
    assert (named.policy.shape.kind, named.artifact_digest is None) == ("hetero", False)
    assert resolve_policy(f"./{spec}").policy.shape.kind == "hetero"


@pytest.mark.parametrize(
    ("spec", "meant"),
    [
        ("echo", "./echo"),
        ("echo+echo_budget:max_tokens=64", "./echo+echo_budget:max_tokens=64"),
        ("echo+survival:max_tokens=9", "./echo+survival:max_tokens=9"),
        ("survival", "./survival"),
        ("mars", "./mars"),
        ("eagle2+echo", "eagle2+./echo"),
    ],
)
def test_words_that_hide_a_folder_say_so_where_they_are_refused(
    spec: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as refused:
        resolve_policy(spec)
    assert "folder of that name" not in str(refused.value)
    for name in ("echo", "mars", "survival"):
        write_artifact(tmp_path / name, "echo" if name == "echo" else "ratio")
    with pytest.raises(UsageError) as refused:
        resolve_policy(spec)
    assert refused.value.hint == f"write {meant} for the folder of that name"
    assert resolve_policy(meant, allow_lossy=True).parts
    (tmp_path / "echo" / REPORT_JSON).touch()
    assert fitted_folders() == ["./echo"]


def test_step_costs_are_filled_in_where_they_are_needed() -> None:
    survival = resolve_policy("eagle2+survival", step_cost=COSTS).policy
    assert survival.budget == SurvivalBudget(costs=COSTS)
    marginal = resolve_policy("chain+marginal:tokens_per_s=120.5", step_cost=COSTS).policy
    assert marginal.budget == MarginalBudget(tokens_per_s=120.5, costs=COSTS)
    fixed = resolve_policy("chain+survival:max_tokens=9", step_cost=COSTS).policy
    assert fixed.budget == SurvivalBudget(max_tokens=9), "a fixed size asks for no costs"
    assert resolve_policy("chain", step_cost=COSTS).policy.budget == PerRequest()


def test_costs_of_an_artifact_are_its_own(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "ddd", "ddd")
    policy = resolve_policy(str(folder), step_cost=COSTS).policy
    assert isinstance(policy.budget, SurvivalBudget)
    assert policy.budget.costs not in (None, COSTS)


def test_a_policy_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its label is what was typed, alone and beside another of its kind."""
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b", "c=d"):
        write_artifact(tmp_path / folder, "chain")
    named = resolve_policies("chain,best=a/,b/,c=d/,small=chain:2")
    labels = ["chain", "best", "b/", "c=d/", "small"]
    assert [item.label for item in named] == labels
    assert [one.label for one in resolve_policies("b/")] == ["b/"], "whatever stands beside it"
    assert named[1].policy == resolve_policy("a/").policy
    assert named[-1].policy.shape == Chain(num_draft_tokens=2)
    check_words(["mine=eagle2:depth=3", "eagle2"])
    for words, says in (
        ("ar=chain", "ar is a policy; choose another name before ="),
        ("best=medusa", "is no word of a policy"),
        ("best=ar,best=chain", "each of them once"),
    ):
        with pytest.raises(UsageError, match=says):
            resolve_policies(words)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("medusa", "is no word of a policy (ar, chain, eagle2, ...)"),
        ("eagle2+survival", "specctl profile"),
        ("eagle2+marginal", "needs tokens_per_s=VALUE"),
        ("eagle2+echo", "another shape, 'echo'"),
        ("eagle2+sorted", "none of survival, marginal, echo_budget, ratio, mars"),
        ("eagle2+", "'' behind '+'"),
        ("+survival:max_tokens=4", "policy '+survival"),
        (
            "chain+survival:max_tokens=9+marginal:tokens_per_s=1",
            "2 parts budget behind the shape",
        ),
        ("adaedl", "needs threshold=VALUE"),
        ("stop:signal=mood:threshold=0.4", "signal"),
        ("svip:threshold=high", "but must be a number"),
        ("svip:threshold=nan", "but must be a number"),
        ("svip:threshold=-1", "at least 0"),
        ("mars:theta=0.9", "put a shape before it: eagle2+mars:theta=0.9"),
        ("chain:0", "chain has the settings num_draft_tokens"),
        ("ar+survival", "leave the other part out"),
        ("chain:num_draft_tokens=2.5", "but must be a whole number"),
        ("chain:num_draft_tokens=" + "9" * 5000, "num_draft_tokens"),
        ("chain:num_draft_tokens=2:num_draft_tokens=3", "a setting twice"),
        ("chain:kind=eagle2", "'kind' is no setting of chain, which has num_draft_tokens"),
        ("chain:", "'' is no setting"),
        ("chain:num_draft_tokens=", "field=value"),
        ("ddd:check_levels=5//7", "check_levels"),
        ("chain+survival:max_tokens=0", "max_tokens"),
        ("ar+survival:max_tokens=4", "ar drafts nothing"),
        ("nowhere/nothing", ""),
        ("chain+survival:costs=costs.json:max_tokens=4", "costs"),
    ],
)
def test_mistakes_are_named_on_one_line(spec: str, says: str) -> None:
    with pytest.raises(UsageError) as refusal:
        resolve_policy(spec, PAIR, allow_lossy=True)
    text = str(refusal.value)
    assert says in text
    assert "\n" not in text


# --------------------------------------------------------------------------- places


@pytest.mark.parametrize("after", ["", "/", "/.", "//"])
@pytest.mark.parametrize("name", ["toy+eagle3@cpu:demo@prod", "toy", "toy@sha256:" + "0" * 64, "A"])
def test_a_folder_in_a_registry_is_never_loaded_as_one(
    tmp_path: Path, name: str, after: str
) -> None:
    """Whoever may write there makes a folder of the words of a reference: it has no signature."""
    init_registry(tmp_path / "team")
    write_artifact(tmp_path / "team" / name, "chain")
    with pytest.raises(UsageError) as refused:
        resolve_policy(f"{tmp_path}/team/{name}{after}", PAIR)
    assert f"a registry at {tmp_path}/team and a folder {name} in it" in str(refused.value)
    (tmp_path / "link").symlink_to(tmp_path / "team")
    with pytest.raises(UsageError, match="a registry at"):
        resolve_policy(f"{tmp_path}/link/{name}{after}", PAIR)


def test_a_folder_with_the_words_of_a_reference_is_refused_without_a_marker_too(
    tmp_path: Path,
) -> None:
    """Who may add to a registry's folder may perhaps remove its marker."""
    folder = write_artifact(tmp_path / "toy+eagle3@cpu:demo@prod", "chain")
    with pytest.raises(UsageError, match="no registry at"):
        resolve_policy(str(folder), PAIR)
    sound = folder.rename(tmp_path / "toy+eagle3@cpu:demo")
    assert resolve_policy(str(sound), PAIR).artifact_digest is not None


@pytest.mark.parametrize("spec", ["nowhere/toy+eagle3@cpu:demo@prod", "nowhere/toy@prod+mars"])
def test_a_reference_of_a_place_that_is_no_registry_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RegistryError) as refused:
        resolve_policy(spec, PAIR, allow_lossy=True)
    assert (refused.value.code, list(tmp_path.iterdir())) == ("E_NO_REGISTRY", [])
    assert "nowhere" in str(refused.value)


def test_a_bare_reference_needs_a_registry_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for home in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(home, str(tmp_path / home))
    monkeypatch.delenv("SPECCTL_REGISTRY", raising=False)
    with pytest.raises(UsageError, match="SPECCTL_REGISTRY"):
        resolve_policy("toy+eagle3@prod", PAIR)
    init_registry(tmp_path / "team")
    monkeypatch.setenv("SPECCTL_REGISTRY", str(tmp_path / "team"))
    with pytest.raises(RegistryError, match=r"toy\+eagle3"):
        resolve_policy("toy+eagle3@prod", PAIR)


# --------------------------------------------------------------------------- docs/policies.md


def stated_settings(word: str) -> str:
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{word}` |"))
    return row.split("|")[2]


def defaults_of(word: str) -> dict[str, Any]:
    """Settings of a word that has them all: what is required is given some value."""
    needed = {
        "schedule": ":from_batch=1/:num_draft_tokens=5/",
        "stop": ":signal=confidence:threshold=0",
        "adaedl": ":threshold=0",
        "echo": ":gate_levels=1/:thresholds=0/",
        "survival": ":max_tokens=1",
        "echo_budget": ":max_tokens=1",
        "marginal": ":tokens_per_s=1",
    }
    settings = word + needed.get(word, "")
    if word in WORDS["budget"]:
        return resolve_policy(f"chain+{settings}", step_cost=COSTS).policy.budget.model_dump()
    if word in WORDS["acceptance"]:
        policy = resolve_policy(f"chain+{settings}", allow_lossy=True).policy
        return policy.acceptance.model_dump()
    return resolve_policy(settings).policy.shape.model_dump()


ALL_WORDS = [word for words in WORDS.values() for word in words]


@pytest.mark.parametrize("word", ALL_WORDS)
def test_the_page_states_every_setting_and_its_default(word: str) -> None:
    stated, fields = stated_settings(word), defaults_of(word)
    not_settings = {"kind", "costs", "calibration"}
    for name in fields.keys() - not_settings:
        assert f"`{name}" in stated, name
    for name, value in ((n, v) for n, v in fields.items() if f"`{n}=" in stated):
        parts = value if isinstance(value, tuple) else (value,)
        words = [f"{part:.6g}" if isinstance(value, tuple) else str(part) for part in parts]
        text = "/".join(words)
        assert f"`{name}={text.lower() if isinstance(value, bool) else text}`" in stated
