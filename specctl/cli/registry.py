"""`specctl registry`: share policies; `registry trust`: the keys that this user trusts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.cli.app import commits, reads_only, registry_app
from specctl.cli.options import JsonOption

if TYPE_CHECKING:
    from specctl.registry import Note, Writer
    from specctl.registry.log import Logged

trust_app = typer.Typer(no_args_is_help=True, help="Decide which keys this user trusts.")
registry_app.add_typer(trust_app, name="trust")

RegistryOption = Annotated[
    str,
    typer.Option(
        envvar="SPECCTL_REGISTRY", help="Folder or s3://bucket/prefix; or SPECCTL_REGISTRY."
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
NeededReasonOption = Annotated[str, typer.Option("--reason", help="Why, for the history.")]
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
FolderArgument = Annotated[Path, typer.Argument(help="Folder of an artifact.")]
KeyIdArgument = Annotated[str, typer.Argument(help="Key id, ed25519:HEX, of `trust list`.")]
SignedNameOption = Annotated[
    str, typer.Option("--name", help="Name that the signature is for: it counts for no other.")
]


@registry_app.command("init")
def init(registry: RegistryOption, as_json: JsonOption = False) -> None:
    """Make a place a registry, once it has shown that it refuses to overwrite."""
    from specctl.registry import init_registry

    made = init_registry(registry)
    found = {"url": made.url, **made.marker.model_dump(mode="json")}
    _tell(found, f"registry {made.marker.registry_id} at {made.url}", as_json=as_json)


@registry_app.command("push")
@commits
def push(
    folder: FolderArgument,
    name: NameArgument,
    registry: RegistryOption,
    alias: Annotated[
        str | None, typer.Option(help="Alias to point to it afterwards; default: none.")
    ] = None,
    key: KeyOption = None,
    actor: ActorOption = None,
    reason: ReasonOption = None,
    expires: ExpiresOption = None,
    trust: TrustOption = None,
    as_json: JsonOption = False,
) -> None:
    """Publish an artifact under a name; it is loaded first, so what is bad is not published."""
    from specctl import registry as room
    from specctl.registry.names import parse_alias

    note = _note(reason, expires)
    room.parse_name(name)  # before the artifact is loaded, which takes seconds
    if alias is not None:
        parse_alias(alias)
    writer = _writer(registry, actor, key, trust)
    package = room.read_package(folder)
    logged = room.push(writer, package, name, note=note)
    if alias is not None:
        moved = room.promote(writer, name, alias, package.digest, note=note)
        logged = moved if moved.changed else logged
    _show_entry(logged, as_json=as_json)


@registry_app.command("promote")
@commits
def promote(
    name: NameArgument,
    alias: AliasArgument,
    version: Annotated[
        str, typer.Argument(help="sha256:HEX, another alias, or the artifact's folder as ./FOLDER.")
    ],
    registry: RegistryOption,
    expect: Annotated[
        str | None,
        typer.Option(
            help="Digest sha256:HEX that the alias must have; default: what it has at the start."
        ),
    ] = None,
    key: KeyOption = None,
    actor: ActorOption = None,
    reason: ReasonOption = None,
    expires: ExpiresOption = None,
    trust: TrustOption = None,
    as_json: JsonOption = False,
) -> None:
    """Point an alias to a version, unless another writer moved it meanwhile."""
    from specctl import registry as room
    from specctl.registry.publishing import version_digest

    note, expected = _note(reason, expires), _expected_digest(expect)
    writer = _writer(registry, actor, key, trust)
    digest = version_digest(writer.registry, name, version)
    moved = room.promote(writer, name, alias, digest, expect=expected, note=note)
    _show_entry(moved, as_json=as_json, changed=moved.changed)


@registry_app.command("rollback")
@commits
def rollback(
    name: NameArgument,
    alias: AliasArgument,
    registry: RegistryOption,
    reason: NeededReasonOption,
    to: Annotated[
        str | None,
        typer.Option(
            help="sha256:HEX, another alias or ./FOLDER, one that it had before; default: the one "
            "before the one it has."
        ),
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option(
            help="Digest sha256:HEX to go back from; done once, however often it is repeated. "
            "Default: what it has at the start."
        ),
    ] = None,
    key: KeyOption = None,
    actor: ActorOption = None,
    expires: ExpiresOption = None,
    trust: TrustOption = None,
    as_json: JsonOption = False,
) -> None:
    """Point an alias back to an older version: a new generation, nothing is deleted."""
    from specctl import registry as room
    from specctl.registry.publishing import version_digest

    note, expected = _note(reason, expires), _expected_digest(expect)
    writer = _writer(registry, actor, key, trust)
    digest = None if to is None else version_digest(writer.registry, name, to)
    moved = room.rollback(writer, name, alias, note=note, to=digest, expect=expected)
    _show_entry(moved, as_json=as_json, changed=moved.changed)


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
    from specctl.artifacts.compatibility import Wanted, rank
    from specctl.registry import open_registry
    from specctl.registry.listing import candidates, match_row, name_rows
    from specctl.registry.trust import Trust
    from specctl.runtime.identity import wanted_of

    found = open_registry(registry)
    wanted = Wanted(
        target=target,
        drafter=draft,
        gpu=gpu,
        workload=workload,
        dtype=dtype,
        batch_size=batch_size,
        context_tokens=context_tokens,
    )
    if wanted == Wanted():
        columns = "name num_versions aliases generation error"
        _show_rows(found.url, name_rows(found), columns, as_json=as_json, empty="no names yet")
        return
    offered = candidates(found, Trust.load(trust), console.warn)
    rows = [match_row(match, as_json=as_json) for match in rank(wanted_of(wanted), offered)]
    columns = "reference digest exact loadable refusal differences"
    _show_rows(found.url, rows, columns, as_json=as_json, empty="no artifacts yet")


@registry_app.command("show")
@reads_only
def show(name: NameArgument, registry: RegistryOption, as_json: JsonOption = False) -> None:
    """Show the versions and aliases of a name."""
    from specctl.registry import open_registry
    from specctl.registry.listing import version_rows

    rows = version_rows(open_registry(registry).known_log(name))
    columns = "digest aliases generation published expires alias_expires actor"
    _show_rows(name, rows, columns, as_json=as_json, empty="no versions")


@registry_app.command("log")
@reads_only
def log(name: NameArgument, registry: RegistryOption, as_json: JsonOption = False) -> None:
    """Show the history of a name: who did what, when and why."""
    from specctl.registry import open_registry
    from specctl.registry.listing import entry_row

    rows = [entry_row(logged) for logged in open_registry(registry).known_log(name).entries]
    columns = "generation kind alias digest created expires actor reason key_ids"
    _show_rows(name, rows, columns, as_json=as_json)


@registry_app.command("pull")
def pull(
    reference: ReferenceArgument,
    registry: RegistryOption,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Artifact folder to write; default: none.")
    ] = None,
    offline: Annotated[
        bool, typer.Option(help="Use the cache alone: what the reference meant when last pulled.")
    ] = False,
    trust: TrustOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch an artifact: checked, loaded, kept in the read-only cache, copied to --out."""
    from specctl import console
    from specctl.registry.pulling import Reader, copy_out, pull_from
    from specctl.registry.trust import Trust

    pulled = pull_from(registry, reference, Reader(Trust.load(trust)), offline=offline)
    if pulled.remembered is not None:
        console.warn(f"offline: {reference} as of {pulled.remembered}; the registry was not asked")
    folder = pulled.folder if out is None else copy_out(pulled, out)
    digest = pulled.artifact.digest
    found = {"reference": reference, "remembered": pulled.remembered, "digest": digest}
    line = f"{reference} is {digest}, in {folder}"
    _tell({**found, "folder": str(folder)}, line, as_json=as_json)


