"""Names, references and places: one spelling of everything, all else is refused."""

from __future__ import annotations

import os
import re
import string
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specctl.errors import RegistryError, UsageError
from specctl.registry import init_registry, open_registry, push, read_package, split_reference
from specctl.registry.names import (
    MAX_NAME_BYTES,
    Reference,
    name_of,
    parse_name,
    parse_reference,
    segment_of,
)
from specctl.registry.publishing import contradictions
from specctl.stores import canonical_store, open_store
from specctl.stores.interface import check_key
from tests.artifacts.examples import write_artifact
from tests.registry.worlds import NAME, package, registry_on, writer_on

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


@given(NAMES)
def test_a_key_stands_for_one_name(name: str) -> None:
    segment = segment_of(name)
    assert name_of(segment) == name
    assert check_key(f"log/{segment}/000000000000.json")


@given(st.text(max_size=40))
def test_all_other_text_is_refused(text: str) -> None:
    """A text that passes is the text that the reference writes."""
    with suppress(RegistryError):
        assert str(parse_reference(text)) == text


@given(st.text("ab=:@+_/.", max_size=12))
def test_other_key_segments_are_refused(segment: str) -> None:
    with suppress(RegistryError):
        assert segment_of(name_of(segment)) == segment


@pytest.mark.parametrize(
    "text",
    ["", ".", "..", "../x", "/abs", "a/b", "a\\b", "a%2fb", "a\n", "a\x00", "A", "é", "e\u0301",
     "\u0430", "a\u202eb", "a\u200bb", "a b", "a+b+c", "+a", "a+", "a@h", "a@h:", "a@:w",
     "a@sha256:chat", "a@h:w@x:y", "_gc", "_settings", "-a", "a" * 65, "a=b", "a..b",
     "a+b...c", "a@h..:w"],
    ids=ascii,
)  # fmt: skip
def test_a_name_that_could_be_read_in_two_ways_is_refused(text: str) -> None:
    """Paths, absolute names and characters that a shell or a URL reads otherwise."""
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


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("toy-target+head@h200:chat", []),
        ("target", []),
        ("qwen3-8b+head@h200:chat", ["target"]),
        ("toy+eagle3@h100:code", ["drafter", "hardware", "workload"]),
        ("toy+eagle3@cpu:code", ["drafter", "workload"]),
    ],
)
def test_contradictions_of_a_name_are_told(name: str, parts: list[str], tmp_path: Path) -> None:
    found = contradictions(name, read_package(write_artifact(tmp_path / "a", "chain")))
    assert [line.split()[3] for line in found] == parts


@pytest.mark.parametrize(
    "texts",
    [
        ("{0}/team", "file://{0}/team", "file://localhost{0}/team/", "team", "./team",
         "sub/../team"),
        ("s3://bucket/team", "s3://bucket/team/", "S3://bucket/team"),
        ("s3://bucket", "s3://bucket/"),
    ],
    ids=lambda texts: texts[0],
)  # fmt: skip
def test_one_place_has_one_url(
    texts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached references go by it, so it must not depend on how the place was typed."""
    monkeypatch.chdir(tmp_path)
    [url] = {canonical_store(text.format(tmp_path)) for text in texts}
    monkeypatch.chdir("/")
    assert canonical_store(url) == url


def test_a_folder_above_a_link_is_that_of_its_target(tmp_path: Path) -> None:
    (tmp_path / "far" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "inner")
    assert canonical_store(f"{tmp_path}/link/../team") == f"{tmp_path}/far/team"
    assert canonical_store(f"{tmp_path}/link/team") == f"{tmp_path}/link/team", "as it was given"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("s3://bucket//team", "dotted part"),
        ("s3://bucket/../team", "dotted part"),
        ("s3://bucket/te\nam", "no plain text"),
        ("s3://bucket/team?", "a query"),
        ("s3://", "no bucket"),
        ("s3://a b/x", "bucket 'a b'"),
        ("s3://bucket:9000/x", "bucket 'bucket:9000'"),
        ("s3://[::1/x", "IPv6"),
        ("file:////srv/team", "dotted part"),
        ("file://elsewhere/team", "scheme 'file'"),
        ("oci://host/x", "scheme 'oci'"),
        ("s3:/bucket/x", "no // behind"),
        ("s3://key:hunter2@bucket/x", "not repeated"),
        ("https://bob:hunter2@host/x", "not repeated"),
        ("s3://bucket/x?X-Amz-Signature=hunter2", "a query"),
    ],
)
def test_a_place_that_could_be_read_in_two_ways_is_refused(text: str, found: str) -> None:
    for use in (canonical_store, open_store, open_registry, init_registry):
        with pytest.raises(UsageError) as refused:
            use(text)
        assert found in str(refused.value)
        assert "hunter2" not in str(refused.value)
        assert "\n" not in str(refused.value)
    if "not repeated" in found:
        with pytest.raises(UsageError) as refused:
            split_reference(f"{text}/qwen@prod")
        assert "hunter2" not in str(refused.value)


def test_a_reference_behind_a_place_is_told_from_other_text(tmp_path: Path) -> None:
    registry_on(open_store(tmp_path))
    for place in (str(tmp_path), "s3://bucket/registry", "file:///srv/registry"):
        found = split_reference(f"{place}/{NAME}@prod")
        assert found is not None
        assert (found[0], str(found[1])) == (place, f"{NAME}@prod")
    snapshot = f"s3://bucket@sha256:{'0' * 64}"
    for text in ("eagle2:depth=8", "a/b@prod", f"{tmp_path}/Upper@prod", os.devnull, snapshot):
        assert split_reference(text) is None
