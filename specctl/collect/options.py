"""Options of `specctl collect` that exclude each other, and what they mean."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from specctl.collect.recorder import WhenFull
from specctl.errors import UsageError
from specctl.policy import FullTree, parse_policy
from specctl.records import canonical_json

LIVE_POLICY = "eagle2"
"""What live collection decodes with unless told otherwise."""


def live_policy(policy: str | None, **dense_only: int | Path | None) -> str:
    """The policy of a live collection.

    Raises:
        UsageError: an option that only dense collection has.
    """
    for name, value in dense_only.items():
        _refuse(f"--{name.replace('_', '-')}", value, "with --dense alone", "add --dense")
    return LIVE_POLICY if policy is None else policy


def when_full(word: str | None, *, dense: bool) -> WhenFull:
    """What a live collection does where its queue is full; `block` unless told.

    Raises:
        UsageError: another word, or one with dense collection, which has no queue.
    """
    if dense:
        _refuse("--when-full", word, "without --dense, which has no queue", "leave it out")
    for known in get_args(WhenFull):
        if word in (known, None):
            return known  # type: ignore[no-any-return]
    raise UsageError("--when-full", expected="block or drop", found=repr(word), fix="choose one")


def live_top_k(top_k: int | None, sample_top_k: int | None) -> int | None:
    """Sampling's K of a live collection, which has two names there as nothing else wants one.

    Raises:
        UsageError: both are given and differ.
    """
    if None not in (top_k, sample_top_k) and top_k != sample_top_k:
        _refuse("--top-k", top_k, f"the {sample_top_k} of --sample-top-k", "give one of them")
    return top_k if sample_top_k is None else sample_top_k


def dense_shape(
    policy: str | None,
    *,
    depth: int | None,
    top_k: int | None,
    width: int | None,
    nested: bool = True,
) -> FullTree:
    """The trees of a dense collection; what is not given is as in `FullTree`.

    Raises:
        UsageError: a policy, which dense collection does not have, or a number out of range.
    """
    _refuse("--policy", policy, "no policy with --dense, which logs for all", "leave it out")
    given = {"depth": depth, "top_k": top_k, "width": width}
    fields = {name: value for name, value in given.items() if value is not None}
    record = {"kind": "full", "nested": nested, **fields}
    shape = parse_policy(canonical_json({"shape": record})).shape
    assert isinstance(shape, FullTree)
    return shape


def _refuse(option: str, value: object, expected: str, fix: str) -> None:
    if value is not None:
        raise UsageError(option, expected=expected, found=str(value), fix=fix)
