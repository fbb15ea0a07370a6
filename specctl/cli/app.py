"""The command line: the application, its entry point, its refusals, and how verbs end at Ctrl-C."""

from __future__ import annotations

import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Annotated, Any, ParamSpec, TypeVar

import typer

from specctl.console import prepare_output
from specctl.errors import SpecctlError, UsageError

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells count."""
TERMINATED = 143
"""Exit code after SIGTERM, which batch systems and containers send before they kill."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Collect, fit, compare and run policies for tree speculative decoding.",
)
fit_app = typer.Typer(no_args_is_help=True, help="Fit a policy from traces.")
app.add_typer(fit_app, name="fit")
traces_app = typer.Typer(no_args_is_help=True, help="Check, freeze and rearrange trace sets.")
app.add_typer(traces_app, name="traces")
registry_app = typer.Typer(
    no_args_is_help=True, help="Share policies: publish, find, roll back, copy, verify."
)
app.add_typer(registry_app, name="registry")

VERBS = ("collecting", "running", "judging", "showing")
"""Modules of `specctl.cli` whose import adds verbs to the application."""
GROUPS = {"fit": "fitting", "traces": "traces", "registry": "registry"}
"""The same by group. A group's verbs are imported where it is named, so that the registry's start
without what fits need."""


def load_verbs(words: Sequence[str]) -> typer.Typer:
    """The application with the verbs that the words of a command may mean."""
    first = next((word for word in words if not word.startswith("-")), "")
    for module in [GROUPS[first]] if first in GROUPS else VERBS:
        import_module(f"specctl.cli.{module}")
    return app


def load_all_verbs() -> typer.Typer:
    """The application with every verb."""
    for module in (*VERBS, *GROUPS.values()):
        import_module(f"specctl.cli.{module}")
    return app


def _version(value: bool) -> None:  # noqa: FBT001  typer's callback form
    if value:
        from specctl import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def specctl(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Offline calibration and a lean runtime for tree speculative decoding."""


def main() -> None:
    """Entry point: every refusal becomes one line and an exit code, Ctrl-C becomes 130.

    SIGTERM ends a command as Ctrl-C does, keeping what is finished, with 143.
    """
    prepare_output()
    with _termination_as_interrupt() as terminated:
        try:
            _check_words(sys.argv[1:])
            code = load_verbs(sys.argv[1:])(standalone_mode=False)
        except SpecctlError as error:
            code = _refuse(str(error), error.exit_code)
        except typer.TyperException as error:  # an option that the parser refuses
            code = _refuse(error.format_message(), 2)
        except (typer.Abort, KeyboardInterrupt):
            code = INTERRUPTED
    if code == INTERRUPTED:
        word, code = ("terminated", TERMINATED) if terminated else ("interrupted", INTERRUPTED)
        typer.echo(f"{word}: what was finished is kept", err=True)
    sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def _termination_as_interrupt() -> Iterator[list[int]]:
    """SIGTERM raises `KeyboardInterrupt` and is noted in the list; where it is ignored it stays so.

    Handlers belong to the main thread: in another one nothing changes.
    """
    noted: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        noted.append(number)
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        yield noted
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_words(words: list[str]) -> None:
    """Refuses empty words: most are unset shell variables, and as a path one means this folder.

    Raises:
        UsageError: an empty word, also behind `--option=`.
    """
    for before, word in zip(["specctl", *words], words, strict=False):
        is_option = word.startswith("--") and word.endswith("=")
        if not word or is_option:
            raise UsageError(
                f"after {before!r}" if not word else word.removesuffix("="),
                expected="text",
                found="an empty word",
                fix="check for a shell variable that is not set; leave the option out for its "
                "default",
            )


def _refuse(message: str, code: int) -> int:
    if message:  # none where the help was shown instead
        typer.echo(f"error: {' '.join(message.split())}", err=True)
    return code


# --------------------------------------------------------------------------- interrupts

P = ParamSpec("P")
R = TypeVar("R")
Words = Callable[[Mapping[str, object]], str | None]
"""What a verb says, by its arguments; None leaves it to `main`."""
NOTHING = "nothing was written"


def reads_only(verb: Callable[P, R]) -> Callable[P, R]:
    """Of a verb that only reads: it has nothing to keep, and promises nothing."""
    return _ending(verb, lambda _: NOTHING)


def reads_only_without(option: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The same for a verb that writes only where an option says where to, or that it should."""
    return lambda verb: _ending(
        verb, lambda given: NOTHING if given.get(option) in (None, False) else None
    )


def commits(verb: Callable[P, R]) -> Callable[P, R]:
    """Of a verb that writes to the history of its `name`: whether it did is read there."""
    return _ending(verb, lambda given: in_history(given["name"]))


def commits_where(words: Words) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The same for a verb that writes to another history, or only with some arguments."""
    return lambda verb: _ending(verb, words)


def in_history(name: object) -> str:
    return f"it may have been done: specctl registry log {name} tells"


def _ending(verb: Callable[P, R], words: Words) -> Callable[P, R]:
    """Ends a verb at Ctrl-C or SIGTERM with the code of that, and its own words."""

    @functools.wraps(verb)
    def ended(*args: P.args, **kwargs: P.kwargs) -> R:
        said = words(kwargs)
        if said is None:
            return verb(*args, **kwargs)
        with _noting_termination() as noted:
            try:
                return verb(*args, **kwargs)
            except KeyboardInterrupt:
                word, code = ("terminated", TERMINATED) if noted else ("interrupted", INTERRUPTED)
                typer.echo(f"{word}: {said}", err=True)
                raise SystemExit(code) from None

    return ended


@contextmanager
def _noting_termination() -> Iterator[list[int]]:
    """Notes a SIGTERM that somebody handles, and lets them: `main` raises KeyboardInterrupt."""
    noted: list[int] = []
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        handler(number, frame)

    signal.signal(signal.SIGTERM, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGTERM, handler)
