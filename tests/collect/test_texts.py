"""Prompts whose texts changed under their ids are not gone on with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specctl.collect.compacting import compact
from specctl.collect.formats import Prompt
from specctl.collect.live import collect_live
from specctl.collect.logs import read_commits
from specctl.collect.merging import merge
from specctl.collect.store import TraceWriter
from specctl.collect.texts import committed_texts, text_digest
from specctl.collect.tokens import KEEP, TokenTreatment
from specctl.errors import TraceMismatchError
from specctl.policy import Policy
from specctl.policy.records import Chain
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import load_pair
from tests.collect.rounds import header
from tests.collect.sets import PROMPTS
from tests.collect.small_rows import tables_of

OTHERS = [replace(prompt, turns=("Something else.",)) for prompt in PROMPTS]
HASHED = TokenTreatment("hash", b"k" * 32, 1 << 16)


def collect(root: Path, prompts: list[Prompt], tokens: TokenTreatment = KEEP) -> list[str]:
    """Commits what is pending, one by one; returns that."""
    made = header(collect={"max_new_tokens": 32, **tokens.header})
    with TraceWriter.open(root, made, resume=True, tokens=tokens) as writer:
        left = [prompt.prompt_id for prompt in writer.plan(prompts)]
        for name in left:
            writer.commit([name], tables_of([name]))
    return left


@pytest.mark.parametrize("tokens", [KEEP, HASHED])
def test_other_texts_under_the_same_ids_are_refused(tmp_path: Path, tokens: TokenTreatment) -> None:
    assert collect(tmp_path / "set", PROMPTS[:2], tokens) == ["a", "b"]
    assert collect(tmp_path / "set", PROMPTS, tokens) == ["c"]
    with pytest.raises(TraceMismatchError, match=r"prompt 'b': .*ids of their own"):
        collect(tmp_path / "set", [PROMPTS[0], OTHERS[1]], tokens)
    raw = replace(PROMPTS[0], chat=False)
    with pytest.raises(TraceMismatchError, match="prompt 'a'"):
        collect(tmp_path / "set", [raw], tokens)


def test_digests_outlive_compaction_and_merging(tmp_path: Path) -> None:
    root, out = tmp_path / "set", tmp_path / "out"
    collect(root, PROMPTS)
    before = committed_texts(read_commits(root).commits)
    merge([str(root)], str(out))
    compact(root)
    compact(out)
    for name in (root, out):
        [commit] = read_commits(name).commits
        assert committed_texts([commit]) == before
        assert sorted(before) == ["a", "b", "c"]
        with pytest.raises(TraceMismatchError, match="prompt 'a'"):
            collect(name, OTHERS)


def test_prompts_of_earlier_writers_have_no_digest_and_stay(tmp_path: Path) -> None:
    root = tmp_path / "set"
    with TraceWriter.open(root, header()) as writer:
        writer.commit(["a"], tables_of(["a"]))  # by one who tells no texts
    collect(root, PROMPTS[1:])
    compact(root)
    [commit] = read_commits(root).commits
    assert commit.text_digests is not None
    assert [digest is None for digest in commit.text_digests] == [True, False, False]
    assert collect(root, [OTHERS[0]]) == []


def test_nobody_can_try_guesses_of_hidden_texts(tmp_path: Path) -> None:
    hashed = text_digest(PROMPTS[0], HASHED)
    assert hashed != text_digest(PROMPTS[0], replace(HASHED, key=b"l" * 32))
    assert hashed == text_digest(PROMPTS[0], HASHED)
    assert text_digest(PROMPTS[0], TokenTreatment("drop")) is None
    collect(tmp_path / "set", PROMPTS, TokenTreatment("drop"))
    assert all(commit.text_digests is None for commit in read_commits(tmp_path / "set").commits)


def test_collecting_tells_the_texts(tmp_path: Path) -> None:
    pair, policy = load_pair("embedded", "embedded", device="cpu"), Policy(shape=Chain())
    settings, out = DecodeSettings(4), tmp_path / "traces"
    collect_live(pair, PROMPTS[:1], policy, settings, out)
    assert collect_live(pair, PROMPTS[:2], policy, settings, out, resume=True).num_skipped == 1
    with pytest.raises(TraceMismatchError, match="prompt 'a'"):
        collect_live(pair, OTHERS[:1], policy, settings, out, resume=True)