@registry_app.command("verify")
@reads_only
def verify(
    registry: RegistryOption,
    reference: Annotated[
        str | None, typer.Argument(help="NAME@ALIAS or NAME@sha256:HEX; default: everything.")
    ] = None,
    trust: TrustOption = None,
    as_json: JsonOption = False,
) -> None:
    """Recompute chains, digests and signatures, of a reference or of all; changes nothing."""
    from specctl import console
    from specctl import registry as room
    from specctl.registry.trust import Trust

    opened, wanted = room.open_registry(registry), reference and room.parse_reference(reference)
    done = room.verify(opened, Trust.load(trust), wanted or None)
    what = reference or opened.url
    if as_json:
        console.show_json(done.to_json())
    else:
        if done.findings:
            rows = [vars(finding) for finding in done.findings]
            _show_rows(what, rows, "code place found is_damage", as_json=False)
        console.show_lines([done.sentence()], as_json=False)
    done.refuse(what, expired_too=reference is not None)


@registry_app.command("copy")
def copy(
    destination: Annotated[
        str, typer.Argument(help="Empty place, or an older copy; a URL as --registry takes it.")
    ],
    registry: RegistryOption,
    as_json: JsonOption = False,
) -> None:
    """Bring a place up to this registry: backup, mirror or restore."""
    from specctl.registry import copy_registry, open_registry

    copied = copy_registry(open_registry(registry), destination)
    columns = "num_names num_entries num_artifacts"
    _show_rows(destination, [vars(copied)], columns, as_json=as_json)


