"""vLLM with the plugin: sampled, with policies that fail or may not run, and set up wrongly."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make engines` runs this")

from vllm.config import VllmConfig
from vllm.v1.spec_decode.eagle import EagleProposer

from specctl.artifacts import Origin, save_artifact
from specctl.artifacts.manifest import PairFingerprint
from specctl.engines import vllm_plugin
from specctl.engines.settings import PluginSettings, TraceSettings
from specctl.errors import ArtifactError, EngineError, LossyPolicyError
from specctl.runtime.load import load_pair
from specctl.runtime.words import resolve_policy
from tests.engines.vllm_engine import engine, ids_of, packaged, plain_texts, rows_of

CONFIDENCE = "confidence:window=5:threshold=0.4"
COUNT = 24


@pytest.fixture(scope="module")
def pair() -> Any:
    return load_pair("embedded", "embedded", device="cpu")


@pytest.fixture(scope="module")
def plain(pair: Any) -> list[list[int]]:
    return plain_texts(pair, packaged(COUNT))


def artifact(folder: Path, words: str, pair: PairFingerprint) -> Path:
    save_artifact(folder, resolve_policy(words).policy, Origin(pair), card=words)
    return folder


# --------------------------------------------------------------------------- policies that fail


@pytest.mark.policy_faults
def test_faults_and_refused_policies_leave_serving_alone(
    plain: list[list[int]], pair: Any, tmp_path: Path
) -> None:
    """One engine: every second request is logged; a rule breaks; what may not run is refused."""
    folder = artifact(tmp_path / "policy", CONFIDENCE, pair.fingerprint)
    trace = TraceSettings(out=str(tmp_path / "set"), every=2)
    given = ids_of(packaged(COUNT))
    with engine("eagle3", 5, PluginSettings(policy=str(folder), trace=trace)) as running:
        session = running.session
        assert running.generate(given) == plain

        rule, grow = session.rules.shape, session.rules.shape.grow
        rule.grow = lambda *_: 1 / 0
        before = running.counters()
        assert running.generate(given[:8]) == plain[:8]
        after = running.counters()
        rule.grow = grow
        assert session.faults.total > 0
        drafts = after["drafts"] - before["drafts"]
        assert after["draft_tokens"] - before["draft_tokens"] == 5 * drafts, "its own setting"

        played = session.policy
        with pytest.raises(LossyPolicyError, match="engine's own rule"):
            session.reload(resolve_policy("chain+mars", allow_lossy=True).policy)
        artifact(folder, "confidence:window=9", pair.fingerprint)
        session.follower.look()
        assert running.generate(given[:2]) == plain[:2]
        assert isinstance(session.follower.last_error, EngineError)
        assert session.policy == played
        other = pair.fingerprint.model_copy(update={"target_digest": "sha256:" + 64 * "0"})
        artifact(folder, "chain:2", other)
        session.follower.look()
        assert isinstance(session.follower.last_error, ArtifactError)
        artifact(folder, "chain:2", pair.fingerprint)
        session.follower.look()
        assert running.generate(given[:2]) == plain[:2]
        assert session.policy == resolve_policy("chain:2").policy

        running.generate(given[:2], temperature=0.8)
        session.close()
        assert (
            session.tracers[0].skipped["requests of another sampling"] == 1
        )  # of every second one
    rounds = rows_of(tmp_path / "set", "rounds")
    numbers = rounds["request_id"].str.slice(-6).cast(pl.Int64).unique()
    assert (numbers % 2 == 0).all()
    assert rounds["policy_digest"].n_unique() == 3  # the engine's own setting took over once


# --------------------------------------------------------------------------- sampled


def test_sampled_drafts_are_accepted_as_often_as_the_target_says(tmp_path: Path) -> None:
    """At temperature 1 a draft token is accepted with the target's probability of it. vLLM's CPU
    build as it ships accepts a third of them (issue 55005): 1,000 tokens show that beyond doubt.
    Labels of the requests that are logged densely are those of the text that was drawn."""
    trace = TraceSettings(out=str(tmp_path / "set"), temperature=1.0, dense_every=6)
    with engine("eagle3", 3, PluginSettings(trace=trace)) as running:
        texts = running.generate(ids_of(packaged(48)), temperature=1.0, seed=1)
        running.session.close()
        assert not running.session.tracers[0].skipped
    nodes = rows_of(tmp_path / "set", "nodes").filter(
        (pl.col("depth") >= 1) & pl.col("verified") & pl.col("node_match").is_not_null()
    )
    assert len(nodes) > 1000
    prob = nodes["target_logp"].exp().cast(pl.Float64)
    accepted, expected = int(nodes["node_match"].sum()), float(prob.sum())
    spread = math.sqrt(float((prob * (1 - prob)).sum()))
    assert abs(accepted - expected) < 5 * spread, (accepted, expected, spread)
    roots = rows_of(tmp_path / "set-dense", "rounds")
    nodes = rows_of(tmp_path / "set-dense", "nodes").filter(pl.col("depth") == 1)
    for (name, rows), text in zip(
        roots.group_by("request_id", maintain_order=True), texts[::6], strict=True
    ):
        assert rows["root_token_id"].to_list() == text[:-1]
        first = nodes.filter(pl.col("request_id") == name[0])
        matches = [a == b for a, b in zip(first["token_id"], text[1:], strict=True)]
        assert first["node_match"].to_list() == matches


# --------------------------------------------------------------------------- refused at the start


def starts(settings: PluginSettings, **speculative: Any) -> None:
    with engine("eagle3", 3, settings, **speculative):
        pass


TRACED = PluginSettings(trace=TraceSettings(out="unused"))


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that no test has run, and one without a method that the plugin replaces."""
    import vllm
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    monkeypatch.setenv("SPECCTL_VLLM", TRACED.to_json())
    monkeypatch.setattr(vllm, "__version__", "0.99.0+cpu")
    with pytest.raises(EngineError, match=r"tested in vLLM .* and this is 0\.99\.0"):
        vllm_plugin.register()
    monkeypatch.delattr(SpecDecodeBaseProposer, "_sample_draft_tokens")
    with pytest.raises(EngineError, match="_sample_draft_tokens"):
        vllm_plugin.hook()


