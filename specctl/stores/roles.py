"""What a role may do in a bucket, as an IAM policy: read, create what is not there, delete.

Creation needs `If-None-Match: *`: who may only create cannot overwrite what others wrote. (AWS:
condition key `s3:if-none-match`; stores without it enforce the rest.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specctl.errors import UsageError
from specctl.stores.urls import canonical_store, is_store_url

_PUT = "s3:PutObject"
_ODD = ("*//*", "*/./*", "*/../*", "*/.", "*/..")
"""Keys that S3 takes and that clients refuse to list: one of them would hide a whole folder."""


@dataclass(frozen=True)
class Role:
    """Rights on the keys below a URL; every role reads and lists.

    Attributes:
        creates, deletes: patterns of keys, `*` for any characters.
        never_creates: patterns taken out of `creates`.
    """

    name: str
    meaning: str
    creates: tuple[str, ...] = ()
    deletes: tuple[str, ...] = ()
    never_creates: tuple[str, ...] = ()


def iam_policy(url: str, role: Role) -> dict[str, Any]:
    """The policy document of a role for `s3://bucket/prefix`.

    Raises:
        UsageError: another URL.
    """
    bucket, prefix = _parts(url)
    statements = [
        _statement("Read", "Allow", "s3:GetObject", bucket, prefix, ("*",)),
        _listing(bucket, prefix),
    ]
    if role.creates:
        create = _statement("CreateNewOnly", "Allow", _PUT, bucket, prefix, role.creates)
        create["Condition"] = {"Null": {"s3:if-none-match": "false"}}
        statements.append(create)
        never = (*role.never_creates, *_ODD)
        statements.append(_statement("Never", "Deny", _PUT, bucket, prefix, never))
    if role.deletes:
        delete = "s3:DeleteObject"
        statements.append(_statement("Delete", "Allow", delete, bucket, prefix, role.deletes))
    return {"Version": "2012-10-17", "Statement": statements}


def _statement(
    sid: str, effect: str, action: str, bucket: str, prefix: str, patterns: tuple[str, ...]
) -> dict[str, Any]:
    resources = [f"arn:aws:s3:::{bucket}/{prefix}{pattern}" for pattern in patterns]
    return {"Sid": sid, "Effect": effect, "Action": [action], "Resource": resources}


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


def _parts(url: str) -> tuple[str, str]:
    store = canonical_store(url)
    if not is_store_url(store):
        raise UsageError(
            "store of a role", expected="s3://bucket/prefix", found=url[:200], fix="name a bucket"
        )
    bucket, _, prefix = store.removeprefix("s3://").partition("/")
    return bucket, f"{prefix}/" if prefix else ""
