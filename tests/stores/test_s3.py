"""What an S3 store that refuses or does not answer is called; what its IAM policy lets users do."""

from __future__ import annotations

import json
import os
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from specctl.errors import StoreError, UsageError
from specctl.stores import TransientError, UnknownOutcomeError, UnreadableError, open_store, s3
from specctl.stores.s3 import ENDPOINTS, REGIONS, S3Store
from tests.cli.command import passes, refuses
from tests.servers import S3_ENVIRONMENT, make_bucket, s3_server

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
    """A server that answers every put with 501; its URL is the environment's endpoint."""

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(501)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        for name, value in {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}.items():
            monkeypatch.setenv(name, value)
        yield endpoint
        server.shutdown()


def test_a_store_that_does_not_know_the_condition_is_told_apart(without_conditions: str) -> None:
    with pytest.raises(StoreError, match="does not support conditional puts") as refusal:
        open_store("s3://bucket/x").put_new("a", b"1")
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


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.delenv(name, raising=False)


def test_half_of_the_credentials_are_named_whole(
    s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        open_store(s3_url).get("a", max_bytes=1)


def test_no_credentials_are_named_instead_of_the_metadata_address(
    without_conditions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server stands for the metadata service of a machine without a role."""
    without(monkeypatch, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
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
URL = "s3://team-policies/registry"


def policies() -> dict[str, dict[str, Any]]:
    """A publisher's policy of docs/operators.md and, without the statements on writing, a reader's.

    moto knows neither of its conditions and reads a dot as any character: they are taken out.
    """
    [text] = re.findall(r"```json\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    page = json.loads(text)
    for statement in page["Statement"]:
        statement.pop("Condition", None)
        statement["Resource"] = [one for one in statement["Resource"] if "." not in one]
    read = [one for one in page["Statement"] if one["Sid"] in ("Read", "List")]
    return {"publisher": page, "reader": {**page, "Statement": read}}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, S3Store]]:
    """The bucket as a user of each policy has it."""
    import boto3

    region = S3_ENVIRONMENT["AWS_REGION"]
    with s3_server(tmp_path_factory.mktemp("policy")) as endpoint:
        make_bucket(endpoint, "team-policies")
        admin = {"aws_access_key_id": "admin", "aws_secret_access_key": "admin"}
        iam = boto3.client("iam", endpoint_url=endpoint, region_name=region, **admin)
        known = {}
        for name, policy in policies().items():
            iam.create_user(UserName=name)
            document = json.dumps(policy)
            iam.put_user_policy(UserName=name, PolicyName=name, PolicyDocument=document)
            made = iam.create_access_key(UserName=name)["AccessKey"]
            keys = (made["AccessKeyId"], made["SecretAccessKey"])
            known[name] = dict(zip(("access_key_id", "secret_access_key"), keys, strict=True))
        request = urllib.request.Request(
            f"{endpoint}/moto-api/reset-auth", b"0", {"Content-Type": "text/plain"}
        )
        urllib.request.urlopen(request).close()
        yield {
            name: S3Store(URL, region=region, endpoint=endpoint, **keys)
            for name, keys in known.items()
        }


def test_a_publisher_creates_and_a_reader_reads(stores: dict[str, S3Store]) -> None:
    keys = ("blobs/sha256/1", "manifests/sha256/1.json", "signatures/sha256/1/2.json", "log/a/1",
            "probe/put-if-absent")  # fmt: skip
    for key in keys:
        stores["publisher"].put_new(key, b"1")
        with pytest.raises(StoreError, match="role"):
            stores["reader"].put_new(f"{key}2", b"1")
        for store in stores.values():
            assert store.get(key, max_bytes=1) == b"1"
            assert [one.key for one in store.objects(key.split("/")[0])] == [key]
    for other in ("registry.json", "elsewhere/1"):
        with pytest.raises(StoreError, match="role"):
            stores["publisher"].put_new(other, b"1")
