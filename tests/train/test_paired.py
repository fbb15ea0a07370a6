"""Paired figures, losses and the folder of answers, from answers made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.errors import (
    EvidenceError,
    OutputError,
    TraceCorruptError,
    TraceMismatchError,
    UsageError,
)
from specctl.policy import Chain, Policy
from specctl.train.paired import RunFolder, compare_answers, first_difference, losses_of
from tests.train.cases import answer, by_key

POLICY = Policy(shape=Chain())
HEADER = {"runs_version": 1, "prompts_digest": "sha256:0", "num_seeds": 1}


STRICT = by_key(
    answer("a", (1, 2, 3), right=True),
    answer("b", (1, 2, 3), right=True),
    answer("c", (1, 2, 3), right=False),
    answer("d", (1, 2, 3, 4, 5)),
)
RELAXED = by_key(
    answer("a", right=True, calls=1, num_relaxed=1),
    answer("b", (1, 9), right=False, calls=1, num_relaxed=1),
    answer("c", (1, 2, 3, 4), right=True, calls=1, num_relaxed=1),
    answer("d", (1, 2, 3, 4, 5), calls=1, num_relaxed=1),
)


def test_comparison_by_hand() -> None:
    found = compare_answers(STRICT, RELAXED)
    assert (found.num_prompts, found.num_checked) == (4, 3)
    assert found.tokens_per_call.value == (2 + 1 + 3 + 4) / 4
    assert found.speedup.value == pytest.approx((10 / 4) / (10 / 8))
    assert (found.accuracy, found.strict_accuracy) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert (found.lost, found.gained) == (1, 1)
    assert found.difference.value == 0
    assert found.recovery.value == 1
    assert found.diverged.value == 0.5
    assert found.median_divergence == (1 + 3) / 2
    assert found.relaxed_per_100 == pytest.approx(100 * 4 / 14)


def test_a_prefix_of_an_answer_is_another_answer() -> None:
    assert first_difference(answer("a", (1, 2)), answer("a", (1, 2))) is None
    assert first_difference(answer("a", (1, 2)), answer("a", (1, 2, 3))) == 2
    assert first_difference(answer("a", (1, 2)), answer("a", (3, 2))) == 0


def test_losses_are_of_the_prompts_that_can_be_checked() -> None:
    assert losses_of(STRICT, RELAXED, "binary").tolist() == [0, 1, 0]
    assert losses_of(STRICT, RELAXED, "net").tolist() == [0, 1, -1]
    with pytest.raises(EvidenceError, match="checkable"):
        losses_of(by_key(answer("a", (1, 2))), by_key(answer("a", (1, 2))), "binary")


def test_seeds_are_averaged_within_a_prompt() -> None:
    strict = by_key(*(answer("a", (1, 2), right=True, seed=s) for s in range(4)))
    relaxed = by_key(*(answer("a", (1, 2), right=s > 0, seed=s) for s in range(4)))
    assert losses_of(strict, relaxed, "bounded").tolist() == [0.25]
    assert compare_answers(strict, relaxed).num_checked == 1


# --------------------------------------------------------------------------- the folder


def test_answers_survive_and_a_torn_line_does_not(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path / "runs", HEADER, resume=False)
    folder.append(POLICY, answer("a", (1, 2)))
    folder.append(POLICY, answer("b", (1, 2)))
    [file] = (tmp_path / "runs").glob("*.jsonl")
    whole = file.read_bytes()
    for size in range(len(whole.splitlines()[0]) + 1, len(whole)):
        file.write_bytes(whole[:size])
        again = RunFolder.open(tmp_path / "runs", HEADER, resume=True)
        assert list(again.answers(POLICY)) == [("a", 0)]
    again.append(POLICY, answer("c", (3,)))
    assert list(again.answers(POLICY)) == [("a", 0), ("c", 0)]


def test_a_damaged_line_is_refused_with_its_number(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path / "runs", HEADER, resume=False)
    folder.append(POLICY, answer("a", (1, 2)))
    assert folder.answers(Policy(shape=Chain(num_draft_tokens=7))) == {}, "policies stand apart"
    [file] = (tmp_path / "runs").glob("*.jsonl")
    file.write_bytes(file.read_bytes() + b'{"prompt_id": 3}\n')
    with pytest.raises(TraceCorruptError, match="line 2"):
        folder.answers(POLICY)


def test_folders_are_not_mixed_up(tmp_path: Path) -> None:
    place = tmp_path / "runs"
    RunFolder.open(place, HEADER, resume=False)
    with pytest.raises(UsageError, match="--resume"):
        RunFolder.open(place, HEADER, resume=False)
    with pytest.raises(TraceMismatchError, match="another num_seeds"):
        RunFolder.open(place, {**HEADER, "num_seeds": 2}, resume=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    with pytest.raises(OutputError, match="other files"):
        RunFolder.open(tmp_path / "other", HEADER, resume=False)
