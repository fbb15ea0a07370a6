"""Conditions of the figures of a log: pair, traces, prompts and clock.

Records of results derive from these. An undefined figure is NaN, and null in JSON.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from specctl.contents import utf8_of
from specctl.errors import InputError, reason_of
from specctl.formatting import count, is_fixture, listed
from specctl.records import describe_violation
from specctl.stats import QUANTILE, Interval

MARKED_BELOW = 0.99
"""Figures with less support are marked, and given with bounds if possible."""
PLAIN = "ar"
"""Label of plain decoding."""


class ResultRecord(BaseModel):
    """A frozen, strict record: unknown, missing and mistyped fields are refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    omitted: ClassVar[tuple[str, ...]] = ()
    """Fields that are absent in JSON if they are None."""

    @model_serializer(mode="wrap")
    def _without_omitted(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = write(self)
        return {k: v for k, v in found.items() if v is not None or k not in self.omitted}

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return self.model_dump(mode="json")


class PairFacts(ResultRecord):
    """The pair and the traces of figures; `sampling`: temperature, top_k, top_p."""

    traces_digest: str
    target: str
    drafter: str
    target_digest: str
    drafter_digest: str | None
    sampling: dict[str, Any]


class TraceFacts(PairFacts):
    """The conditions of figures of dense traces."""

    omitted: ClassVar[tuple[str, ...]] = (
        "time_error",
        "check_error",
        "without_decision_cost",
        "with_decision_cost",
        "free_decisions",
        "outside_clock",
        "beyond_log",
        "prompts_digest",
        "scored_prompts",
        "num_prompts_left_out",
        "scored_on_training_prompts",
    )

    specctl_version: str
    support: dict[str, int | bool]  # of the log
    cost_model: str | None  # digest; None without times
    clock: str | None  # `clock_of` the cost model
    # relative standard error of a policy's time, contained in all intervals of times; None if
    # unknown
    time_error: float | None = None
    check_error: float | None = None  # error of a clock that failed its own check
    # policies whose own decisions have no time, by label, in the words of `profile --policy`
    without_decision_cost: dict[str, str] | None = None
    # beside them the policies that the clock times, which a new one must time again, in such words
    with_decision_cost: tuple[str, ...] | None = None
    # policies with decisions of their own on a stated clock, where these take no time
    free_decisions: tuple[str, ...] | None = None
    # by label, quantities with most steps outside the clock's range, e.g. `nodes a level`
    outside_clock: dict[str, tuple[str, ...]] | None = None
    # by label, what to do where drafts are larger than the log's, see `rounds.held_with`
    beyond_log: dict[str, str] | None = None
    prompts_digest: str | None = None  # of the scored prompts, see `prompts_digest`
    # their ids, after a split the held-out ones; an artifact has the digest alone
    scored_prompts: tuple[str, ...] | None = None
    num_prompts_left_out: int | None = None  # prompts of a policy's fit
    # labels of policies that were fitted on some scored prompts
    scored_on_training_prompts: tuple[str, ...] | None = None

    def is_unseen(self, label: str) -> bool:
        """Whether a policy was fitted on none of the scored prompts."""
        return label not in (self.scored_on_training_prompts or ())

    def can_win(self, label: str) -> bool:
        """Whether a policy may be called the fastest."""
        return not self.marks(label)

    def marks(self, label: str) -> str:
        """The marks of a policy, which `footnotes` explain."""
        return TRAINED * (not self.is_unseen(label)) + NOT_TIMED * (
            label in (self.without_decision_cost or ())
        )

    def marked(self, label: str) -> str:
        """The label with its marks."""
        return label + self.marks(label)

    def footnotes(self) -> Iterator[str]:
        """Sentences on prompts that were left out, and on each mark."""
        yield from prompt_notes(self.num_prompts_left_out, self.scored_on_training_prompts)
        if self.without_decision_cost:
            yield (
                f"{NOT_TIMED} its own decisions cost nothing on this clock, so it cannot win; "
                f"{to_time(vars(self))}"
            )

    def provisos(self, *labels: str) -> str:
        """The end of a sentence that compares speeds: what it takes for granted."""
        own = self.free_decisions or ()
        free = [label for label in dict.fromkeys(labels) if label in own]
        outside = {
            words: None for label in labels for words in (self.outside_clock or {}).get(label, ())
        }
        parts = [f"decisions of {listed(free)} take no time"] if free else []
        parts += [f"the clock holds beyond its range of {listed(outside)}"] if outside else []
        return f", if {' and '.join(parts)}" if parts else ""


def why_plain(
    name: str, gain: Interval, gains: Iterable[Interval], time_error: float | None
) -> str:
    """The reason for plain decoding: a loss only where no interval reaches a gain.

    Args:
        name: the drafting setting that was to beat it. gain: its speed over plain decoding.
        gains: of all drafting settings.
    """
    words = f"{name} is × {gain.text('.2f')} of plain decoding"
    if all(one.high <= 1 for one in gains):
        return f"Drafting does not pay here: {words}."
    step = "more prompts may show one"
    reach = math.exp(QUANTILE * 2**0.5 * (time_error or 0))  # of the clock's error alone
    if time_error and 1 / reach < gain.value < reach:
        step = f"the clock's error is {time_error:.0%}: profile again"
    return f"No setting is shown to be faster: {words}; {step}."


TRAINED = "†"
"""Marks a policy that was fitted on scored prompts."""
NOT_TIMED = "‡"
"""Marks a policy whose own decisions have no time."""


def prompt_notes(num_left_out: int | None, trained: Collection[str] | None) -> Iterator[str]:
    """Sentences on prompts of fits: those that were left out, and the mark of policies."""
    if num_left_out:
        out = count(num_left_out, "prompt")
        yield f"{out} left out: a policy here was fitted on them (--all-prompts takes them too)."
    if trained:
        yield f"{TRAINED} fitted on some of these prompts, which flatters it: it cannot win."


def policy_options(words: Iterable[str]) -> str:
    """Policies as options of `profile`, each once."""
    return " ".join(f"--policy {shlex.quote(one)}" for one in dict.fromkeys(words))


def to_time(facts: Mapping[str, Any]) -> str:
    """The command that times the decisions which a clock lacks and again those that it has.

    Args:
        facts: fields of `TraceFacts`.
    """
    words = [*facts["without_decision_cost"].values(), *(facts["with_decision_cost"] or ())]
    words = [one for one in words if one]  # a rule of Python has none
    if not words:
        return "decode under it to see what they take"
    pair = "" if is_fixture(facts["target"]) else " --target TARGET --drafter DRAFTER"
    return f"time them: `specctl profile {policy_options(words)} -o cost_model.json{pair}`"


ResultT = TypeVar("ResultT", bound=ResultRecord)


def read_result(
    path: Path,
    kind: type[ResultT],
    verb: str,
    read: Callable[[Path], bytes] | None = None,
) -> ResultT:
    """The record that a verb wrote; `InputError` of an unreadable file or of another content."""
    try:
        wanted = f"give the file that `{verb}` writes"
        return kind.model_validate_json(read(path) if read else utf8_of(path, InputError, wanted))
    except OSError as error:
        raise InputError(
            f"{error.filename} cannot be read: {reason_of(error)}", hint="check the path"
        ) from error
    except ValidationError as error:
        found = next((e["input"] for e in error.errors() if e["loc"] == ("kind",)), None)
        if isinstance(found, str):
            raise InputError(
                f"{path} is of kind {found!r}, and not what `{verb}` writes",
                hint="give each option the file of its verb",
            ) from error
        raise InputError(
            f"{path} is not what `{verb}` writes: {describe_violation(error)}",
            hint="write it again with this version of specctl",
        ) from error
