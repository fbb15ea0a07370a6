"""Laws of every family: JSON, command-line words and grids, closed trees, rows that do not mix."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specctl.artifacts.manifest import FileEntry, Range
from specctl.errors import RecordError, UsageError
from specctl.policy import (
    Calibration,
    Chain,
    ChainSchedule,
    DynamicDepth,
    EntropyBins,
    EntropyStop,
    FullTree,
    JointThreshold,
    Mars,
    OptTree,
    Policy,
    RootOnly,
    ScoredTree,
    Shape,
    SignalStop,
    SparseGates,
    StaticTree,
    TopProbability,
    build_shape,
    parse_policy,
    policy_digest,
    policy_json,
)
from specctl.policy.families import ACCEPTANCES, PARTS, SHAPES, WORDS, family_of, shape_family
from specctl.policy.family import AcceptanceFamily, Family, ShapeFamily
from specctl.policy.static import static_shape
from specctl.records import Record, canonical_json
from specctl.replay.config import ReplayConfig
from specctl.tree import Children
from tests.policy import drafts
from tests.policy.drafts import grow, paths_of, random_law
from tests.policy.scorers import SCORED

BASE = StaticTree(depth=2, top_k=4, num_tokens=12)
EXAMPLES: dict[str, Shape] = {
    "ar": RootOnly(),
    "chain": Chain(num_draft_tokens=3),
    "schedule": ChainSchedule(from_batch=(1, 3), num_draft_tokens=(3, 1)),
    "eagle2": StaticTree(depth=3, top_k=3, num_tokens=10),
    "full": FullTree(depth=2, top_k=3),
    "full, plain": FullTree(depth=2, top_k=3, nested=False),
    "hetero": EntropyBins(base=BASE, edges=(2.5, 4.0), gammas=(0.5, 1.0)),
    "echo": SparseGates(
        depth=4, width=2, max_width=4, gate_levels=(1, 3), thresholds=(0.4, 0.05), num_tokens=12
    ),
    "stop": SignalStop(signal="confidence", threshold=0.4, window=5),
    "stop, before": SignalStop(signal="entropy", threshold=1.5, window=5, keep_last=False),
    "stop, a tree": SignalStop(signal="entropy", threshold=1, window=4, top_k=3, num_tokens=12),
    "p_min": TopProbability(threshold=0.4, window=4, min_draft_tokens=2),
    "ddd": DynamicDepth(depth=4, top_k=3, num_tokens=10, check_levels=(2, 3), min_beam_logp=-1.0),
    "opt_tree": OptTree(depth=4, top_k=3, num_tokens=10, min_gain=0.2),
    "threshold": JointThreshold(depth=4, top_k=4, min_prob=0.05, num_tokens=20),
    "adasd_stop": EntropyStop(window=4),
    **SCORED,
}
FAMILIES = [(part, family) for part, families in PARTS.items() for family in families]
LAWS = [random_law(seed) for seed in range(4)]


def test_every_shape_has_an_example() -> None:
    kinds = {family_of(shape).kind for shape in EXAMPLES.values()}
    assert kinds == {family.kind for family in SHAPES}
    for part, family in FAMILIES:
        words = WORDS[part]  # type: ignore[index]
        assert all(words[word]["kind"] == family.kind for word in family.words)


@pytest.mark.parametrize("name", EXAMPLES)
def test_json_and_back(name: str) -> None:
    policy = Policy(shape=EXAMPLES[name])
    text = policy_json(policy)
    assert parse_policy(text) == policy
    assert policy_digest(parse_policy(text)) == policy_digest(policy)
    assert policy.lossless
    record = json.loads(text)
    unknown = canonical_json({**record, "shape": {**record["shape"], "no_such_field": 1}})
    with pytest.raises(UsageError, match="no_such_field"):
        parse_policy(unknown)


@pytest.mark.parametrize("name", EXAMPLES)
def test_trees_are_closed_and_rows_do_not_mix(name: str) -> None:
    """A row decides in any batch, at any place of it, as it does alone."""
    rule = build_shape(EXAMPLES[name])
    _, tree, _ = grow(rule, LAWS)
    alone = [paths_of(grow(rule, [law])[1]) for law in LAWS]
    for row, paths in enumerate(alone):
        assert paths_of(tree, row) == paths
        assert paths[0] == ()
        assert all(path[:-1] in paths for path in paths if path), "a node without its parent"
        assert len(set(paths)) == len(paths) <= rule.max_tokens
        assert max(map(len, paths)) <= rule.max_depth
    _, turned, _ = grow(rule, LAWS[::-1])
    assert [paths_of(turned, row) for row in range(len(LAWS))] == alone[::-1]


@pytest.mark.parametrize(("part", "family"), FAMILIES, ids=[f.kind for _, f in FAMILIES])
def test_grids_name_fields_of_the_record(part: str, family: Family) -> None:
    fields = family.record.model_fields
    for word, grid in family.grids.items():
        assert word.partition(":")[0] in family.words
        assert set(grid) <= set(fields)
    if not isinstance(family, ShapeFamily):
        return
    assert set(family.shared_grid) <= set(fields)
    for name in (*family.fitted_grid, *family.shared_fitted_grid):
        place = family.places.get(name, (name,))
        assert place[0] in fields


GATED: dict[str, Any] = {"depth": 3, "width": 1, "max_width": 3}
ONE_GATE = {**GATED, "gate_levels": (2,), "thresholds": (0.3,)}
SCORE = {"scorer": SCORED["c2t joint"].scorer, "beta": 0.2}
NAN, INF = float("nan"), float("inf")
REFUSED: list[tuple[type[Record], dict[str, Any], str]] = [
    (FullTree, {"depth": 65}, "depth"),
    (SignalStop, {"signal": "confidence", "threshold": 1.5}, "at most 1"),
    (SignalStop, {"signal": "entropy", "threshold": 1.0, "top_k": 2}, "num_tokens goes with top_k"),
    (
        SignalStop,
        {"signal": "entropy", "threshold": 1, "top_k": 2, "num_tokens": 30, "keep_last": False},
        "keep_last",
    ),
    (DynamicDepth, {"check_levels": (5, 5)}, "strictly increasing"),
    (DynamicDepth, {"depth": 60}, "must exceed depth"),
    (JointThreshold, {"min_prob": 1e-5, "depth": 20}, "1911 nodes, more than 1024: give num_tok"),
    (EntropyBins, {"base": BASE, "edges": (2.0, 1.0)}, "strictly increasing"),
    (EntropyBins, {"base": BASE, "edges": (1.0,), "gammas": (0.3, 0.6, 1.0)}, "more gammas"),
    (EntropyBins, {"base": BASE, "edges": (1.0,), "gammas": (0.3,), "alpha": 64}, "exceeds 64"),
    (EntropyBins, {"base": BASE, "edges": (1.0,), "gammas": (0.3,), "surprise": 1}, "surprise"),
    (SparseGates, {**ONE_GATE, "thresholds": ()}, "one threshold per gate level"),
    (SparseGates, {**GATED, "gate_levels": (2, 1), "thresholds": (0.1, 0.2)}, "strictly incr"),
    (SparseGates, {**ONE_GATE, "gate_levels": (4,)}, "below the deepest"),
    (SparseGates, {**ONE_GATE, "width": 4}, "width exceeds max_width"),
    (ScoredTree, {**SCORE, "depth": 12}, "1111 nodes, more than 1024"),
    (Mars, {"theta": 1.01}, "at most 1"),
    (Mars, {"form": "margin", "theta": INF}, "theta"),
    (Mars, {"form": "prob_ratio", "theta": 2.0}, "at most 1"),
    (Calibration, {"slopes": (1.0, 1.0), "intercepts": (0.0,)}, "one intercept per slope"),
]


@pytest.mark.parametrize(("record", "fields", "named"), REFUSED)
def test_records_that_cannot_be_are_refused(
    record: type[Record], fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(RecordError, match=named):
        record(**fields)


FACTS = ("is_static", "is_deep", "is_timed", "reads_entropy", "is_ranked", "kernel", "chain")


@pytest.mark.parametrize("missing", [*FACTS, "withholds"])
def test_a_family_that_forgets_a_fact_is_refused_at_import(missing: str) -> None:
    facts: dict[str, Any] = dict.fromkeys((*FACTS, "withholds"), None)
    ShapeFamily(record=RootOnly, rule=static_shape, **facts)
    del facts[missing]
    with pytest.raises(TypeError, match=missing):
        ShapeFamily(record=RootOnly, rule=static_shape, **facts)
    with pytest.raises(TypeError, match="is_lossless"):
        AcceptanceFamily(record=Mars, rule=static_shape)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", EXAMPLES)
def test_families_that_read_no_entropy_decide_without_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replay leaves entropies out of what it reads for them."""
    family, rule = shape_family(EXAMPLES[name]), build_shape(EXAMPLES[name])
    _, tree, _ = grow(rule, LAWS)

    class Blind(drafts.PathDrafter):
        def children(self, *given: Any) -> Children:
            nothing = torch.full_like((found := super().children(*given)).entropy, math.nan)
            return found._replace(entropy=nothing, topk_entropy=nothing)

    monkeypatch.setattr(drafts, "PathDrafter", Blind)
    if not family.reads_entropy:
        _, blind, _ = grow(rule, LAWS)
        assert torch.equal(blind.token_ids, tree.token_ids)
        assert torch.equal(blind.parent, tree.parent)


