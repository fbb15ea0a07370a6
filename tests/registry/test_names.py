"""The grammar: what is written is read back, no two names share a key, all else is refused."""

from __future__ import annotations

import re
import string
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specctl.errors import RegistryError
from specctl.registry import push
from specctl.registry.names import (
    MAX_NAME_BYTES,
    RESERVED,
    Reference,
    log_segment,
    name_of_segment,
    parse_name,
    parse_reference,
)
from specctl.stores import open_store
from specctl.stores.keys import check_key
from tests.registry.worlds import package, writer_on

LETTERS = string.ascii_lowercase + string.digits
WORDS = st.builds(
    "".join, st.tuples(st.sampled_from(LETTERS), st.text(LETTERS + "._-", max_size=63))
).map(lambda word: re.sub(r"\.+", ".", word))
HARDWARE = WORDS.filter(lambda word: word != "sha256")
NAMES = st.builds(
    lambda pair, tail: "+".join(pair) + "".join(tail),
    st.lists(WORDS, min_size=1, max_size=2),
    st.one_of(st.just(()), st.tuples(HARDWARE, WORDS).map(lambda two: (f"@{two[0]}:{two[1]}",))),
).filter(lambda name: len(name) <= MAX_NAME_BYTES)
DIGESTS = st.text("0123456789abcdef", min_size=64, max_size=64).map(lambda text: f"sha256:{text}")
REFERENCES = st.one_of(
    st.builds(Reference, NAMES),
    st.builds(Reference, NAMES, alias=WORDS),
    st.builds(Reference, NAMES, digest=DIGESTS),
)


@given(REFERENCES)
def test_a_reference_is_read_back_as_it_was_written(reference: Reference) -> None:
    assert parse_reference(str(reference)) == reference


@given(st.one_of(NAMES, st.sampled_from(RESERVED)))
def test_a_key_stands_for_one_name(name: str) -> None:
    segment = log_segment(name)
    assert name_of_segment(segment) == name
    assert check_key(f"log/{segment}/000000000000.json")


@given(st.text(max_size=40))
def test_all_other_text_is_refused(text: str) -> None:
    """What passes is what the reference writes: there is one spelling of everything."""
    with suppress(RegistryError):
        assert str(parse_reference(text)) == text


@given(st.text("ab=:@+_/.", max_size=12))
def test_other_key_segments_are_refused(segment: str) -> None:
    with suppress(RegistryError):
        assert log_segment(name_of_segment(segment)) == segment


@pytest.mark.parametrize(
    "text",
    ["", ".", "..", "../x", "/abs", "a/b", "a\\b", "a%2fb", "a\n", "a\x00", "A", "é", "e\u0301",
     "\u0430", "a\u202eb", "a\u200bb", "a b", "a+b+c", "+a", "a+", "a@h", "a@h:", "a@:w",
     "a@sha256:chat", "a@h:w@x:y", "_gc", "_settings", "-a", "a" * 65, "a=b", "a..b",
     "a+b...c", "a@h..:w"],
    ids=ascii,
)  # fmt: skip
def test_a_name_that_could_be_read_in_two_ways_is_refused(text: str) -> None:
    """Families 1, 2 and 11 of notes/reliability.md, 3.3."""
    with pytest.raises(RegistryError, match="E_NAME") as refused:
        parse_name(text)
    assert str(refused.value).isprintable()


def test_the_longest_name_can_be_used_and_a_longer_one_is_no_name(tmp_path: Path) -> None:
    """It is a file name, a segment of a key and a field of entries."""
    word = "a" * 64
    longest = f"{word}+{word}@{word}:{'a' * 60}"
    assert len(longest) == MAX_NAME_BYTES
    writer = writer_on(open_store(tmp_path))
    push(writer, package("one"), longest)
    assert list(writer.registry.known_log(longest).state.versions) == [package("one").digest]
    with pytest.raises(RegistryError, match="E_NAME"):
        push(writer, package("one"), f"{longest}a")


def test_the_last_part_is_read_by_its_colon() -> None:
    name, digest = "qwen3-8b+eagle3@h200:chat", "sha256:" + "0" * 64
    assert parse_reference(name) == Reference(name)
    assert parse_reference(f"{name}@prod") == Reference(name, alias="prod")
    assert parse_reference(f"{name}@{digest}") == Reference(name, digest=digest)
    assert parse_reference("qwen@h200") == Reference("qwen", alias="h200")
