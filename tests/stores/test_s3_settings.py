"""Addresses in the environment that are none: obstore ends the process on some of them."""

from __future__ import annotations

import os

import pytest

from specctl.errors import UsageError
from specctl.stores import open_store
from specctl.stores.s3_settings import ENDPOINTS, REGIONS
from tests.cli.command import refuses


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ENDPOINTS, *REGIONS):
        monkeypatch.setenv(name, "x")  # so that it is put back whatever the test does
        monkeypatch.delenv(name)


@pytest.mark.parametrize("name", ENDPOINTS)
@pytest.mark.parametrize(
    "endpoint",
    [
        *(
            "localhost:9000",
            "127.0.0.1",
            "http://",
            "http://a b",
            "http://[::1",
            "http://ex\u00e4mple",
        ),
        *("http://host:99999", "ftp://host", "http://host/x?y", "http://host\n", " "),
    ],
)
def test_an_endpoint_that_is_none_is_refused(
    name: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, endpoint)
    with pytest.raises(UsageError, match=r"http://host\[:port\]") as refused:
        open_store("s3://bucket/x")
    assert refused.value.what == name
    assert "\n" not in str(refused.value)


def test_a_password_in_an_endpoint_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:hunter2@host:9000")
    assert "hunter2" not in refuses(2, "registry", "list", "--registry", "s3://bucket/x")


@pytest.mark.parametrize("name", REGIONS)
def test_a_region_that_is_none_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "a b")
    with pytest.raises(UsageError, match=name):
        open_store("s3://bucket/x")


@pytest.mark.parametrize(
    "endpoint",
    [
        *("http://127.0.0.1:9000", "https://s3.example.com/", "http://[::1]:9000"),
        "https://host/a/path",
    ],
)
def test_other_endpoints_are_taken(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    assert open_store("s3://bucket/x").url == "s3://bucket/x"


def test_an_empty_variable_is_none(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As every other S3 tool has it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "")
    assert list(open_store(s3_url).objects("")) == []
    assert "AWS_ENDPOINT_URL_S3" not in os.environ
