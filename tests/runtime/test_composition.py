"""One artifact of several: what it keeps of its parts, and what does not go together."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.artifacts import Origin, load_artifact, save_artifact
from specctl.errors import LossyPolicyError, UsageError
from specctl.policy import Chain, EntropyBins, Mars, Policy, SurvivalBudget
from specctl.runtime.compose import compose
from specctl.runtime.policy_spec import resolve_policy
from tests.artifacts.examples import ORIGIN, POLICIES, sha, write_artifact


def composed(spec: str, folder: Path, *, allow_lossy: bool = False) -> Policy:
    compose(resolve_policy(spec, allow_lossy=allow_lossy), spec, folder)
    return load_artifact(folder, expect=ORIGIN.pair).policy


def test_parts_of_two_artifacts_become_one(tmp_path: Path) -> None:
    shape, budget = (write_artifact(tmp_path / kind, kind) for kind in ("hetero", "ddd"))
    policy = composed(f"{shape}+{budget}", tmp_path / "both")
    assert isinstance(policy.shape, EntropyBins)
    assert isinstance(policy.budget, SurvivalBudget)
    manifest = load_artifact(tmp_path / "both").manifest
    assert manifest.fit is not None
    parts = {"shape": load_artifact(shape).digest, "budget": load_artifact(budget).digest}
    assert manifest.fit["parts"] == parts
    assert "not together" in (tmp_path / "both" / "README.md").read_text()


def test_a_lossy_whole_needs_evidence_of_its_acceptance(tmp_path: Path) -> None:
    shape = write_artifact(tmp_path / "hetero", "hetero")
    with pytest.raises(LossyPolicyError, match="--allow-lossy"):
        composed(f"{shape}+mars", tmp_path / "out")
    with pytest.raises(UsageError, match="carries its evidence"):
        composed(f"{shape}+mars", tmp_path / "out", allow_lossy=True)
    judged = Policy(shape=Chain(), acceptance=Mars(theta=0.95))
    save_artifact(tmp_path / "mars", judged, ORIGIN, card="mars")
    policy = composed(f"{shape}+{tmp_path / 'mars'}", tmp_path / "out", allow_lossy=True)
    assert not policy.lossless
    assert "does not carry over" in (tmp_path / "out" / "README.md").read_text()


def test_parts_must_be_of_one_pair(tmp_path: Path) -> None:
    first = write_artifact(tmp_path / "hetero", "hetero")
    other = Origin(pair=ORIGIN.pair.model_copy(update={"drafter_digest": sha("e")}))
    save_artifact(tmp_path / "other", POLICIES["ddd"], other, card="other")
    with pytest.raises(UsageError, match="artifacts of one pair"):
        composed(f"{first}+{tmp_path / 'other'}", tmp_path / "out")


def test_words_alone_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="words alone"):
        composed("eagle2+survival:max_tokens=9", tmp_path / "out")


@pytest.mark.parametrize("added", ["survival:max_tokens=4", "mars"])
def test_plain_decoding_takes_no_other_part(added: str) -> None:
    with pytest.raises(UsageError, match="ar drafts nothing"):
        resolve_policy(f"ar+{added}", allow_lossy=True)
