"""A real S3 server that asks who is there, and holds them to the policies of their roles.

It knows neither of the two conditions, and asks for the right to delete on the bucket, where AWS
asks for it on each key. So conditions are taken out here and checked as text.
"""

from __future__ import annotations

import copy
import json
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from specctl.stores.roles import Role, iam_policy
from tests.servers import S3_ENVIRONMENT, make_bucket, s3_server


@contextmanager
def users(folder: Path, url: str, roles: Iterable[Role]) -> Iterator[dict[str, dict[str, str]]]:
    """By role, the endpoint and the credentials of a user who has it on `s3://bucket/prefix`."""
    with s3_server(folder) as endpoint:
        make_bucket(endpoint, urlsplit(url).netloc)
        known = {
            role.name: {"endpoint": endpoint, **user_of(role, url, endpoint)} for role in roles
        }
        request = urllib.request.Request(
            f"{endpoint}/moto-api/reset-auth", b"0", {"Content-Type": "text/plain"}
        )
        urllib.request.urlopen(request).close()
        yield known


def user_of(role: Role, url: str, endpoint: str) -> dict[str, str]:
    import boto3

    iam = boto3.client(
        "iam",
        endpoint_url=endpoint,
        region_name=S3_ENVIRONMENT["AWS_REGION"],
        aws_access_key_id="admin",
        aws_secret_access_key="admin",
    )
    iam.create_user(UserName=role.name)
    document = json.dumps(as_moto_reads(iam_policy(url, role), urlsplit(url).netloc))
    iam.put_user_policy(UserName=role.name, PolicyName=role.name, PolicyDocument=document)
    made = iam.create_access_key(UserName=role.name)["AccessKey"]
    return {"access_key_id": made["AccessKeyId"], "secret_access_key": made["SecretAccessKey"]}


def as_moto_reads(policy: dict[str, Any], bucket: str) -> dict[str, Any]:
    plain = copy.deepcopy(policy)
    for statement in plain["Statement"]:
        statement.pop("Condition", None)
        if statement["Sid"] == "Never":  # moto reads a dot as any character
            statement["Resource"] = [one for one in statement["Resource"] if "." not in one]
        if statement["Sid"] == "Delete":
            statement["Resource"] = [f"arn:aws:s3:::{bucket}"]
    return plain
