"""`specctl registry`: the group, what its verbs share, and those that read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.cli.app import app
from specctl.cli.interrupts import reads_only
from specctl.cli.options import JsonOption

if TYPE_CHECKING:
    from specctl.registry import Author, Writer
    from specctl.registry.fsck import Finding
    from specctl.registry.verdicts import Checked

registry_app = typer.Typer(
    no_args_is_help=True, help="Share policies: publish, find, pin, roll back, check."
)
app.add_typer(registry_app, name="registry")

RegistryOption = Annotated[
    str,
    typer.Option(
        envvar="SPECCTL_REGISTRY",
        help="Folder, s3://bucket/prefix or oci://host/repo?log=STORE; or SPECCTL_REGISTRY.",
    ),
]
ActorOption = Annotated[
    str | None, typer.Option(help="Who does this, for the history; default: user@host.")
]
KeyOption = Annotated[
    list[Path] | None,
    typer.Option("--key", help="Private key (PEM) to sign with; repeatable; default: unsigned."),
]
TrustOption = Annotated[
    Path | None, typer.Option(help="Trust file; default: the user's own (registry trust list).")
]
ReasonOption = Annotated[str | None, typer.Option(help="Why, for the history; default: none.")]
ExpiresOption = Annotated[
    str | None,
    typer.Option(
        help="UTC time after which readers refuse this, e.g. 2027-01-31T12:00:00Z; default: never."
    ),
]
NameArgument = Annotated[
    str,
    typer.Argument(
        help="TARGET+DRAFTER@HARDWARE:WORKLOAD, e.g. qwen3-8b+eagle3@h200:chat; TARGET is enough."
    ),
]
ReferenceArgument = Annotated[
    str, typer.Argument(help="NAME@ALIAS or NAME@sha256:HEX, e.g. qwen3-8b+eagle3@h200:chat@prod")
]
AliasArgument = Annotated[str, typer.Argument(help="Alias, e.g. prod.")]


def author_of(actor: str | None, keys: list[Path] | None) -> Author:
    from specctl.artifacts.signing import SigningKey
    from specctl.registry.entries import Author

    signing = tuple(SigningKey.load(path) for path in keys or ())
    return Author(_own_name() if actor is None else actor, signing)


def _own_name() -> str:
    """`user@host`; an account has no name where a container was given any number for its user."""
    import getpass
    import socket

    from specctl.errors import UsageError

    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):
        raise UsageError(
            "--actor", expected="who does this", found="an account without a name", fix="say it"
        ) from None


def writer_of(
    registry: str,
    actor: str | None,
    keys: list[Path] | None = None,
    trust: Path | None = None,
) -> Writer:
    from specctl.artifacts.signing import Trust
    from specctl.registry import Writer, open_registry

    return Writer(open_registry(registry), author_of(actor, keys), Trust.load(trust))


def show_rows(
    title: str,
    rows: list[dict[str, Any]],
    columns: str,
    *,
    as_json: bool,
    empty: str = "none",
) -> None:
    """Rows for a program, or as a table for a person.

    Args:
        empty: what to say to a person where there are none.
    """
    from specctl import console
    from specctl.artifacts.describe import render
    from specctl.registry.views import table

    if as_json:
        console.show_json(rows)
    elif rows:
        described = table(title, rows, columns.split())
        console.show(render(described, console.terminal_width()))
    else:
        console.show_lines([f"{title}: {empty}"], as_json=False)


def show_check(checked: Checked, found: list[Finding], what: str, *, as_json: bool) -> None:
    """What a check went over and found."""
    from specctl import console
    from specctl.registry import verdicts

    if as_json:
        console.show_json(verdicts.findings_json(checked, found))
    else:
        rows = [verdicts.finding_row(finding) for finding in found]
        if rows:
            show_rows(what, rows, "code place found is_damage", as_json=False)
        console.show_lines([checked.sentence(found)], as_json=False)


@registry_app.command("list")
@reads_only
def list_(
    registry: RegistryOption,
    target: Annotated[
        str | None,
        typer.Option("--for", help="Target: model folder, hub id or name; default: any."),
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="Drafter: model folder, hub id or name; default: any.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Device name, or cpu; default: any.")] = None,
    workload: Annotated[
        str | None, typer.Option(help="Word of the workload; default: any.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of the target: float32, bfloat16, float16 or bf16 ...; default: any."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Requests decoded together; default: any.")
    ] = None,
    context_tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of the texts, tokens; default: any.")
    ] = None,
    trust: TrustOption = None,
    as_json: JsonOption = False,
) -> None:
    """List names, or rank what fits a pair best, with every difference named."""
    from specctl import console
    from specctl.artifacts.lookup import Wanted, rank
    from specctl.artifacts.signing import Trust
    from specctl.registry import open_registry
    from specctl.registry.views import (
        candidates,
        match_row,
        match_words,
        name_rows,
    )
    from specctl.runtime.wanted import wanted_of

    found = open_registry(registry)
    asked = Wanted(
        target=target,
        drafter=draft,
        gpu=gpu,
        workload=workload,
        dtype=dtype,
        batch_size=batch_size,
        context_tokens=context_tokens,
    )
    if asked == Wanted():
        columns = "name num_versions aliases generation error"
        show_rows(found.url, name_rows(found), columns, as_json=as_json, empty="no names yet")
        return
    trusted = Trust.load(trust)
    offered = candidates(found, trusted, console.warn)
    ranked = rank(wanted_of(asked), offered)
    rows = [match_row(match) if as_json else match_words(match) for match in ranked]
    columns = "reference digest exact loadable refusal differences"
    show_rows(found.url, rows, columns, as_json=as_json, empty="no artifacts yet")


@registry_app.command("show")
@reads_only
def show(name: NameArgument, registry: RegistryOption, as_json: JsonOption = False) -> None:
    """Show the versions and aliases of a name."""
    from specctl.registry import open_registry
    from specctl.registry.views import version_rows

    log = open_registry(registry).known_log(name)
    columns = "digest aliases generation published expires alias_expires actor"
    rows = version_rows(log)
    show_rows(name, rows, columns, as_json=as_json, empty="no versions")


@registry_app.command("log")
@reads_only
def log(
    name: Annotated[
        str, typer.Argument(help="A name, or _settings or _gc: logs of the registry itself.")
    ],
    registry: RegistryOption,
    as_json: JsonOption = False,
) -> None:
    """Show the history of a name: who did what, when and why."""
    from specctl.registry import open_registry
    from specctl.registry.views import entry_row

    rows = [entry_row(logged) for logged in open_registry(registry).any_log(name).entries]
    columns = "generation kind alias digest num_digests created expires actor reason key_ids"
    show_rows(name, rows, columns, as_json=as_json, empty="nothing was ever written to it")


@registry_app.command("pull")
def pull(
    reference: ReferenceArgument,
    registry: RegistryOption,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Artifact folder to write; default: none.")
    ] = None,
    offline: Annotated[
        bool, typer.Option(help="Ask the cache alone: what the reference meant when last pulled.")
    ] = False,
    trust: TrustOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch an artifact: checked, loaded, kept in the read-only cache, copied to --out."""
    from specctl import console
    from specctl.registry.transfers import copy_out, pull_from, reader_of

    reader = reader_of(trust)
    with console.progress("bytes", None) as tick:
        pulled = pull_from(registry, reference, reader, offline=offline, on_bytes=tick)
    if pulled.remembered is not None:
        console.warn(f"offline: {reference} as of {pulled.remembered}; the registry was not asked")
    folder = pulled.folder if out is None else copy_out(pulled, out)
    if as_json:
        told = {"reference": reference, "remembered": pulled.remembered}
        console.show_json({**told, "digest": pulled.artifact.digest, "folder": str(folder)})
    else:
        console.show(f"{reference} is {pulled.artifact.digest}, in {folder}")


