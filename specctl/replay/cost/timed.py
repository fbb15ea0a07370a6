"""Which rounds a profile times: those that a loop on the device would run, unless it is told."""

from __future__ import annotations

from typing import Literal, get_args

from specctl.errors import UsageError
from specctl.policy import Chain, Policy, build_shape
from specctl.replay.cost.graphed import not_in_graphs
from specctl.replay.cost.probe import PROBE_DEPTH
from specctl.runtime.graphs import GraphSettings, on_device, unsupported
from specctl.runtime.load import Pair

Choice = Literal["auto", "graphs", "ordinary"]


def parse_rounds(word: str) -> Choice:
    """One of the choices.

    Raises:
        UsageError: another word.
    """
    for known in get_args(Choice):
        if word == known:
            return known  # type: ignore[no-any-return]
    raise UsageError(
        "--rounds", expected="auto, graphs or ordinary", found=repr(word), fix="choose one"
    )


def timed_rounds(choice: Choice, pair: Pair) -> GraphSettings | None:
    """How the rounds to be timed are captured; None for the ordinary loop's.

    Raises:
        UsageError: graphs where there are none.
    """
    settings, reason = on_device(pair.target.model.device), _reason(pair)
    if choice == "ordinary" or (choice == "auto" and reason is not None):
        return None
    if reason is not None:
        raise not_in_graphs(reason)
    return settings


def _reason(pair: Pair) -> str | None:
    """Why a loop of this pair would not decode in graphs."""
    device, policy = pair.target.model.device, Policy(shape=Chain(num_draft_tokens=PROBE_DEPTH))
    if on_device(device) is None:
        return f"none on {device.type} here"
    return unsupported(policy, build_shape(policy.shape), pair.drafter)
