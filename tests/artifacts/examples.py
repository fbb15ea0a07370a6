"""One policy of every kind, and folders of artifacts to attack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specctl.artifacts import Domain, Evidence, Origin, PairFingerprint, save_artifact
from specctl.artifacts.manifest import Metric, Range, digest_of, prompt_marks
from specctl.policy import (
    Calibration,
    Chain,
    ChainSchedule,
    DynamicDepth,
    ElasticBudget,
    EntropyBins,
    EntropyStop,
    FfnScorer,
    FullTree,
    JensenShannon,
    JointThreshold,
    MarginalBudget,
    Mars,
    OptTree,
    Policy,
    Ratio,
    RootOnly,
    ScoredTree,
    SignalStop,
    SparseGates,
    StaticTree,
    StepCost,
    SurvivalBudget,
    TopProbability,
)
from specctl.records import canonical_json
from tests.policy.scorers import SCORED


def sha(letter: str) -> str:
    return "sha256:" + letter * 64


PAIR = PairFingerprint(
    target_digest=sha("a"),
    drafter_digest=sha("b"),
    tokenizer_digest=sha("c"),
    target="toy target",
    drafter="toy head",
)
EVIDENCE = Evidence(
    trace_digest=sha("d"),
    num_prompts=3,
    num_rounds=40,
    splits={},
    metrics={
        "held_out_mse": Metric.of(0.25, 0.125, 0.5, num_prompts=3),
        "not_reached": Metric(value=None),
    },
    fitted_on=prompt_marks(["prompt-1", "prompt-2"]),
)
DOMAIN = Domain(
    target_config_digest=sha("e"),
    target_revision="0123456789" * 4,
    dtype="bfloat16",
    hardware=("NVIDIA H200",),
    batch_size=Range(low=1, high=8),
    context_tokens=Range(low=7, high=900),
    workload="chat",
)
ORIGIN = Origin(pair=PAIR, evidence=EVIDENCE, domain=DOMAIN, created="2026-01-31T12:00:00Z")

HETERO = EntropyBins(base=StaticTree(), edges=(0.1, 1.3, 2.7, 3.1, 4.0, 6.5, 9.9))
FFN = FfnScorer(
    features=("joint_logp", "parent_entropy", "depth"),
    mean=(-1.1, 2.3, 3.0),
    scale=(0.7, 1.9, 1.6),
    w1=((0.1, -0.2, 0.3), (1 / 3, -0.0, 7e-12)),
    b1=(0.01, -0.02),
    w2=(1.5, -2.5),
    b2=(0.3,),
)
COSTS = StepCost(token_counts=(1, 8, 64), step_us=(810.5, 812.0, 1300.25))
CALIBRATION = Calibration(slopes=(0.9, 1 / 3), intercepts=(-0.1, 0.0))
POLICIES = {
    "ar": Policy(shape=RootOnly()),
    "chain": Policy(shape=Chain(num_draft_tokens=5)),
    "ratio": Policy(shape=Chain(num_draft_tokens=3), acceptance=Ratio()),
    "schedule": Policy(shape=ChainSchedule(from_batch=(1, 5), num_draft_tokens=(5, 2))),
    "eagle2": Policy(shape=StaticTree()),
    "full": Policy(shape=FullTree()),
    "hetero": Policy(shape=HETERO),
    "c2t_ffn": Policy(shape=ScoredTree(scorer=FFN, beta=0.4)),
    "survival": Policy(shape=SCORED["survival"]),
    "echo": Policy(
        shape=SparseGates(gate_levels=(1, 4), thresholds=(0.3, 0.05)),
        budget=ElasticBudget(max_tokens=60),
    ),
    "adasd": Policy(shape=EntropyStop(min_samples=1), acceptance=JensenShannon(min_samples=1)),
    "stop": Policy(
        shape=SignalStop(signal="entropy", threshold=0.7), budget=SurvivalBudget(max_tokens=9)
    ),
    "p_min": Policy(shape=TopProbability(threshold=0.4, window=5, min_draft_tokens=2)),
    "ddd": Policy(
        shape=DynamicDepth(), budget=SurvivalBudget(costs=COSTS, calibration=CALIBRATION)
    ),
    "opt_tree": Policy(
        shape=OptTree(min_gain=0.2),
        budget=MarginalBudget(tokens_per_s=99.5, costs=COSTS, calibration=CALIBRATION),
    ),
    "threshold": Policy(shape=JointThreshold(min_prob=0.03, num_tokens=60)),
    "mars": Policy(
        shape=Chain(), budget=MarginalBudget(tokens_per_s=310.5), acceptance=Mars(theta=0.84)
    ),
}


def write_artifact(folder: Path, name: str = "hetero") -> Path:
    return save_policy(folder, POLICIES[name], card=f"# {name}\n")


def save_policy(folder: Path, policy: Policy, card: str = "# a policy\n") -> Path:
    save_artifact(folder, policy, ORIGIN, card=card)
    return folder


def read_manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return manifest


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    (folder / "config.json").write_text(canonical_json(manifest))


def replace_file(folder: Path, name: str, data: bytes) -> None:
    """Swaps a file and lists it correctly: an attacker can compute digests too."""
    (folder / name).write_bytes(data)
    manifest = read_manifest(folder)
    manifest["files"][name] = {"digest": digest_of(data), "size_bytes": len(data)}
    write_manifest(folder, manifest)
