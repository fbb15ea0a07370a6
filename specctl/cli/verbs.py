"""Verbs: functions that return an `Answer`, with options from pydantic models.

    @verb(fit_app, "hetero", config=CartConfig)
    def fit_cart(
        traces: TracesArgument, *, base: str | None = option(None, "Static tree"), config: Given
    ) -> Answer:
        settings = config.build(base=...)

Name, type, default, bounds and help of an option stand in the model. Every field with a description
becomes an option, in nested models too. `specctl.records.option` makes fields, and options outside
of models. It can give another name (`option`), and a default in words (`default`) for an option
that is None if it is left out. Tuples are comma-separated, or the option is repeated (`repeats`).
"""

from __future__ import annotations

import inspect
import math
import time
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from specctl import console
from specctl.cli.app import NOTHING, VerbInterruptedError
from specctl.console import Answer
from specctl.errors import SpecctlError, UsageError, check_choice, did_you_mean
from specctl.formatting import count, listed
from specctl.records import violated_rule

JSON = inspect.Parameter(
    "as_json",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")],
)
"""An option of every verb."""
WIDE = JSON.replace(
    name="wide",
    annotation=Annotated[
        bool, typer.Option("--wide", help="Details, all columns of tables, and whole digests.")
    ],
)
"""An option of verbs with tables."""
GROUPS = {"common": "Options", "model": "Model", "sampling": "Sampling", "advanced": "Advanced"}
"""Headings of the groups of options; `--help` shows the first."""
CLOCK_TICK_S = 0.05
"""Resolution of the times of files."""
LARGEST_STATED = 2**16
"""Larger bounds are left out of the help."""


class VerbCommand(TyperCommand):
    """A verb whose `--help` shows its most used options; `--help-all` shows every group."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["shows_all"] = "--help-all" in args
        return super().parse_args(ctx, args)

    def get_help_option(self, ctx: Any) -> Any:
        found = super().get_help_option(ctx)
        if found is not None:
            found.help = "Show this message, or with -all every option, and exit."
            found.opts.sort()  # typer keeps them in a set
        return found

    def format_options(self, ctx: Any, formatter: Any) -> None:
        shown: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            name = GROUPS[getattr(param, "rich_help_panel", None) or "common"]
            name = name if param.param_type_name == "option" else "Arguments"
            flags, meaning = param.get_help_record(ctx) or ("", "")
            shown.setdefault(name, []).append((flags.replace("list[str]", "str"), meaning))
        for name in ("Arguments", *GROUPS.values()):
            if shown.get(name) and (name in ("Arguments", "Options") or ctx.meta["shows_all"]):
                with formatter.section(name):
                    formatter.write_dl(shown[name])
        others = [
            f"{len(shown[name])} {name.lower()}" for name in shown if name in [*GROUPS.values()][1:]
        ]
        if others and not ctx.meta["shows_all"]:
            formatter.write_paragraph()
            formatter.write_text(f"Also {listed(others)} options: {ctx.command_path} --help-all")

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.epilog:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in self.epilog.splitlines()))


@dataclass(frozen=True)
class ConfigOption:
    """One option."""

    path: tuple[str, ...]  # of the field, from the model down
    flag: str  # `--name`, or `--name -n`
    group: str  # one of `GROUPS`
    kind: Any  # type of its value on the command line
    is_list: bool  # comma-separated, or repeated
    repeats: bool
    default: Any  # None if it is stated in words; `Parameter.empty` if it is required
    help: str
    words: tuple[str, ...] = ()  # the allowed words, if it is a choice
    least: Any = None  # of a count

    @property
    def name(self) -> str:
        """Name of the verb's parameter."""
        name = self.flag.split()[0].partition("/")[0].removeprefix("--").replace("-", "_")
        return f"{name}_" if iskeyword(name) else name

    def parameter(self) -> inspect.Parameter:
        """The verb's parameter, as typer reads it."""
        plain: Any = list[self.kind] if self.repeats else str  # type: ignore[name-defined]
        kind: Any = plain if self.is_list else self.kind
        shown = self.default
        if self.is_list and isinstance(shown, tuple):
            shown = ",".join(f"{one:g}" if isinstance(one, float) else str(one) for one in shown)
        optional: Any = kind if shown is not None else kind | None
        hint: Any = Annotated[
            optional,
            typer.Option(*self.flag.split(), help=self.help, rich_help_panel=self.group),
        ]
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=shown, annotation=hint
        )


