"""Token ids by choice: what is left out is gone, what is hashed keeps its equalities."""

from __future__ import annotations

import hashlib
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from specctl.collect import tokens
from specctl.collect.prompts import Naming, Prompt, load_prompts
from specctl.collect.responses import load_responses
from specctl.collect.tokens import (
    KEEP,
    TokenTreatment,
    check_key_file,
    prompt_naming,
    token_treatment,
)
from specctl.collect.trace_writer import TraceWriter
from specctl.collect.verifying import checked_tables
from specctl.errors import InputError, InvariantError, TraceError, TraceMismatchError, UsageError
from specctl.logs.trace_files import open_place
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import TEXT_COLUMNS, DenseLog
from specctl.policy import Policy, StaticTree
from specctl.replay.rounds import Rounds, replay
from tests.cli.command import refuses
from tests.collect.rounds import header
from tests.collect.sets import rows_of
from tests.replay.logs import random_traces
from tests.replay.text_policies import POLICY as TEXT_POLICY

VOCABULARY = 40
KEY = b"k" * 32
HASHED = TokenTreatment("hash", KEY, VOCABULARY)


def test_hashing_is_a_permutation_that_follows_the_key() -> None:
    one, two = HASHED._permutation, TokenTreatment("hash", b"l" * 32, VOCABULARY)._permutation
    assert sorted(one) == list(range(VOCABULARY))
    assert one.tolist() == TokenTreatment("hash", KEY, VOCABULARY)._permutation.tolist()
    assert one.tolist() != two.tolist()


@pytest.mark.parametrize("treatment", [KEEP, HASHED, TokenTreatment("drop")])
def test_columns_are_treated_and_others_untouched(treatment: TokenTreatment) -> None:
    for table, rows in rows_of("a").items():
        treated = treatment.applied(table, rows)
        for name in rows.schema.names:
            before, after = rows[name].to_pylist(), treated[name].to_pylist()
            if not name.endswith("token_id") or treatment.mode == "keep":
                assert after == before
            elif treatment.mode == "drop":
                assert after == [None] * len(before)
            else:
                assert after == [treatment._permutation[token] for token in before]
                assert after != before


def test_an_id_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvariantError, match="below the vocabulary's size, 3"):
        TokenTreatment("hash", KEY, 3).applied("nodes", rows_of("a")["nodes"])


def test_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "tokens"
    first = token_treatment("hash", path, VOCABULARY)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert token_treatment("hash", path, VOCABULARY) == first
    assert path.read_bytes().hex() not in str(first.header)


