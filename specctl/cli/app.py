"""The command line: application, entry point, first screen, error lines, and the end at Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from specctl import console
from specctl.errors import (
    OutputError,
    RecordError,
    SpecctlError,
    UsageError,
    did_you_mean,
    memory_error_of,
)
from specctl.records import in_plain_words

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells count."""
TERMINATED = 143
"""Exit code after SIGTERM."""

NOTHING = "nothing was written"
"""Report of an interrupted verb that wrote no file."""

FIRST_SCREEN = """\
A server's log, of vLLM, SGLang or llama.cpp: which draft length at each load, and when off
  specctl import server.log

A target and a drafter, folders or hub ids, and PROMPTS, a file of 70 prompts or more: the fastest
draft length or policy. Once on the machine, what a round costs:
  specctl profile -o cost_model.json --target TARGET --drafter DRAFTER

vLLM: start it as the first command prints, and send it your prompts
  specctl export chain:8 --to vllm --drafter DRAFTER --trace traces --dense -o log
  specctl tune traces --for vllm --batch-size 8 --cost-model cost_model.json -o tuned
  specctl export tuned/tune.json --to vllm -o serve

SGLang
  specctl collect PROMPTS --dense -o traces --target TARGET --drafter DRAFTER
  specctl tune traces --for sglang --batch-size 8 --cost-model cost_model.json -o tuned
  specctl export tuned/tune.json --to sglang -o serve

llama.cpp: write both as GGUF, and time them in its server instead
  specctl export chain:3 --to llamacpp --target TARGET --drafter DRAFTER -o serve
  specctl profile --engine llamacpp --target serve/target.gguf --drafter serve/drafter.gguf
  specctl collect PROMPTS --dense -o traces --target TARGET --drafter DRAFTER
  specctl tune traces --for llamacpp --family p_min --cost-model llamacpp.json -o tuned
  specctl export tuned/tune.json --to llamacpp --target TARGET --drafter DRAFTER -o serve

transformers, without a server
  specctl collect PROMPTS --dense -o traces --target TARGET --drafter DRAFTER
  specctl tune traces --family threshold --cost-model cost_model.json -o tuned
  specctl run PROMPTS --compare ar,eagle2,tuned/policy --target TARGET --drafter DRAFTER

A small pair comes with specctl: leave --target TARGET and --drafter DRAFTER out, and take
`embedded` for PROMPTS.
All verbs: specctl --help. What works here: specctl doctor.
"""
"""Printed without a verb."""


class VerbInterruptedError(Exception):
    """Ctrl-C or SIGTERM within a verb; its text is a report of the files left behind."""


app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Find the fastest settings of speculative decoding from a log, for your engine.",
)


class FitGroup(TyperGroup):
    """The fits; HeteroSpec's also has the name of its algorithm."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, {"cart": "hetero"}.get(cmd_name, cmd_name))


def group(
    above: typer.Typer, name: str, help: str, kind: type[TyperGroup] = TyperGroup
) -> typer.Typer:
    """Adds a group of verbs."""
    made = typer.Typer(cls=kind, no_args_is_help=True, rich_markup_mode=None, help=help)
    above.add_typer(made, name=name)
    return made


fit_app = group(app, "fit", "Fit a policy from traces, or all of them: auto.", FitGroup)
traces_app = group(app, "traces", "Check and freeze trace sets.")
registry_app = group(app, "registry", "Share policies: publish, find, roll back, copy, verify.")

VERBS = (
    "showing",
    "doctor",
    "collecting",
    "judging",
    "exporting",
    "running",
    "watching",
)
"""Modules of `specctl.cli`; importing one adds its verbs to the application, in this order."""
GROUPS = {"fit": "fitting", "traces": "traces", "registry": "registry"}
"""Modules of groups, imported only for a command of the group: `registry` starts without the
libraries of fits."""


def load_verbs(words: Sequence[str]) -> typer.Typer:
    """The application with the verbs that a command needs."""
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
        from specctl.version import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def specctl(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Find the fastest settings of speculative decoding from a log, for your engine."""
    if context.invoked_subcommand is None:
        typer.echo(FIRST_SCREEN, nl=False)