@dataclass(frozen=True)
class Given:
    """The values of a model's options."""

    model: type[BaseModel]
    options: tuple[ConfigOption, ...]
    values: dict[str, Any]  # by name of the option; None if left out and without a fixed default
    verb: str

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def changed(self) -> list[str]:
        """The options whose values are not the defaults."""
        pairs = ((option, self.values[option.name]) for option in self.options)
        return [
            option.flag.split()[0]
            for option, value in pairs
            if value not in (None, option.parameter().default)
        ]

    def build(self, **fields: Any) -> Any:
        """Builds the model.

        Args:
            fields: further fields, nested ones as dictionaries; options override them.

        Raises:
            UsageError: a value out of its range, with the option's name.
        """
        tree: dict[str, Any] = {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in fields.items()
        }
        for option in self.options:
            value = self.values[option.name]
            if value is None:
                continue
            *above, last = option.path
            place = tree
            for name in above:
                place = place.setdefault(name, {})
            place[last] = _parsed(option, value)
        try:
            return self.model.model_validate_json(TypeAdapter(Any).dump_json(tree))
        except ValidationError as error:
            where, rule, _, is_value = violated_rule(error)
            found = next((o for o in self.options if o.path == where[: len(o.path)]), None)
            rule, see = rule.replace("'", ""), f"see specctl {self.verb} --help"
            if found is None:
                raise UsageError(f"specctl {self.verb}: {rule}", hint=see) from None
            flag, value = found.flag.partition("/")[0], str(self.values[found.name])
            problem = (
                f"{flag} must be {rule}, not {value}" if is_value else f"{flag} {value}: {rule}"
            )
            raise UsageError(problem, hint=did_you_mean(value, found.words, see)) from None


def _parsed(option: ConfigOption, value: Any) -> Any:
    """A value in JSON's types; a list from its words."""
    words = value.split(",") if option.is_list and not option.repeats else value
    words = words if isinstance(words, list) else [words]
    try:
        found = [option.kind(word) for word in words if not isinstance(word, str) or word.strip()]
        if any(isinstance(one, float) and not math.isfinite(one) for one in found):
            raise ValueError(value)
    except ValueError:
        kind = "comma-separated numbers" if option.is_list else "a number"
        raise UsageError(f"{option.flag} must be {kind}, not {value!r}") from None
    return found if option.is_list else found[0]


def _check_own(option: ConfigOption, value: Any, verb: str) -> None:
    """Raises `UsageError` for a value of a verb's own option, which no model checks."""
    flag, least = option.flag.split()[0], option.least
    if value is not None and option.words:
        check_choice(flag, value, option.words)
    if value is not None and least is not None and value < least:
        see = f"see specctl {verb} --help"
        raise UsageError(f"{flag} must be at least {least}, not {value}", hint=see)


def verb(
    group: typer.Typer,
    name: str | None = None,
    *,
    examples: str = "",
    wide: bool = False,
    leaves: Callable[[Mapping[str, Any]], str] | None = None,
    without: Collection[str] = (),
    **models: type[BaseModel],
) -> Callable[[Callable[..., Answer | None]], Callable[..., Answer | None]]:
    """Adds a function to a group of verbs, with `--json` and the options of models.

    The decorated function takes the verb's options by name, and prints nothing.

    Args:
        name: name of the verb; None: the function's.
        examples: commands below its help, one a line.
        wide: add `--wide`, for tables.
        leaves: report of an interrupted verb, from its options; by default, the files at `--out`.
        without: fields that are no options of this verb, such as `config.nodes.max_rows`.
        models: by name of the verb's parameter, which gets a `Given`.
    """

    def decorate(function: Callable[..., Answer | None]) -> Callable[..., Answer | None]:
        words = function.__name__.strip("_").replace("_", " ")
        options = {
            name: tuple(o for o in options_of(model) if ".".join((name, *o.path)) not in without)
            for name, model in models.items()
        }
        parameters: list[inspect.Parameter] = []
        own: dict[str, ConfigOption] = {}
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            if parameter.name in models:
                parameters += (option.parameter() for option in options[parameter.name])
            elif isinstance(parameter.default, FieldInfo):
                made = _option((parameter.name,), parameter.default, parameter.annotation)
                parameters.append(made.parameter().replace(name=parameter.name))
                own[parameter.name] = made
            else:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        parameters += [JSON, WIDE] if wide else [JSON]
        signature = inspect.Signature(parameters)

        def answer(**given: Any) -> Answer | None:
            bound = signature.bind(**given)
            bound.apply_defaults()
            values = bound.arguments
            for name, option in own.items():
                _check_own(option, values[name], words)
            for name, model in models.items():
                taken = {o.name: values.pop(o.name) for o in options[name]}
                values[name] = Given(model, options[name], taken, words)
            for added in (WIDE.name, JSON.name):
                values.pop(added, None)
            return function(**values)

        def called(**given: Any) -> None:
            started = time.time()
            try:
                with console.lines_of_progress(words):
                    found = answer(**given)
                console.say(found, as_json=given[JSON.name], wide=given.get(WIDE.name, False))
            except KeyboardInterrupt:
                left = leaves(given) if leaves else what_is_left(given.get("out"), started)
                raise VerbInterruptedError(left) from None

        answer.__signature__ = signature  # type: ignore[attr-defined]
        called.__name__, called.__doc__ = function.__name__, function.__doc__
        called.__signature__ = signature  # type: ignore[attr-defined]
        called.__annotations__ = {p.name: p.annotation for p in parameters}
        words_of_help = {"help_option_names": ["--help", "--help-all"]}
        group.command(name, cls=VerbCommand, epilog=examples, context_settings=words_of_help)(
            called
        )
        return answer

    return decorate