def test_set_ups_in_which_drafts_cannot_be_watched_are_refused(
    monkeypatch: pytest.MonkeyPatch, pair: Any, tmp_path: Path
) -> None:
    """Before a model is loaded, each with what to set."""
    seen = []
    settle = VllmConfig.__post_init__
    monkeypatch.setattr(VllmConfig, "__post_init__", lambda self: seen.append(settle(self)))
    with pytest.raises(EngineError, match="draft_sample_method to greedy"):
        starts(TRACED, draft_sample_method="probabilistic")
    assert seen, "configurations pass by the check of the next test"
    other = pair.fingerprint.model_copy(update={"drafter_digest": "sha256:" + 64 * "0"})
    with pytest.raises(ArtifactError, match="E_TARGET"):
        starts(PluginSettings(policy=str(artifact(tmp_path / "other", CONFIDENCE, other))))


def test_the_second_model_runner_is_refused() -> None:
    """vLLM itself refuses it here, where there is no Triton, so the check is called by hand."""
    config = SimpleNamespace(speculative_config=object(), use_v2_model_runner=True)
    with pytest.raises(EngineError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        vllm_plugin._check_config(lambda self: None, config)


def test_other_drafters_asynchronous_scheduling_and_several_workers_are_refused() -> None:
    """What the CPU build never is; and an n-gram drafter, whose numba would keep this vLLM from
    starting another engine in the process."""
    for change, fix in (
        ({"use_async_scheduling": True}, "--no-async-scheduling"),
        ({"world_size": 2}, "one device"),
        ({"parallel_drafting": True}, "parallel_drafting to false"),
        ({"method": "ngram"}, "drafting method ngram"),
    ):
        facts = {"use_async_scheduling": False, "parallel_drafting": False, "method": "eagle3"}
        facts |= {"world_size": 1, **change}
        sizes = dict.fromkeys(("world_size", "tensor_parallel_size"), facts["world_size"])
        sizes |= {"data_parallel_size": 1, "pipeline_parallel_size": 1}
        drafts = SimpleNamespace(**{k: facts[k] for k in ("method", "parallel_drafting")})
        is_eagle = facts["method"] == "eagle3"
        runner = SimpleNamespace(
            drafter=EagleProposer.__new__(EagleProposer) if is_eagle else object(),
            use_async_scheduling=facts["use_async_scheduling"],
            vllm_config=SimpleNamespace(
                speculative_config=drafts, parallel_config=SimpleNamespace(**sizes)
            ),
        )
        with pytest.raises(EngineError, match=fix):
            vllm_plugin.check_engine(runner)
