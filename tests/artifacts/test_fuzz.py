"""Mutants of sound files: refused with a typed error, or their own canonical form. A short run.

scripts/fuzz_artifacts.py runs a million of them; benchmarks/results/fuzz-artifacts.json tells.
"""

from __future__ import annotations

import json

import pytest

from scripts.fuzz_artifacts import Campaign
from scripts.fuzz_targets import TARGETS, Target, run_one
from specctl.records import canonical_json

EXECUTIONS = {"artifact": 40}


@pytest.mark.parametrize("name", TARGETS)
def test_mutants_are_refused_or_canonical(name: str) -> None:
    campaign = Campaign(name, TARGETS[name], seed=7)
    campaign.run(EXECUTIONS.get(name, 500))
    assert campaign.findings == []


def test_the_oracle_sees_what_it_should() -> None:
    """A parser that lets another error out, and one that reads two texts alike, are findings."""

    def index_error(data: bytes) -> None:
        data[10**9]

    def lenient(data: bytes) -> None:
        assert canonical_json(json.loads(data)).encode() == data

    assert "IndexError" in str(run_one(Target(index_error, [b""], 1), b"x"))
    assert "AssertionError" in str(run_one(Target(lenient, [b""], 1), b'{"a": 1}'))
    campaign = Campaign("lenient", Target(lenient, [b'{"a":1}'], 1), seed=0)
    campaign.run(50)
    assert campaign.findings
