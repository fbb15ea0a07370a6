"""`fit mars` on the embedded pair, and paired answers made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl import errors
from specctl.collect.prompts import load_prompts
from specctl.policy import Chain, Policy
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import Pair, load_pair
from specctl.train import paired
from specctl.train.certify import Sweep, sweep
from specctl.train.configs import Contract, MarsConfig
from specctl.train.faces import MARS, check_mode, opening_of
from tests.train.cases import answer, by_key

BASE = Policy(shape=Chain(num_draft_tokens=4))
LAX = Contract(max_loss=0.4, confidence=0.8)
CONFIG = MarsConfig(form="prob_ratio", thetas=(0.6, 0.3, 0.1), contract=LAX)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair("embedded", "embedded", device="cpu")


@pytest.fixture(scope="module")
def plan() -> paired.Plan:
    prompts = load_prompts("embedded")
    few = [*prompts[:4], *prompts[70:74], *prompts[-4:]]
    return paired.Plan(few, DecodeSettings(32), 12)


@pytest.fixture(scope="module")
def found(pair: Pair, plan: paired.Plan, tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    folder = tmp_path_factory.mktemp("mars") / "runs"
    runs = paired.RunFolder.open(folder, plan.header(pair.fingerprint), resume=False)
    return sweep(MARS, pair, BASE, plan, CONFIG, runs)


def test_copied_answers_are_those_of_decoding(
    pair: Pair, plan: paired.Plan, found: Sweep, tmp_path: Path
) -> None:
    runs = paired.RunFolder.open(tmp_path / "runs", plan.header(pair.fingerprint), resume=False)
    fresh = paired.run_prompts(pair, found.policies[1], plan, runs)
    swept = found.relaxed[1]
    assert {item.is_copied for item in swept.values()} == {True, False}, "equality proves nothing"
    for key, here in swept.items():
        for name in ("token_ids", "calls"):
            assert getattr(fresh[key], name) == getattr(here, name)


def test_closeness_in_another_form_says_nothing(pair: Pair, found: Sweep) -> None:
    policy = found.policies[0]
    here = opening_of(CONFIG, pair)
    margin = opening_of(MarsConfig(form="margin", thetas=(0.1,)), pair)
    denying = opening_of(CONFIG.model_copy(update={"deny_token_ids": (7,)}), pair)
    assert here.unchanged(found.strict, policy)
    assert margin.unchanged(found.strict, policy) == {}
    assert denying.unchanged(found.strict, policy) == {}


def test_modes_that_the_sampling_contradicts_are_refused() -> None:
    with pytest.raises(errors.UsageError, match="alg1"):
        check_mode("alg1", greedy=False)


POLICY = Policy(shape=Chain())
HEADER = {"runs_version": 1, "prompts_digest": "sha256:0"}


STRICT = by_key(
    answer("a", (1, 2, 3), right=True),
    answer("b", (1, 2, 3), right=True),
    answer("c", (1, 2, 3), right=False),
    answer("d", (1, 2, 3, 4, 5)),
)
RELAXED = by_key(
    answer("a", right=True, calls=1),
    answer("b", (1, 9), right=False, calls=1),
    answer("c", (1, 2, 3, 4), right=True, calls=1),
    answer("d", (1, 2, 3, 4, 5), calls=1),
)


def test_comparison_by_hand() -> None:
    found = paired.compare_answers(STRICT, RELAXED)
    assert (found.num_prompts, found.num_checked) == (4, 3)
    assert found.tokens_per_call.value == (2 + 1 + 3 + 4) / 4
    assert found.speedup.value == pytest.approx((10 / 4) / (10 / 8))
    assert (found.accuracy, found.strict_accuracy) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert (found.lost, found.gained) == (1, 1)
    assert found.difference.value == 0
    assert found.recovery.value == 1
    assert found.diverged.value == 0.5


def test_losses_are_of_the_prompts_that_can_be_checked() -> None:
    assert paired.losses_of(STRICT, RELAXED).tolist() == [0, 1, 0]
    with pytest.raises(errors.EvidenceError, match="checkable"):
        paired.losses_of(by_key(answer("a", (1, 2))), by_key(answer("a", (1, 2))))


@pytest.fixture
def folder(tmp_path: Path) -> paired.RunFolder:
    """One answer of one policy."""
    opened = paired.RunFolder.open(tmp_path / "runs", HEADER, resume=False)
    opened.append(POLICY, answer("a", (1, 2)))
    return opened


def test_answers_survive_and_a_torn_line_does_not(folder: paired.RunFolder) -> None:
    folder.append(POLICY, answer("b", (1, 2)))
    [file] = folder.path.glob("*.jsonl")
    whole = file.read_bytes()
    for size in range(len(whole.splitlines()[0]) + 1, len(whole)):
        file.write_bytes(whole[:size])
        again = paired.RunFolder.open(folder.path, HEADER, resume=True)
        assert list(again.answers(POLICY)) == ["a"]
    again.append(POLICY, answer("c", (3,)))
    assert list(again.answers(POLICY)) == ["a", "c"]


def test_a_damaged_line_is_refused_with_its_number(folder: paired.RunFolder) -> None:
    assert folder.answers(Policy(shape=Chain(num_draft_tokens=7))) == {}, "policies stand apart"
    [file] = folder.path.glob("*.jsonl")
    file.write_bytes(file.read_bytes() + b'{"prompt_id": 3}\n')
    with pytest.raises(errors.TraceCorruptError, match="line 2"):
        folder.answers(POLICY)


def test_folders_are_not_mixed_up(folder: paired.RunFolder, tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match="--resume"):
        paired.RunFolder.open(folder.path, HEADER, resume=False)
    with pytest.raises(errors.TraceMismatchError, match="another prompts_digest"):
        paired.RunFolder.open(folder.path, {**HEADER, "prompts_digest": "sha256:1"}, resume=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    with pytest.raises(errors.OutputError, match="files other than runs"):
        paired.RunFolder.open(tmp_path / "other", HEADER, resume=False)