def test_a_key_is_made_whole_or_not_at_all_and_another_processs_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards that start at once hash alike, or not at all."""
    path, real = tmp_path / "key", tokens.write_new

    def die(staged: Path, content: bytes, **options: int) -> None:
        staged.write_bytes(content[:3])
        raise KeyboardInterrupt

    def lose(staged: Path, content: bytes, **options: int) -> None:
        real(staged, content, **options)
        path.write_bytes(KEY)

    monkeypatch.setattr(tokens, "write_new", die)
    with pytest.raises(KeyboardInterrupt):
        token_treatment("hash", path, VOCABULARY)
    assert not path.exists()
    monkeypatch.setattr(tokens, "write_new", lose)
    assert token_treatment("hash", path, VOCABULARY) == HASHED
    assert list(tmp_path.iterdir()) == [path]


def test_keys_and_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"short")
    for path, words in ((tmp_path / "short", "5 bytes"), (tmp_path, "found a folder; correct")):
        with pytest.raises(InputError, match=words):
            token_treatment("hash", path, VOCABULARY)
    for mode, key in (("hash", None), ("drop", Path("k")), ("no", None)):
        with pytest.raises(UsageError, match="--tokens"):
            token_treatment(mode, key, VOCABULARY)


def test_a_set_has_one_treatment(tmp_path: Path) -> None:
    made = header(collect={"max_new_tokens": 32, **HASHED.header})
    with TraceWriter.open(tmp_path / "set", made, tokens=HASHED) as writer:
        writer.commit(["a"], rows_of("a"))
    other = TokenTreatment("hash", b"l" * 32, VOCABULARY)
    for number, treatment in enumerate((KEEP, other, TokenTreatment("drop"))):
        changed = header(collect={"max_new_tokens": 32, **treatment.header})
        with pytest.raises(TraceMismatchError, match="token ids: expected --tokens"):
            TraceWriter.open(tmp_path / "set", changed, resume=True)
        TraceWriter.open(tmp_path / f"{number}", changed).close()
        with pytest.raises(TraceMismatchError, match="token ids: expected --tokens"):
            TraceSet.open(tmp_path / "set", tmp_path / f"{number}")


# --------------------------------------------------------------------------- replay


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DenseLog]:
    """One dense log under each treatment."""
    folder = tmp_path_factory.mktemp("tokens")
    traces = random_traces(folder / "made", num_prompts=3)
    [listing], found = traces.parts, {}
    for treatment in (KEEP, HASHED, TokenTreatment("drop")):
        collect = {**traces.header.collect, **treatment.header}
        made = traces.header.model_copy(update={"collect": collect})
        with TraceWriter.open(folder / treatment.mode, made, tokens=treatment) as writer:
            for segment in listing.segments:
                writer.commit(segment.prompt_ids, checked_tables(listing, segment))
        found[treatment.mode] = DenseLog.open(TraceSet.open(folder / treatment.mode))
    return found


def counts(rounds: Rounds) -> list[object]:
    return [value.tolist() for value in vars(rounds).values() if hasattr(value, "tolist")]


def test_replay_needs_no_tokens_and_text_features_their_equality_alone(
    logs: dict[str, DenseLog],
) -> None:
    tree = Policy(shape=StaticTree(depth=4, top_k=3, num_tokens=10))
    for policy, modes in ((tree, ("hash", "drop")), (TEXT_POLICY, ("hash",))):
        keep, *others = (counts(replay(logs[name], [policy])[0]) for name in ("keep", *modes))
        assert keep
        assert all(other == keep for other in others)
    with pytest.raises(TraceError, match="--tokens keep or hash, found --tokens drop"):
        replay(logs["drop"], [TEXT_POLICY])


def test_denied_tokens_need_identity(logs: dict[str, DenseLog]) -> None:
    for mode in ("hash", "drop"):
        with pytest.raises(TraceError, match=f"--tokens keep, found --tokens {mode}"):
            logs[mode].check_tokens("tokens that are never relaxed", "keep")
    assert next(logs["hash"].chunks(extra=TEXT_COLUMNS)).token_ids is not None


# --------------------------------------------------------------------------- names and keys

TEXT = "My name is John Smith."


def name_of(tmp_path: Path, naming: Naming, *lines: str) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join([*lines, "another"]))
    return load_prompts(path, naming=naming)[0].prompt_id


def test_names_do_not_confirm_a_text_that_is_hidden(tmp_path: Path) -> None:
    """An id made of the text alone says to each who guesses the text that the guess is right."""
    plain = name_of(tmp_path, prompt_naming("keep", None), TEXT)
    assert plain == f"line-1-{hashlib.sha256(TEXT.encode()).hexdigest()[:8]}"
    hashed, other = (prompt_naming("hash", tmp_path / name) for name in ("one", "two"))
    by_key = name_of(tmp_path, hashed, TEXT)
    assert len({plain, by_key, name_of(tmp_path, other, TEXT)}) == 3
    assert name_of(tmp_path, hashed, TEXT) == by_key  # as resuming needs it
    dropped = prompt_naming("drop", None)
    by_file = name_of(tmp_path, dropped, TEXT)
    digest = hashlib.sha256((tmp_path / "prompts.txt").read_bytes()).hexdigest()
    assert by_file == f"line-1-{digest[:8]}"
    # The wrong file is still another one, as ids of places alone would not tell.
    assert name_of(tmp_path, dropped, "Another prompt.") != by_file
    assert name_of(tmp_path, hashed, "Another prompt.") != by_key


def test_responses_find_their_prompts_under_any_naming(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"prompt": "p", "response": "r"}\n{"prompt": "q", "response": "s"}\n')
    for mode, key in (("keep", None), ("hash", tmp_path / "key"), ("drop", None)):
        naming = prompt_naming(mode, key)
        load_responses(path, naming).check_cover(load_prompts(path, naming=naming))


def test_a_mistyped_key_is_not_made_for_a_set_that_has_one(tmp_path: Path) -> None:
    made = header(collect={"max_new_tokens": 32, **HASHED.header})
    TraceWriter.open(tmp_path / "set", made).close()
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(TEXT)
    options = ("--tokens", "hash", "--token-key", tmp_path / "mistyped", "--resume")
    line = refuses(4, "collect", prompts, "-o", tmp_path / "set", *options)
    assert "expected the key that" in line
    assert "found no such file" in line
    assert not (tmp_path / "mistyped").exists()
    check_key_file(
        open_place(tmp_path / "new"), tmp_path / "mistyped"
    )  # a new set may have a new one


# --------------------------------------------------------------------------- texts of prompts

PROMPTS = [Prompt(name, "", (f"Say {name}.",)) for name in "abc"]


@pytest.mark.parametrize("tokens", [KEEP, HASHED], ids=["keep", "hash"])
def test_other_texts_under_the_same_ids_are_refused(tmp_path: Path, tokens: TokenTreatment) -> None:
    """A writer that knows no texts records none."""
    made = header(collect={"max_new_tokens": 32, **tokens.header})
    root = tmp_path / "set"
    with TraceWriter.open(root, made, tokens=tokens) as writer:
        writer.commit(["b"], rows_of("b"))
        assert [prompt.prompt_id for prompt in writer.plan(PROMPTS)] == ["a", "c"]
        writer.commit(["a"], rows_of("a"))
    with TraceWriter.open(root, made, resume=True, tokens=tokens) as writer:
        assert [prompt.prompt_id for prompt in writer.plan(PROMPTS)] == ["c"]
    for other in (replace(PROMPTS[0], turns=("Sing a.",)), replace(PROMPTS[0], chat=False)):
        with (
            TraceWriter.open(root, made, resume=True, tokens=tokens) as writer,
            pytest.raises(TraceMismatchError, match="prompt 'a'"),
        ):
            writer.plan([other])


def test_nobody_can_try_guesses_of_hidden_texts(tmp_path: Path) -> None:
    hashed = HASHED.text_digest(PROMPTS[0])
    assert hashed == HASHED.text_digest(PROMPTS[0]) != KEEP.text_digest(PROMPTS[0])
    assert hashed != replace(HASHED, key=b"l" * 32).text_digest(PROMPTS[0])
    dropped = TokenTreatment("drop")
    assert dropped.text_digest(PROMPTS[0]) is None
    with TraceWriter.open(tmp_path / "set", header(), tokens=dropped) as writer:
        writer.plan(PROMPTS)
        segment = writer.commit(["a"], rows_of("a"))
    assert segment.record.text_digests is None
