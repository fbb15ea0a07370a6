"""The IAM policy of docs/operators.md on a real S3 server that enforces it, as far as moto goes.

moto knows neither of its conditions and reads a dot as any character, so these parts are taken out.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specctl.errors import StoreError
from specctl.stores.s3 import S3Store
from tests.servers import S3_ENVIRONMENT, make_bucket, s3_server

PAGE = Path(__file__).parents[2] / "docs" / "operators.md"
URL = "s3://team-policies/registry"


def policies() -> dict[str, dict[str, Any]]:
    """A publisher's policy and, without the statements on writing, a reader's."""
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
