"""Whatever an error is made of, it is one printable line, and programs can read its parts."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specctl.errors import (
    MAX_CHARS,
    ArtifactError,
    InputError,
    PromptLineError,
    RegistryError,
    SpecctlError,
    one_line,
    refusals_of,
    shown,
)

HOSTILE = "\x1b[2J\u202e\u2028\x00\ud800\r\n"
TEXTS = st.text(st.characters() | st.sampled_from(HOSTILE)) | st.text().map(lambda t: t * 999)


@given(TEXTS, TEXTS, TEXTS)
@example("phi" * 90_000, "\x1b" * 90_000, "\n" * 90_000)
def test_every_error_is_one_short_printable_line(field: str, problem: str, hint: str) -> None:
    coded = ArtifactError("E_DIGEST", field, problem, hint=hint, artifact=problem)
    log = RegistryError("E_LOG", field, problem, hint=hint)
    for error in (SpecctlError(problem, hint=hint), log, coded):
        assert str(error).isprintable()
        assert len(str(error)) < 3 * MAX_CHARS
        for part in (error.message, error.hint):
            assert part in error.line
            assert len(part) <= MAX_CHARS


@given(TEXTS)
@example("\x1b" * 300)
def test_text_that_is_shown_stays_as_it_is(text: str) -> None:
    """So an error made of another's parts escapes nothing twice."""
    for show in (shown, one_line):
        once = show(text)
        assert show(once) == once
        assert once.isprintable()
        assert len(once) <= MAX_CHARS


def test_a_long_text_keeps_both_ends() -> None:
    path = "/srv/" + "deep/" * 200 + "policy.onnx"
    assert shown(path).startswith("/srv/deep/")
    assert shown(path).endswith("/policy.onnx")
    assert len(shown(path, max_chars=40)) == 40
    assert shown("short\tand sound é λ 日本") == r"short\tand sound é λ 日本"


def test_a_refusal_says_its_facts_and_what_to_do() -> None:
    error = ArtifactError("E_DIGEST", "policy.onnx", "expected 7 bytes, found 6 bytes")
    assert str(error) == "E_DIGEST policy.onnx: expected 7 bytes, found 6 bytes; do not load it"
    assert (error.field, error.artifact) == ("policy.onnx", None)
    error.name_artifact("./folder")
    assert str(error) == (
        "E_DIGEST policy.onnx of ./folder: expected 7 bytes, found 6 bytes; do not load it"
    )
    assert (error.code, error.field, error.artifact) == ("E_DIGEST", "policy.onnx", "./folder")


def test_an_error_of_another_process_is_the_same() -> None:
    coded = ArtifactError("E_SIZE", "config.json", "expected less, found more", artifact="./a")
    for error in (
        coded,
        PromptLineError("p.txt", "line 7", "no text", "x"),
        InputError("x", hint="y"),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize(("inner", "wanted"), [("chat@prod", "chat@prod"), (None, "./a")])
def test_a_refusal_is_of_the_artifact_that_was_named_first(inner: str | None, wanted: str) -> None:
    with pytest.raises(ArtifactError) as caught, refusals_of("./a"), refusals_of(inner):
        raise ArtifactError("E_SIZE", "config.json", "expected less, found more")
    assert caught.value.artifact == wanted
    assert f"config.json of {wanted}: " in str(caught.value)
