"""Policy records to and from canonical JSON; identity of a policy."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import ValidationError

from specctl.errors import UsageError
from specctl.policy.records import Policy


def canonical_json(value: Any) -> str:
    """JSON with sorted keys, no spaces, no NaN: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def policy_json(policy: Policy) -> str:
    """Canonical JSON of a policy."""
    return canonical_json(policy.model_dump(mode="json"))


def policy_digest(policy: Policy) -> str:
    """`sha256:<hex>` of the canonical JSON; the `policy_digest` column of traces."""
    return "sha256:" + hashlib.sha256(policy_json(policy).encode()).hexdigest()


def parse_policy(text: str) -> Policy:
    """A policy from JSON.

    Raises:
        UsageError: the first violation, with its field.
    """
    try:
        return Policy.model_validate_json(text)
    except ValidationError as error:
        raise UsageError(
            "policy record",
            expected="the fields of docs/artifact-format.md",
            found=describe_violation(error),
            fix="correct that field or fit the policy again",
        ) from error


def describe_violation(error: ValidationError) -> str:
    """First violation of a pydantic error: `field: message`, or the message if it is of all."""
    # There may be one for each of thousands of values: without what would repeat those.
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")  # pydantic's, before one of ours
    return f"{field}: {message}" if field else message
