"""Roles on a real S3 server that enforces them, as far as moto goes (`tests.stores.guarded`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specctl.errors import StoreError, UsageError
from specctl.stores import open_store
from specctl.stores.roles import Role, iam_policy
from specctl.stores.s3 import S3Store
from tests.servers import S3_ENVIRONMENT
from tests.stores.guarded import users

READER = Role("reader", "reads")
WRITER = Role(
    "writer", "creates logs", creates=("log/qwen*", "probe/*"), never_creates=("log/qwen-secret/*",)
)
SWEEPER = Role("sweeper", "deletes blobs", deletes=("blobs/*",))
URL = "s3://guarded/shared"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, str]]]:
    """Credentials of a user of each role."""
    with users(tmp_path_factory.mktemp("roles"), URL, (READER, WRITER, SWEEPER)) as known:
        yield known


@pytest.fixture
def stores(keys: dict[str, dict[str, str]]) -> dict[str, S3Store]:
    return {name: S3Store(URL, region="us-east-1", **known) for name, known in keys.items()}


def test_each_role_does_what_it_may_and_no_more(stores: dict[str, S3Store]) -> None:
    reader, writer, sweeper = stores["reader"], stores["writer"], stores["sweeper"]
    writer.put_new("log/qwen3/1", b"1")
    for store in (reader, writer, sweeper):
        assert store.get("log/qwen3/1", max_bytes=9) == b"1"
        assert [one.key for one in store.objects("log/qwen3")] == ["log/qwen3/1"]
    for store, key in (
        (reader, "log/qwen3/2"),
        (writer, "log/llama/1"),
        (writer, "log/qwen-secret/1"),
        (sweeper, "blobs/x"),
    ):
        with pytest.raises(StoreError, match="role"):
            store.put_new(key, b"2")
    for store in (reader, writer):
        with pytest.raises(StoreError, match="role"):
            store.delete("log/qwen3/1")
    sweeper.delete("blobs/x")


def test_no_role_creates_a_key_that_hides_a_folder(
    keys: dict[str, dict[str, str]], stores: dict[str, S3Store]
) -> None:
    client = client_of(keys["writer"])
    with pytest.raises(Exception, match="AccessDenied"):
        client.put_object(Bucket="guarded", Key="shared/log/qwen3//x", Body=b"1")
    client.put_object(Bucket="guarded", Key="shared/log/qwen3/x..y", Body=b"1")
    assert "log/qwen3/x..y" in {one.key for one in stores["writer"].objects("log/qwen3")}
    *_, never = iam_policy(URL, WRITER)["Statement"]
    odd = {one.removeprefix("arn:aws:s3:::guarded/shared/") for one in never["Resource"]}
    assert odd > {"*//*", "*/./*", "*/../*", "*/.", "*/.."}


def client_of(known: dict[str, str]) -> Any:
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=known["endpoint"],
        region_name=S3_ENVIRONMENT["AWS_REGION"],
        aws_access_key_id=known["access_key_id"],
        aws_secret_access_key=known["secret_access_key"],
    )


def test_deleting_is_for_the_keys_named() -> None:
    *_, delete = iam_policy(URL, SWEEPER)["Statement"]
    assert delete["Resource"] == ["arn:aws:s3:::guarded/shared/blobs/*"]


def test_creating_takes_the_condition_and_listing_the_prefix() -> None:
    read, listing, create, never = iam_policy(URL, WRITER)["Statement"]
    assert (never["Effect"], never["Resource"][0][-13:]) == ("Deny", "qwen-secret/*")
    assert read["Resource"] == ["arn:aws:s3:::guarded/shared/*"]
    assert create["Resource"][0] == "arn:aws:s3:::guarded/shared/log/qwen*"
    assert create["Condition"] == {"Null": {"s3:if-none-match": "false"}}
    assert listing["Condition"] == {"StringLike": {"s3:prefix": ["shared/*"]}}
    assert "Condition" not in iam_policy("s3://whole", READER)["Statement"][-1]


def test_other_places_have_no_roles(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="s3://"):
        iam_policy(open_store(tmp_path).url, READER)


def test_a_password_in_the_url_of_a_role_is_in_no_policy() -> None:
    with pytest.raises(UsageError) as refused:
        iam_policy("s3://key:hunter2@bucket/x", READER)
    assert "hunter2" not in str(refused.value)
    assert iam_policy(f"{URL}/", READER) == iam_policy(URL, READER)