def test_strict_and_ratio_acceptance_alone_are_lossless() -> None:
    for family in ACCEPTANCES:
        policy = Policy(shape=Chain(), acceptance=family.record())
        assert policy.lossless == (family.kind in ("strict", "ratio"))


class Stranger:
    kind = "chain"


SAID: list[tuple[Callable[[], object], str]] = [
    (lambda: Chain(num_draft_tokens="4"), "Chain, num_draft_tokens: not a whole number"),
    (lambda: Chain(num_tokens=4), "num_tokens: there is no such field; did you mean num_draft_tok"),
    (lambda: Chain(x=4), "Chain, x: there is no such field; its fields are num_draft_tokens"),
    (lambda: Policy(), "Policy, shape: it is missing"),
    (lambda: Policy(shape=object()), "Policy, shape: it has no kind, as records have"),
    (lambda: Policy(shape="chain"), "Policy, shape: it has no kind, as records have"),
    (lambda: Policy(shape=Stranger()), "Policy, shape.chain: not a Chain"),
    (lambda: Policy(shape={"kind": "chian"}), "Policy, shape: kind 'chian' is none of 'ar', "),
    (lambda: StaticTree(depth=6, num_tokens=4), "num_tokens counts the root and must exceed"),
    (lambda: EntropyBins(base=Chain(), edges=(1.0,)), "EntropyBins, base: not a StaticTree"),
    (lambda: setattr(Chain(), "num_draft_tokens", 5), "frozen, and model_copy"),
    (lambda: ReplayConfig(policies=("ar",), baselin=2), "no such field; did you mean baseline?"),
    (lambda: Range(low=-1, high=3), "Range, low: not at least 0"),
    (lambda: FileEntry(size=1, digest="x"), "FileEntry, digest: not of the pattern '^sha256:"),
]


@pytest.mark.parametrize(("make", "words"), SAID, ids=[words for _, words in SAID])
def test_records_from_python_are_refused_in_words(make: Callable[[], object], words: str) -> None:
    with pytest.raises(RecordError) as refused:
        make()
    assert words in str(refused.value)
    assert not re.search("pydantic|[Ii]nput|valid |instance", str(refused.value))
    assert refused.value.__suppress_context__, "nothing of pydantic's in the traceback"
