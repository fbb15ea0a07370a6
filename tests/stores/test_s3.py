"""An S3 store that refuses or does not answer, odd keys, settings, the page's IAM policy."""

from __future__ import annotations

import json
import os
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest

from specctl.artifacts.signing import SigningKey
from specctl.errors import StoreError, UsageError
from specctl.registry import push
from specctl.stores import TransientError, UnknownOutcomeError, UnreadableError, open_store, s3
from specctl.stores.s3 import ENDPOINTS, REGIONS
from tests.cli.command import passes, refuses
from tests.registry.worlds import NAME, package, registry_on, writer_on
from tests.servers import S3_ENVIRONMENT
from tests.stores.memory import MemoryStore

pytestmark = pytest.mark.usefixtures("no_waits")


def test_an_s3_that_does_not_answer_is_a_store_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    store = open_store("s3://bucket/x")
    with pytest.raises(TransientError):
        store.get("a", max_bytes=1)
    with pytest.raises(UnknownOutcomeError):
        store.put_new("a", b"1")


def test_a_missing_bucket_is_named_by_every_call(s3_url: str) -> None:
    store = open_store("s3://no-such-bucket/x")
    calls: list[Callable[[], object]] = [
        lambda: store.put_new("a", b"1"),
        lambda: store.get("a", max_bytes=1),
        lambda: list(store.objects("log")),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="bucket 'no-such-bucket' does not exist"):
            call()


@pytest.fixture
def without_conditions(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that answers a put of `denied` with 403 and every other one with 501.

    Its URL is the environment's endpoint.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(403 if self.path.endswith("denied") else 501)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        for name, value in {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}.items():
            monkeypatch.setenv(name, value)
        yield endpoint
        server.shutdown()


@pytest.mark.parametrize(
    ("key", "words"), [("a", "does not support conditional puts"), ("denied", "role")]
)
def test_a_put_that_is_refused_is_told_apart(without_conditions: str, key: str, words: str) -> None:
    with pytest.raises(StoreError, match=words) as refusal:
        open_store("s3://bucket/x").put_new(key, b"1")
    assert not isinstance(refusal.value, UnknownOutcomeError)


ODD = ["log/a//x", "log/a/..", "log/a/./x", "log/a/b\x01c"]


@pytest.mark.parametrize("odd", ODD, ids=ascii)
def test_a_key_that_hides_a_folder_is_named(s3_url: str, odd: str) -> None:
    store = open_store(s3_url)
    store.put_new("log/a/1", b"1")
    put_raw(s3_url, odd)
    with pytest.raises(UnreadableError, match="has empty segments"):
        list(store.objects("log"))
    assert list(store.objects("pins")) == []


def test_an_odd_key_in_one_history_stops_nobody(s3_url: str) -> None:
    """A list passes over it, and `verify` reports nothing else."""
    at = ("--registry", s3_url)
    passes("registry", "init", *at)
    for odd in ODD:
        put_raw(s3_url, odd)
    assert open_store(s3_url).children("log") == ["a"]
    for verb in ("list", "verify"):
        passes("registry", verb, *at)


def test_a_folder_made_by_hand_is_not_in_itself(s3_url: str) -> None:
    """As a bucket's console makes it: an object whose key ends in /, which the client drops."""
    put_raw(s3_url, "")
    passes("registry", "init", "--registry", s3_url)
    for folder in ("log/", "pins/"):
        put_raw(s3_url, folder)
    store = open_store(s3_url)
    store.put_new("log/a/1", b"1")
    assert [one.key for one in store.objects("log")] == ["log/a/1"]
    assert "" not in [one.key for one in store.objects("")]
    passes("registry", "list", "--registry", s3_url)


def put_raw(url: str, key: str) -> None:
    """What any other client may put; moto asks for no signature."""
    place = f"{os.environ['AWS_ENDPOINT_URL']}/{url.removeprefix('s3://')}"
    request = urllib.request.Request(f"{place}/{quote(key)}", b"x", method="PUT")
    urllib.request.urlopen(request).close()


def test_half_of_the_credentials_are_named_whole(
    s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        open_store(s3_url).get("a", max_bytes=1)


def test_no_credentials_are_named_instead_of_the_metadata_address(
    without_conditions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server stands for the metadata service of a machine without a role."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", without_conditions)
    monkeypatch.setattr(s3, "_METADATA", without_conditions)
    with pytest.raises(TransientError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        open_store("s3://bucket/x").get("a", max_bytes=1)


# ------------------------------------------------------------------ settings of the environment


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ENDPOINTS, *REGIONS):
        monkeypatch.setenv(name, "x")  # so that it is put back whatever the test does
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_settings")
@pytest.mark.parametrize("name", ENDPOINTS)
@pytest.mark.parametrize(
    "endpoint", ["localhost:9000", "http://[::1", "http://host:99999", "http://host/x?y", " "]
)
def test_an_endpoint_that_is_none_is_refused(
    name: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, endpoint)
    with pytest.raises(UsageError, match=r"http://host\[:port\]") as refused:
        open_store("s3://bucket/x")
    assert str(refused.value).startswith(f"{name} is ")
    assert "\n" not in str(refused.value)


def test_a_password_in_an_endpoint_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:hunter2@host:9000")
    assert "hunter2" not in refuses(2, "registry", "list", "--registry", "s3://bucket/x")


@pytest.mark.usefixtures("no_settings")
@pytest.mark.parametrize("name", REGIONS)
def test_a_region_that_is_none_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "a b")
    with pytest.raises(UsageError, match=name):
        open_store("s3://bucket/x")


def test_an_empty_variable_is_none(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As every other S3 tool has it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "")
    assert list(open_store(s3_url).objects("")) == []
    assert "AWS_ENDPOINT_URL_S3" not in os.environ


PAGE = Path(__file__).parents[2] / "docs" / "operators.md"
PLACE = "team-policies/registry"


def allowed(action: str, key: str) -> bool:
    """Whether the policy of docs/operators.md lets its user do this to a key."""
    [text] = re.findall(r"```json\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    effects = {
        statement["Effect"]
        for statement in json.loads(text)["Statement"]
        if action in statement["Action"]
        and any(fnmatchcase(f"arn:aws:s3:::{PLACE}/{key}", one) for one in statement["Resource"])
    }
    return effects == {"Allow"}


def test_a_publisher_of_the_page_creates_what_a_push_writes_and_nothing_else() -> None:
    store = MemoryStore()
    registry_on(store)
    push(writer_on(store, SigningKey.generate()), package("one"), NAME)
    written = store.kept.keys() - {"registry.json"}
    assert {key.split("/")[0] for key in written} == {
        "blobs", "log", "manifests", "probe", "signatures",
    }  # fmt: skip
    assert all(allowed("s3:PutObject", key) for key in written)
    for other in ("registry.json", "elsewhere/1", "log/a//1", "blobs/../registry.json"):
        assert not allowed("s3:PutObject", other)
        assert allowed("s3:GetObject", other)