def runs_place(out: Path) -> Path:
    """The default folder of the answers behind a lossy fit."""
    return out.with_name(f"{out.name}.runs")


def what_is_left(out: Any, since: float) -> str:
    """Report of the files that an interrupted verb wrote.

    Args:
        since: time when the verb began, seconds of the epoch.
    """
    from specctl.logs.trace_set import TraceSet

    if out is None:
        return NOTHING
    with suppress(SpecctlError):
        held = count(len(TraceSet.open(str(out)).prompt_ids), "finished prompt")
        return f"{out} holds {held}; the same command with --resume goes on"
    # Only what verbs write: a shell may have sent their output to a file beside it.
    places = Path(out), runs_place(Path(out))
    files = {
        place: [
            path
            for path in (place, *place.rglob("*"))
            if path.is_file() and path.stat().st_mtime > since - CLOCK_TICK_S
        ]
        for place in places
    }
    found = [f"{place} ({count(len(new), 'file')})" for place, new in files.items() if new]
    return f"written so far: {', '.join(found)}" if found else NOTHING


def options_of(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[ConfigOption]:
    """The options of a model, in the order of its fields."""
    for name, field in model.model_fields.items():
        path, default = (*above, name), field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            yield from options_of(type(default), path)
        elif field.description is not None:
            yield _option(path, field, field.annotation, "advanced")


def _option(
    path: tuple[str, ...], field: FieldInfo, annotation: Any, group: str = "common"
) -> ConfigOption:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    kind, bounds, words = _kind_of(annotation, list(field.metadata))
    is_list = get_origin(kind) is tuple
    if is_list:
        kind, _, words = _kind_of(get_args(kind)[0], [])
    word = path[-1].replace("_", "-")
    default = field.get_default(call_default_factory=True)
    flag = str(extra.get("option") or f"--{word}" + f"/--no-{word}" * (kind is bool and default))
    in_words = extra.get("default")
    if in_words:
        default = None
    elif field.is_required():
        default = inspect.Parameter.empty
    stated = "" if in_words is None else f"; default: {in_words}"
    within = "" if is_list else _range(bounds)
    return ConfigOption(
        path=path,
        flag=flag,
        group=str(extra.get("group") or group),
        kind=kind,
        is_list=is_list,
        repeats=bool(extra.get("repeats")),
        default=default,
        help=f"{field.description}{within}{stated}.",
        words=words if kind is str else (),
        least=next((one.ge for one in bounds if isinstance(one, Ge) and kind is int), None),
    )


def _kind_of(annotation: Any, bounds: list[Any]) -> tuple[Any, list[Any], tuple[Any, ...]]:
    """The plain type of an annotation, the bounds found on the way, and the values of a choice."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        for one in inner[1:]:
            bounds += one.metadata if isinstance(one, FieldInfo) else [one]
        return _kind_of(inner[0], bounds)
    if origin in (Union, types.UnionType):
        [one] = [part for part in inner if part is not type(None)]
        return _kind_of(one, bounds)
    if origin is Literal:
        return type(inner[0]), [], inner
    return annotation, bounds, ()


def _range(bounds: list[Any]) -> str:
    low = next((b for b in bounds if isinstance(b, Ge | Gt)), None)
    high = next((b for b in bounds if isinstance(b, Le | Lt)), None)
    least: Any = low.ge if isinstance(low, Ge) else low.gt if low else None
    most: Any = high.le if isinstance(high, Le) else high.lt if high else None
    if most is not None and most > LARGEST_STATED:
        most = None
    if most is None:
        if least is None or (isinstance(low, Ge) and least <= 1):  # obvious for a count
            return ""
        return f", at least {least}" if isinstance(low, Ge) else f", above {least:g}"
    if isinstance(most, int) and isinstance(least, int) and isinstance(low, Ge) and least > 0:
        return f", {least} to {most}"
    opens, closes = ("[" if isinstance(low, Ge) else "("), ("]" if isinstance(high, Le) else ")")
    return f", in {opens}{least:g}, {most:g}{closes}"