@registry_app.command()
def keygen(
    out: Annotated[Path, typer.Argument(help="New file for the private key; OUT.pub beside it.")],
    as_json: JsonOption = False,
) -> None:
    """Make a key pair; SPECCTL_KEY_PASSPHRASE, where it is set, encrypts the private key."""
    from specctl.artifacts.signing import SigningKey

    key = SigningKey.generate()
    public = key.save(out)
    made = {"key_id": key.key_id, "private": str(out), "public": str(public)}
    _tell(made, f"wrote {out}, {public}\n{key.key_id}", as_json=as_json)


@registry_app.command()
def sign(
    folder: FolderArgument,
    name: SignedNameOption,
    key: Annotated[Path, typer.Option(help="Private key (PEM), of `registry keygen`.")],
    expires: ExpiresOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sign an artifact's folder: signature.dsse.json in it vouches for the manifest and a name."""
    from specctl.artifacts.signing import SigningKey, sign_folder
    from specctl.registry import parse_name
    from specctl.registry.trust import check_time_to_come

    until = check_time_to_come(expires, "--expires")
    digest = sign_folder(folder, SigningKey.load(key), parse_name(name), expires=until)
    _tell({"digest": digest}, f"signed {digest}", as_json=as_json)


@registry_app.command("verify-signature")
@reads_only
def verify_signature(
    folder: FolderArgument,
    name: SignedNameOption,
    trust: TrustOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the digests and the signature of an artifact's folder against the trust file."""
    from specctl.registry import parse_name
    from specctl.registry.trust import Trust, verify_folder

    digest, key_ids = verify_folder(folder, Trust.load(trust), parse_name(name))
    found = {"digest": digest, "key_ids": list(key_ids)}
    _tell(found, f"verified {digest}\n" + "\n".join(key_ids), as_json=as_json)


@trust_app.command("add")
def trust_add(
    public_key: Annotated[Path, typer.Argument(help="Public key (PEM): OUT.pub of keygen.")],
    names: Annotated[
        list[str],
        typer.Option("--name", help="Names that it may sign for, * for any text; repeatable."),
    ],
    roles: Annotated[list[str], typer.Option("--role", help="publisher or promoter; repeatable.")],
    not_after: Annotated[
        str | None,
        typer.Option(
            help="UTC time after which it may not sign, e.g. 2027-01-31T12:00:00Z; default: never."
        ),
    ] = None,
    comment: Annotated[str, typer.Option(help="Whose it is; default: nothing.")] = "",
    trust: TrustOption = None,
    as_json: JsonOption = False,
) -> None:
    """Trust a key for names and roles; a key that is there gets these in place of its own."""
    from specctl.artifacts.signing import load_public
    from specctl.registry.trust import TrustedKey, check_time_to_come, edit_trust

    until = check_time_to_come(not_after, "--not-after")
    raw = load_public(public_key)
    key = TrustedKey.of(raw, names=names, roles=roles, not_after=until, comment=comment)
    edit_trust(trust, lambda known: known.with_key(key))
    _tell({"key_id": key.key_id}, f"trusted {key.key_id}", as_json=as_json)


@trust_app.command("require")
def trust_require(
    glob: Annotated[str, typer.Argument(help="Names, * for any text, e.g. 'qwen3-*'.")],
    trust: TrustOption = None,
    as_json: JsonOption = False,
) -> None:
    """Accept nothing unsigned under these names from now on."""
    from specctl.registry.trust import edit_trust

    edit_trust(trust, lambda known: known.with_required(glob))
    _tell(
        {"require": glob}, f"signatures of a trusted key are required for {glob}", as_json=as_json
    )


@trust_app.command("revoke")
def trust_revoke(
    key_id: KeyIdArgument,
    reason: Annotated[str, typer.Option(help="Why, for those who meet it.")],
    trust: TrustOption = None,
    as_json: JsonOption = False,
) -> None:
    """Never trust a key again, whatever it signed and whenever."""
    from specctl.registry.trust import edit_trust

    edit_trust(trust, lambda known: known.with_revoked(key_id, reason))
    _tell({"key_id": key_id}, f"revoked {key_id}", as_json=as_json)


@trust_app.command("list")
@reads_only
def trust_list(trust: TrustOption = None, as_json: JsonOption = False) -> None:
    """Show which keys are trusted, for what, and which names must be signed."""
    from specctl import console
    from specctl.registry.listing import key_rows
    from specctl.registry.trust import Trust

    found = Trust.load(trust)
    if as_json:
        console.show_json(found.model_dump(mode="json"))
        return
    console.show(f"signatures are required for: {', '.join(found.require) or 'nothing'}")
    columns = "key_id state roles names until comment"
    empty = "no key is trusted yet"
    _show_rows("trust", key_rows(found), columns, as_json=False, empty=empty)


def _writer(
    registry: str, actor: str | None, keys: list[Path] | None, trust: Path | None
) -> Writer:
    from specctl.artifacts.signing import SigningKey
    from specctl.registry import Author, Writer, open_registry
    from specctl.registry.trust import Trust

    signing = tuple(SigningKey.load(path) for path in keys or ())
    author = Author(_own_name() if actor is None else actor, signing)
    return Writer(open_registry(registry), author, Trust.load(trust))


def _own_name() -> str:
    """`user@host`; an account has no name where a container was given any number for its user."""
    import getpass
    import socket

    from specctl.errors import UsageError

    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):
        raise UsageError(
            "--actor", expected="who does this", found="an account without a name", fix="give it"
        ) from None


def _note(reason: str | None, expires: str | None) -> Note:
    from specctl.registry import Note
    from specctl.registry.trust import check_time_to_come

    return Note(reason, check_time_to_come(expires, "--expires"))


def _expected_digest(text: str | None) -> str | None:
    """The digest of `--expect`. An alias might have moved, too, so it would prove nothing."""
    from specctl.errors import RegistryError, UsageError
    from specctl.registry.names import parse_digest

    try:
        return None if text is None else parse_digest(text)
    except RegistryError as error:
        raise UsageError(
            "--expect",
            expected="the digest that the alias points to, sha256:<64 lower-case hex digits>",
            found=error.found,
            fix="take it from `specctl registry show NAME --json`",
        ) from None


def _tell(found: dict[str, Any], line: str, *, as_json: bool) -> None:
    """The outcome, for a program or for a person."""
    from specctl import console

    if as_json:
        console.show_json(found)
    else:
        console.show(line)


def _show_entry(logged: Logged, *, as_json: bool, **more: object) -> None:
    """An entry that was written, or that was there already; `more` is for programs alone."""
    from specctl.registry.listing import entry_row

    row = entry_row(logged)
    place = f"{row['name']}@{row['alias']}" if row["alias"] else row["name"]
    there = "" if more.get("changed", True) else "already there: "
    line = f"{there}{row['kind']} {place} {row['digest']}, generation {row['generation']}"
    _tell({**row, **more}, line, as_json=as_json)


def _show_rows(
    title: str, rows: list[dict[str, Any]], columns: str, *, as_json: bool, empty: str = "none"
) -> None:
    """Rows for a program, or as a table for a person; `empty` where there are none."""
    from specctl import console
    from specctl.console import render
    from specctl.registry.listing import table

    if as_json:
        console.show_json(rows)
    elif rows:
        console.show(render(table(title, rows, columns.split()), console.terminal_width()))
    else:
        console.show_lines([f"{title}: {empty}"], as_json=False)
