"""Token ids by choice: what is left out is gone."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from specctl.collect.config import TokenMode
from specctl.collect.prompts import Prompt, load_prompts
from specctl.collect.responses import load_responses
from specctl.collect.trace_writer import TraceWriter, token_header
from specctl.errors import TraceError, TraceMismatchError
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.policy import Policy, StaticTree
from specctl.replay.rounds import Rounds, replay
from tests.collect.rounds import header
from tests.collect.sets import rows, rows_of
from tests.policy.scorers import SCORED_POLICIES
from tests.replay.logs import random_traces

MODES: tuple[TokenMode, ...] = ("keep", "drop")


def test_a_set_keeps_tokens_or_leaves_them_out(tmp_path: Path) -> None:
    made = header(collect={"max_new_tokens": 32, **token_header("drop")})
    given = rows_of("a")
    with TraceWriter.open(tmp_path / "set", made) as writer:
        writer.commit(["a"], given)
    for table, frame in rows(tmp_path / "set").items():
        for name in frame.columns:
            values = given[table][name].to_pylist()
            wanted = [None] * len(values) if name.endswith("token_id") else values
            assert frame[name].to_list() == wanted, name
    changed = header(collect={"max_new_tokens": 32, **token_header("keep")})
    with pytest.raises(TraceMismatchError, match="it has --tokens drop, not --tokens keep"):
        TraceWriter.open(tmp_path / "set", changed, resume=True)
    TraceWriter.open(tmp_path / "other", changed).close()
    with pytest.raises(TraceMismatchError, match="token ids: it has --tokens keep"):
        TraceSet.open(tmp_path / "set", tmp_path / "other")


# --------------------------------------------------------------------------- replay


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DenseLog]:
    """One dense log with token ids and one without."""
    folder = tmp_path_factory.mktemp("tokens")
    traces = random_traces(folder / "made", num_prompts=3)
    [listing], found = traces.parts, {}
    for mode in MODES:
        collect = {**traces.header.collect, **token_header(mode)}
        made = traces.header.model_copy(update={"collect": collect})
        with TraceWriter.open(folder / mode, made) as writer:
            for segment in listing.segments:
                writer.commit(segment.prompt_ids, listing.tables(segment))
        found[mode] = DenseLog.open(TraceSet.open(folder / mode))
    return found


def counts(rounds: Rounds) -> list[object]:
    return [value.tolist() for value in vars(rounds).values() if hasattr(value, "tolist")]


def test_replay_needs_no_tokens_but_for_features_of_the_text(logs: dict[str, DenseLog]) -> None:
    tree = Policy(shape=StaticTree(depth=4, top_k=3, num_tokens=10))
    keep, drop = (counts(replay(logs[mode], [tree])[0]) for mode in MODES)
    assert keep == drop != []
    with pytest.raises(TraceError, match="collected with --tokens drop"):
        replay(logs["drop"], [SCORED_POLICIES["survival"]])
    with pytest.raises(TraceError, match="denied tokens need token ids"):
        logs["drop"].check_tokens("denied tokens")


# --------------------------------------------------------------------------- names and texts

TEXT = "My name is John Smith."


def name_of(tmp_path: Path, *lines: str, hide_text: bool) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join([*lines, "another"]))
    return load_prompts(path, hide_text=hide_text)[0].prompt_id


def test_names_do_not_confirm_a_text_that_is_hidden(tmp_path: Path) -> None:
    """An id made of the text alone says to each who guesses the text that the guess is right."""
    plain = name_of(tmp_path, TEXT, hide_text=False)
    assert plain == f"line-1-{hashlib.sha256(TEXT.encode()).hexdigest()[:8]}"
    by_file = name_of(tmp_path, TEXT, hide_text=True)
    digest = hashlib.sha256((tmp_path / "prompts.txt").read_bytes()).hexdigest()
    assert by_file == f"line-1-{digest[:8]}"
    # The wrong file is still another one, as ids of places alone would not tell.
    assert name_of(tmp_path, "Another prompt.", hide_text=True) != by_file


@pytest.mark.parametrize("hide_text", [False, True])
def test_responses_find_their_prompts_by_either_name(tmp_path: Path, *, hide_text: bool) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"prompt": "p", "response": "r"}\n{"prompt": "q", "response": "s"}\n')
    prompts = load_prompts(path, hide_text=hide_text)
    responses = load_responses(path, hide_text=hide_text)
    assert responses.answered(prompts, strict=True) == prompts


PROMPTS = [Prompt(name, "", (f"Say {name}.",)) for name in "abc"]


def test_other_texts_under_the_same_ids_are_refused(tmp_path: Path) -> None:
    """A writer that knows no texts records none."""
    root = tmp_path / "set"
    with TraceWriter.open(root, header()) as writer:
        writer.commit(["b"], rows_of("b"))
        assert [prompt.prompt_id for prompt in writer.plan(PROMPTS)] == ["a", "c"]
        writer.commit(["a"], rows_of("a"))
    with TraceWriter.open(root, header(), resume=True) as writer:
        assert [prompt.prompt_id for prompt in writer.plan(PROMPTS)] == ["c"]
    for other in (replace(PROMPTS[0], turns=("Sing a.",)), replace(PROMPTS[0], chat=False)):
        with (
            TraceWriter.open(root, header(), resume=True) as writer,
            pytest.raises(TraceMismatchError, match="prompt 'a'"),
        ):
            writer.plan([other])


def test_nobody_can_try_guesses_of_hidden_texts(tmp_path: Path) -> None:
    with TraceWriter.open(tmp_path / "set", header(collect=token_header("drop"))) as writer:
        writer.plan(PROMPTS)
        segment = writer.commit(["a"], rows_of("a"))
    assert segment.record.text_digests is None
