"""The Python API has the names of other libraries, and its values can be printed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specctl import Decoder
from specctl.artifacts import Origin, load_artifact, save_artifact
from specctl.errors import ARGUMENTS, SpecctlError, UsageError
from specctl.policy import Chain, Policy
from specctl.registry import rollback
from specctl.replay.config import ReplayConfig
from tests.artifacts.examples import POLICIES

ZERO = "sha256:" + 64 * "0"


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder.from_pretrained("embedded", "embedded", policy="chain", device="cpu")


def test_lengths_have_the_names_of_transformers_and_of_vllm(decoder: Decoder) -> None:
    [ours] = decoder.generate("def add(", max_new_tokens=6)
    [theirs] = decoder.generate("def add(", max_tokens=6, top_k=-1)
    assert ours.token_ids == theirs.token_ids
    assert "".join(decoder.stream("def add(", max_tokens=6)) == ours.text
    decoder.generate("def add(", max_tokens=6, max_new_tokens=6)
    with pytest.raises(UsageError, match=r"\(6\) and max_tokens \(7\) mean the same"):
        decoder.generate("def add(", max_new_tokens=6, max_tokens=7)


def test_values_can_be_read(decoder: Decoder) -> None:
    pair = "Pair('embedded', 'embedded', float32 on cpu)"
    assert repr(decoder) == f"Decoder({pair}, policy='chain', batch_size=1)"
    [answer] = decoder.generate("def add(", max_new_tokens=2)
    assert repr(answer).startswith(f"Generation({answer.text!r}, 'length', Metrics(2 tokens, ")


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_policy_shows_no_weights(policy: Policy) -> None:
    assert len(repr(policy)) < 700
    assert repr(policy).startswith("Policy(shape=")


SAID = [{"role": "user", "content": "How much is 2 + 3?"}]


def test_one_conversation_is_a_prompt(decoder: Decoder) -> None:
    [alone], [listed] = (decoder.generate(given, max_tokens=4) for given in (SAID, [SAID]))
    assert alone.token_ids == listed.token_ids
    assert decoder.generate(tuple(SAID), max_tokens=4)[0].token_ids == alone.token_ids
    assert decoder.generate([], max_tokens=4) == []


PAIR = ("embedded", "embedded")
LOAD: Any = Decoder.from_pretrained
REFUSED: dict[str, tuple[Callable[[Decoder], object], str]] = {
    "no message": (lambda d: d.generate(SAID[0]), "a prompt of type dict is no text and no list"),
    "token ids": (lambda d: d.generate([1, 2]), "a prompt of type int is no text and no list of"),
    "mixed": (lambda d: d.generate([*SAID, "and"]), "a prompt of type dict is no text and no list"),
    "nothing": (lambda d: d.generate(None), "a prompt of type NoneType is no text and no list of"),
    "no role": (lambda d: d.generate([{"text": "x"}]), "the chat template refuses the messages"),
    "no length": (lambda d: d.generate("a", max_tokens=0), "max_new_tokens 0; each must be at"),
    "a shape": (lambda d: Decoder(d.pair, Chain()), "policy is of type Chain, and no Policy; give"),
    "lossy": (lambda _: LOAD(*PAIR, policy="chain+mars:theta=0.9"), "; pass allow_lossy=True if"),
    "device": (lambda _: LOAD(*PAIR, device="gpu"), "device gpu is none of auto, cpu, cuda"),
    "no such GPU": (
        lambda _: LOAD(*PAIR, device="cuda:77"),
        "device cuda:77: .*; use device cpu, or",
    ),
    "no drafter": (lambda _: LOAD("embedded", policy="chain"), "no drafter; give drafter"),
    "onnx": (
        lambda _: LOAD(*PAIR, policy="chain", decisions="onnx"),
        "decide it by torch \\(decisions torch\\)",
    ),
    "another pair": (
        lambda d: load_artifact(
            Path("chain"), expect=d.pair.fingerprint.model_copy(update={"target_digest": ZERO})
        ),
        "pass allow_mismatch=True \\(",
    ),
}


@pytest.mark.parametrize("row", REFUSED)
def test_refusals_speak_python(
    decoder: Decoder, row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, words = REFUSED[row]
    monkeypatch.chdir(tmp_path)
    save_artifact("chain", POLICIES["chain"], Origin(pair=decoder.pair.fingerprint), card="# -\n")
    with pytest.raises(SpecctlError, match=words) as refused:
        call(decoder)
    assert "--" not in str(refused.value)


def test_arguments_in_errors_are_those_of_python() -> None:
    functions = (Decoder.from_pretrained, Decoder.generate, rollback)
    known = {name for one in functions for name in inspect.signature(one).parameters}
    assert not {*ARGUMENTS} - known - {*ReplayConfig.model_fields}
    error = UsageError("--top-k 3 of --dense", hint="specctl run --top-k 2, or --force; see --seed")
    assert str(error) == "top_k 3 of --dense; specctl run --top-k 2, or force=True; see seed"
    assert error.line == "--top-k 3 of --dense; specctl run --top-k 2, or --force; see --seed"