@registry_app.command("verify")
@reads_only
def verify(
    reference: ReferenceArgument,
    registry: RegistryOption,
    trust: TrustOption = None,
    as_json: JsonOption = False,
) -> None:
    """Recompute what one reference rests on: history, content, signatures."""
    from specctl.artifacts.signing import Trust
    from specctl.registry import open_registry, parse_reference
    from specctl.registry.fsck import verify as check
    from specctl.registry.verdicts import checked_one, refuse_unusable

    opened, asked = open_registry(registry), parse_reference(reference)
    found = list(check(opened, asked, Trust.load(trust)))
    show_check(checked_one(opened, asked.name), found, reference, as_json=as_json)
    refuse_unusable(found, reference)


@registry_app.command("fsck")
@reads_only
def fsck(registry: RegistryOption, trust: TrustOption = None, as_json: JsonOption = False) -> None:
    """Recompute everything: histories, digests, aliases, signatures, pins. Changes nothing."""
    from specctl import console
    from specctl.artifacts.signing import Trust
    from specctl.registry import open_registry
    from specctl.registry.fsck import fsck as check
    from specctl.registry.verdicts import checked_all, refuse_damage

    opened = open_registry(registry)
    with console.progress("objects checked", None) as tick:
        found = list(check(opened, Trust.load(trust), on_checked=tick))
    show_check(checked_all(opened), found, opened.url, as_json=as_json)
    refuse_damage(found, opened.url)
