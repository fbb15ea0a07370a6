"""One registry, one URL: what is kept by it must not depend on how it was typed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specctl.errors import UsageError
from specctl.registry import split_reference
from specctl.registry.opening import place_registry
from specctl.registry.urls import parse_place, registry_url
from specctl.stores import open_store
from tests.registry.worlds import registry_on

SECRET = "hunter2"


@pytest.mark.parametrize(
    "texts",
    [
        (
            "{0}/team",
            "file://{0}/team",
            "file://localhost{0}/team/",
            "team",
            "./team",
            "sub/../team",
        ),
        ("s3://bucket/team", "s3://bucket/team/", "S3://bucket/team"),
        ("s3://bucket", "s3://bucket/"),
        (
            "oci://host:5000/a/b?log={0}/logs",
            "oci://host:5000/a/b?log=logs",
            "oci://host:5000/a/b?log=./logs/",
            "oci://host:5000/a/b?log=file://{0}/logs",
            "OCI://HOST:5000/a/b/?log={0}/%6Cogs",
        ),
        ("oci://host/a?log=s3://bucket/x", "oci://host/a?log=s3%3A%2F%2Fbucket/x/"),
    ],
    ids=lambda texts: texts[0],
)
def test_one_registry_has_one_url(
    texts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    [url] = {registry_url(text.format(tmp_path)) for text in texts}
    assert registry_url(url) == url
    monkeypatch.chdir("/")
    assert registry_url(url) == url


def test_relative_logs_of_two_folders_are_two_registries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        urls.add(registry_url("oci://host/a?log=logs"))
    assert len(urls) == 2


@pytest.mark.parametrize("name", ["a b", "qwen+eagle", "50%", "a&b", "who?", "a#b", "é", "\udcff"])
def test_a_log_in_a_folder_of_any_name_is_found_again(name: str, tmp_path: Path) -> None:
    written = f"{tmp_path}/" + "".join(f"%{byte:02X}" for byte in os.fsencode(name))
    found = parse_place(f"oci://host/a?log={written}")
    assert found.store == f"{tmp_path}/{name}"
    assert found.url.isprintable()
    assert parse_place(found.url) == found
    assert parse_place(f"file://{written}").store == f"{tmp_path}/{name}"


def test_a_plus_in_a_log_is_a_plus(tmp_path: Path) -> None:
    _, store, _ = place_registry(f"oci://host/a?log={tmp_path}/lo+g")
    assert store.url == f"{tmp_path}/lo+g"


def test_what_is_above_a_link_is_not_what_is_written_before_it(tmp_path: Path) -> None:
    (tmp_path / "far" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "inner")
    assert registry_url(f"{tmp_path}/link/../team") == f"{tmp_path}/far/team"
    assert registry_url(f"{tmp_path}/link/team") == f"{tmp_path}/link/team", "as it was given"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("s3://bucket//team", "dotted part"),
        ("s3://bucket/team//", "dotted part"),
        ("s3://bucket/../team", "dotted part"),
        ("s3://bucket/te\nam", "no plain text"),
        ("s3://bucket/team?", "a query"),
        ("s3://bucket/team#x", "a fragment"),
        ("s3://", "no bucket"),
        ("s3://a b/x", "bucket 'a b'"),
        ("s3://bucket:9000/x", "bucket 'bucket:9000'"),
        ("s3://[::1/x", "IPv6"),
        ("file:////srv/team", "dotted part"),
        ("file:///srv/team?x", "a query"),
        ("file://elsewhere/team", "scheme 'file'"),
        ("gs://bucket/x", "scheme 'gs'"),
        ("s3:/bucket/x", "no // behind"),
        ("oci:host/x", "no // behind"),
        ("oci://host/x", "no log"),
        ("oci://host/x?log=", "another query"),
        ("oci://host/x?logs=a", "another query"),
        ("oci://host/x?log=a&log=b", "more than one log"),
        ("oci://host/x?log=a&", "more than one log"),
        ("oci://host/x?log=a#b", "more than one log"),
        ("oci://host/x?log=s3://bucket//a", "dotted part"),
        ("oci://host/x?log=oci://host/y", "scheme 'oci'"),
        ("oci://host?log=a", "no such host or repository"),
        ("oci:///x?log=a", "no such host or repository"),
        ("oci://host//x?log=a", "no such host or repository"),
        ("oci://host/../x?log=a", "no such host or repository"),
        ("oci://host/Upper?log=a", "no such host or repository"),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(text: str, found: str) -> None:
    with pytest.raises(UsageError) as refused:
        registry_url(text)
    assert found in refused.value.found
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        f"s3://key:{SECRET}@bucket/x",
        f"s3://{SECRET}@bucket/x",
        f"s3://key:{SECRET}@/x",
        f"oci://bob:{SECRET}@host/x?log=a",
        f"oci://bob:{SECRET}@host/x",
        f"oci://host/x?log=s3://key:{SECRET}@bucket/x",
        f"oci://host/x?log=s3:%2F%2Fkey:{SECRET}%40bucket/x",
        f"https://bob:{SECRET}@host/x",
        f"s3://bucket/x?X-Amz-Signature={SECRET}",
        f"oci://host/x?log=a&token={SECRET}",
    ],
)
def test_a_secret_in_a_url_is_refused_and_not_repeated(text: str) -> None:
    for opened in (registry_url, place_registry, open_store):
        with pytest.raises(UsageError) as refused:
            opened(text)  # type: ignore[operator]
        assert SECRET not in str(refused.value)
    if "@" in text:
        with pytest.raises(UsageError) as refused:
            split_reference(f"{text}/qwen@prod")
        assert SECRET not in str(refused.value)


# ------------------------------------------------------------------ references


NAME = "qwen+eagle3@h200:chat"


def test_a_reference_behind_a_place_is_told_from_other_text(tmp_path: Path) -> None:
    registry_on(open_store(tmp_path))
    for place in (str(tmp_path), "s3://bucket/registry", "file:///srv/registry"):
        found = split_reference(f"{place}/{NAME}@prod")
        assert found is not None
        assert (found[0], str(found[1])) == (place, f"{NAME}@prod")
    for text in ("eagle2:depth=8", "a/b@prod", f"{tmp_path}/Upper@prod", os.devnull):
        assert split_reference(text) is None


@pytest.mark.parametrize("place", ["oci://host/a/b?log=s3://bucket/x", "oci://host/a?log=lo+g"])
@pytest.mark.parametrize("version", ["@prod", f"@sha256:{'0' * 64}", ""])
def test_a_reference_stands_behind_the_repository_or_behind_the_log(
    place: str, version: str
) -> None:
    repository, _, query = place.partition("?")
    for text in (f"{place}/{NAME}{version}", f"{repository}/{NAME}{version}?{query}"):
        found = split_reference(text)
        assert found is not None
        assert (found[0], str(found[1])) == (place, f"{NAME}{version}")


def test_a_snapshot_at_the_top_of_a_bucket_is_no_reference() -> None:
    assert split_reference(f"s3://bucket@sha256:{'0' * 64}") is None
