"""What a role may do in a bucket, as an IAM policy: read, create what is not there, delete.

Creation needs `If-None-Match: *`: who may only create cannot overwrite what others wrote. (AWS:
condition key `s3:if-none-match`; stores without it enforce the rest.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from specctl.errors import UsageError


@dataclass(frozen=True)
class Role:
    """Rights on the keys below a URL; every role reads and lists.

    Attributes:
        creates, deletes: patterns of keys, `*` for any characters.
    """

    name: str
    meaning: str
    creates: tuple[str, ...] = ()
    deletes: tuple[str, ...] = ()


def iam_policy(url: str, role: Role) -> dict[str, Any]:
    """The policy document of a role for `s3://bucket/prefix`.

    Raises:
        UsageError: another URL.
    """
    bucket, prefix = _parts(url)
    statements = [_reading(bucket, prefix)]
    if role.creates:
        statements.append(
            {
                "Sid": "CreateNewOnly",
                "Effect": "Allow",
                "Action": ["s3:PutObject"],
                "Resource": _resources(bucket, prefix, role.creates),
                "Condition": {"Null": {"s3:if-none-match": "false"}},
            }
        )
    if role.deletes:
        statements.append(
            {
                "Sid": "Delete",
                "Effect": "Allow",
                "Action": ["s3:DeleteObject"],
                "Resource": _resources(bucket, prefix, role.deletes),
            }
        )
    return {"Version": "2012-10-17", "Statement": [*statements, _listing(bucket, prefix)]}


def _reading(bucket: str, prefix: str) -> dict[str, Any]:
    return {
        "Sid": "Read",
        "Effect": "Allow",
        "Action": ["s3:GetObject"],
        "Resource": _resources(bucket, prefix, ("*",)),
    }


def _listing(bucket: str, prefix: str) -> dict[str, Any]:
    # Without the right to list, S3 answers 403 for an absent key, and no head of a log is found.
    statement: dict[str, Any] = {
        "Sid": "List",
        "Effect": "Allow",
        "Action": ["s3:ListBucket"],
        "Resource": [f"arn:aws:s3:::{bucket}"],
    }
    if prefix:
        statement["Condition"] = {"StringLike": {"s3:prefix": [f"{prefix}*"]}}
    return statement


def _resources(bucket: str, prefix: str, patterns: tuple[str, ...]) -> list[str]:
    return [f"arn:aws:s3:::{bucket}/{prefix}{pattern}" for pattern in patterns]


def _parts(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    if parts.scheme != "s3" or not parts.netloc:
        raise UsageError(
            "store of a role", expected="s3://bucket/prefix", found=url[:200], fix="name a bucket"
        )
    prefix = parts.path.strip("/")
    return parts.netloc, f"{prefix}/" if prefix else ""