def main(begin: Callable[[], None] = lambda: None) -> None:
    """Entry point. Errors become one line and an exit code.

    Ctrl-C (exit code 130) and SIGTERM (143) keep the work that is finished.

    Args:
        begin: called when all is imported, before the verb runs.
    """
    console.prepare_output()
    # With a backtrace, polars' report of a failed allocation deadlocks.
    os.environ["RUST_BACKTRACE"] = "0"
    code: Any
    with _termination_as_interrupt() as terminated:
        left = NOTHING
        try:
            _check_words(sys.argv[1:])
            verbs = load_verbs(sys.argv[1:])
            begin()
            code = verbs(standalone_mode=False, prog_name="specctl")
        except RecordError:
            raise
        except SpecctlError as error:
            code = _refuse(error)
        except typer.TyperException as error:  # from the parser of options
            code = _refuse_words(error)
        except (typer.Abort, KeyboardInterrupt):
            code = INTERRUPTED
        except VerbInterruptedError as ended:
            code, left = INTERRUPTED, str(ended)
        except Exception as error:
            refusal = memory_error_of(error)
            if refusal is None:
                raise
            code = _refuse(refusal)
    if code == INTERRUPTED:
        word, code = ("terminated", TERMINATED) if terminated else ("interrupted", INTERRUPTED)
        typer.echo(f"{word}: {left}", err=True)
    sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def _termination_as_interrupt() -> Iterator[list[int]]:
    """Turns SIGTERM into `KeyboardInterrupt`, noted in the list, unless it is ignored.

    Only the main thread can set handlers: in another one nothing changes.
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
    """Raises `UsageError` for an empty word, also after `--option=`.

    Most are unset shell variables, and as a path one would mean this folder.
    """
    for before, word in zip(["specctl", *words], words, strict=False):
        is_option = word.startswith("--") and word.endswith("=")
        if not word or is_option:
            raise UsageError(
                f"the {f'word after {before!r}' if not word else f'value of {word[:-1]}'} is empty",
                hint="check for a shell variable that is not set; leave the option out for its "
                "default",
            )


def _refuse_words(error: typer.TyperException) -> int:
    """Says what the parser says, and what to do; the help, where no verb was given."""
    message = error.format_message().replace("Input should be", "expected")
    message, context = in_plain_words(message), getattr(error, "ctx", None)
    message = re.sub(r" \(Possible options: ([^,)]+).*", r"; did you mean \1?", message).rstrip(".")
    if message.startswith("Usage:"):
        typer.echo(message)
        return 2
    message, _, hint = message.partition("; ")
    message = re.sub(
        r"^Invalid value for '(--[^']+)'(?: / '.*')?: expected", r"\1 must be", message
    )
    see = f"see {context.command_path if context else 'specctl'} --help"
    if missing := re.match(r"Missing (?:option|argument) '([^']+)'(?: / '([^']+)')?", message):
        long, short = missing.groups(default="")
        examples = (getattr(context.command, "epilog", None) or "").splitlines() if context else []
        shown = [line for line in examples if {long, short} & {*line.split()}]
        message = f"{long} is required"
        hint = f"such as: {shown[0]}" if shown else see
        if long == "--registry":
            hint = "give it, or set SPECCTL_REGISTRY"
    elif (given := re.fullmatch("No such command '(.+)'", message)) and _is_log(given[1]):
        hint = f"to read it, write: specctl import {shlex.quote(given[1])}"
    elif "id you mean" not in hint:
        words = re.findall("'([^' ]+)'", message)[1:] or [""]  # what was given, and its choices
        hint = did_you_mean(words[0], words[1:], see)
    return _refuse(UsageError(message, hint=hint))


def _is_log(word: str) -> bool:
    """Whether a word in place of a verb is a file, or the address of a page."""
    return word.startswith(("http://", "https://")) or Path(word).is_file()


def _refuse(error: SpecctlError) -> int:
    """Prints the error, with `--json` also as the answer where none is; returns its exit code."""
    typer.echo(f"error: {error.line}", err=True)
    if "--json" in sys.argv and not console.has_answered and not isinstance(error, OutputError):
        parts = {"type": type(error).__name__, "message": error.message, "hint": error.hint}
        typer.echo(json.dumps({"error": parts}))
    return error.exit_code
