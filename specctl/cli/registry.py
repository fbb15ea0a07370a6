"""`specctl registry`: shared policies; `registry trust`: the keys that this user trusts."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from specctl import console
from specctl import registry as room
from specctl.artifacts.signing import SigningKey, load_public, sign_folder
from specctl.cli.app import group, registry_app
from specctl.cli.verbs import Given, verb
from specctl.console import Answer
from specctl.errors import CodedError, UsageError
from specctl.formatting import listed
from specctl.records import TypedModel, option
from specctl.registry import listing
from specctl.registry.log import Logged
from specctl.registry.names import parse_new_alias, typed
from specctl.registry.publishing import contradictions, version_digest
from specctl.registry.pulling import copy_out, pull_from
from specctl.registry.trust import Trust, TrustedKey, edit_trust, verify_folder
from specctl.registry.userdirs import make_cache_home
from specctl.runtime.identity import weights_digest

trust_app = group(registry_app, "trust", "Decide which keys this user trusts.")

RegistryOption = Annotated[
    str,
    typer.Option(
        envvar="SPECCTL_REGISTRY", help="Folder or s3://bucket/prefix; or SPECCTL_REGISTRY."
    ),
]
TrustOption = Annotated[
    Path | None, typer.Option(help="Trust file; default: the user's own (registry trust list).")
]
NeededReasonOption = Annotated[str, typer.Option("--reason", help="Why, for the history.")]
NameArgument = Annotated[
    str,
    typer.Argument(
        help="TARGET+DRAFTER@HARDWARE:WORKLOAD, e.g. qwen3-8b+eagle3@h200:chat; TARGET is enough."
    ),
]
ReferenceArgument = Annotated[
    str,
    typer.Argument(
        help="NAME@ALIAS, NAME@v2 or NAME@sha256:HEX, e.g. qwen3-8b+eagle3@h200:chat@prod"
    ),
]
AliasArgument = Annotated[str, typer.Argument(help="Alias, e.g. prod.")]
FolderArgument = Annotated[Path, typer.Argument(help="Folder of an artifact.")]
KeyIdArgument = Annotated[str, typer.Argument(help="Key id of `trust list`, or its first digits.")]
SignedNameOption = Annotated[
    str, typer.Option("--name", help="Name that the signature is for: it counts for no other.")
]


class WriterConfig(TypedModel):
    """The signer of an entry in a history, and its reason."""

    key: Path | None = option(
        None, "Private key (PEM) to sign with", default="unsigned", group="common"
    )
    actor: str | None = option(
        None, "Name of the actor, for the history", default="user@host", group="common"
    )
    reason: str | None = option(None, "Why, for the history", default="none", group="common")
    trust: Path | None = option(
        None, "Trust file", default="the user's own (registry trust list)", group="common"
    )


def in_history(given: Mapping[str, Any]) -> str:
    """The report of an interrupted verb."""
    return f"it may have been done: see {typed(given['registry'], 'log', given['name'])}"


# --------------------------------------------------------------------------- publishing


@verb(
    registry_app,
    "init",
    examples="""specctl registry init --registry s3://bucket/policies
specctl registry init --registry ./policies""",
)
def init(registry: RegistryOption) -> Answer:
    """Make a place a registry.

    The place is tested first: it must refuse to overwrite.
    """
    made = room.init_registry(registry)
    found = {"url": made.url, **made.marker.model_dump(mode="json")}
    return Answer(found, [f"registry {made.marker.registry_id} at {made.url}"])


@verb(
    registry_app,
    "push",
    leaves=in_history,
    writing=WriterConfig,
    examples="""specctl registry push tuned/policy qwen3-8b+eagle3@h200:chat --alias prod""",
)
def push(
    folder: FolderArgument,
    name: NameArgument,
    registry: RegistryOption,
    *,
    alias: str | None = option(None, "Alias to point to it afterwards", default="none"),
    writing: Given,
) -> Answer:
    """Publish an artifact under a name.

    It is loaded first, so that a bad artifact is not published.
    """
    room.parse_name(name)  # before the artifact is loaded, which takes seconds
    if alias is not None:
        parse_new_alias(alias)
    writer = _writer(registry, writing)
    package = room.read_package(folder)
    warnings = contradictions(name, package)
    for line in warnings:
        console.warn(line)
    published = room.push(writer, package, name, reason=writing.reason)
    version = f"v{published.number}"
    there = "" if published.is_new else f"already there, {version}"
    signed = ", signed" if published.changed and there else ""
    said = {"version": version, "changed": published.changed, "warnings": warnings}
    answer = _entry(published, f"{there}{signed}", **said)
    if alias is None:
        return answer
    try:
        moved = room.promote(writer, name, alias, package.digest, reason=writing.reason)
    except CodedError as error:
        state = f"is published: {there}{signed}" if there else f"was published as {version}"
        error.add(f"{package.digest} {state}; {alias} did not move")
        raise
    said["changed"] = published.changed or moved.changed
    both = _entry(moved, "" if moved.changed else "already there", **said)
    data = both.data if moved.changed else answer.data
    return Answer(data, [*answer.parts, *both.parts])


@verb(
    registry_app,
    "promote",
    leaves=in_history,
    writing=WriterConfig,
    examples="""specctl registry promote qwen3-8b+eagle3@h200:chat prod v2""",
)
def promote(
    name: NameArgument,
    alias: AliasArgument,
    version: Annotated[
        str,
        typer.Argument(help="v2, sha256:HEX or another alias."),
    ],
    registry: RegistryOption,
    *,
    expect: str | None = option(
        None, "v2 or sha256:HEX that the alias must have", default="what it has at the start"
    ),
    writing: Given,
) -> Answer:
    """Point an alias to a version.

    Fails if another writer moved it meanwhile.
    """
    writer = _writer(registry, writing)
    expected = _expected_digest(writer, name, expect)
    digest = version_digest(writer, name, version)
    moved = room.promote(writer, name, alias, digest, expect=expected, reason=writing.reason)
    return _entry(moved, "" if moved.changed else "already there", changed=moved.changed)


@verb(
    registry_app,
    "rollback",
    leaves=in_history,
    writing=WriterConfig,
    without=("writing.reason",),
    examples="""specctl registry rollback qwen3-8b+eagle3@h200:chat prod --reason slower""",
)
def rollback(
    name: NameArgument,
    alias: AliasArgument,
    registry: RegistryOption,
    reason: NeededReasonOption,
    version: Annotated[
        str | None,
        typer.Argument(
            help="A version that the alias had before: v1, sha256:HEX or another alias; default: "
            "its last one.",
            show_default=False,
        ),
    ] = None,
    *,
    expect: str | None = option(
        None,
        "v2 or sha256:HEX to go back from, so that a repeated command does it only once. "
        "Default: what it has at the start",
    ),
    writing: Given,
) -> Answer:
    """Point an alias back to an older version.

    This adds a generation; nothing is deleted.
    """
    writer = _writer(registry, writing)
    expected = _expected_digest(writer, name, expect)
    digest = version and version_digest(writer, name, version)
    moved = room.rollback(writer, name, alias, reason=reason, to=digest, expect=expected)
    return _entry(moved, "" if moved.changed else "already there", changed=moved.changed)


def _writer(registry: str, writing: Given) -> room.Writer:
    key = None if writing.key is None else SigningKey.load(writing.key)
    actor = writing.actor
    if actor is None:
        try:
            actor = f"{getpass.getuser()}@{socket.gethostname()}"
        except (KeyError, OSError):  # in containers with an unknown user id
            raise UsageError("--actor is required: this account has no user name") from None
    make_cache_home()  # for the memory of histories; fails before anything is written
    opened = room.open_registry(registry)
    return room.Writer(opened, Trust.load(writing.trust), actor, key)


def _expected_digest(writer: room.Writer, name: str, version: str | None) -> str | None:
    """The digest of `--expect`, which is no alias: that might have moved, too."""
    if version is None:
        return None
    given = room.parse_reference(f"{name}@{version}")
    if given.digest is None and given.number is None:
        raise UsageError(f"--expect takes v2 or sha256:HEX, not {version!r}")
    return version_digest(writer, name, version)


def _entry(logged: Logged, there: str = "", **more: object) -> Answer:
    """The answer of an entry, written or there before.

    Args:
        there: words for an entry that was there before.
        more: further values for scripts.
    """
    row = listing.entry_row(logged)
    place = f"{row['name']}@{row['alias']}" if row["alias"] else row["name"]
    line = f"{row['kind']} {place} {row['digest']}, generation {row['generation']}"
    return Answer({**row, **more}, [f"{there}: {line}" if there else line])


# --------------------------------------------------------------------------- reading


@verb(
    registry_app,
    "list",
    examples="""specctl registry list
specctl registry list qwen3-8b h200""",
    wide=True,
)
def list_(
    registry: RegistryOption,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="Search for versions with all of these: a digest, a model's folder, or a part of "
            "a reference or of the name of a model, device or workload; default: list names.",
            show_default=False,
        ),
    ] = None,
    trust: TrustOption = None,
) -> Answer:
    """List names, or search for versions."""
    found, trusted = room.open_registry(registry), Trust.load(trust)
    if not words:
        columns = "name num_versions aliases refused error | generation"
        rows = listing.name_rows(found, trusted)
        return _rows(found.url, rows, columns, empty="no names yet")
    folders = {word: Path(word) for word in words if Path(word, "config.json").is_file()}
    sought = [weights_digest(folders[word]) if word in folders else word for word in words]
    rows = list(listing.search(found, trusted, sought))
    columns = "reference hardware workload refusal | digest target drafter dtype batch_size"
    return _rows(found.url, rows, columns, empty=f"no version has {' and '.join(words)} in it")


@verb(
    registry_app, "show", examples="""specctl registry show qwen3-8b+eagle3@h200:chat""", wide=True
)
def show(name: NameArgument, registry: RegistryOption, trust: TrustOption = None) -> Answer:
    """Show the versions of a name, with their aliases."""
    history = room.open_registry(registry).known_log(name)
    rows = listing.version_rows(history, Trust.load(trust))
    columns = "version aliases refused digest published actor"
    return _rows(name, rows, columns, empty="no versions")


@verb(registry_app, "log", examples="""specctl registry log qwen3-8b+eagle3@h200:chat""", wide=True)
def log(name: NameArgument, registry: RegistryOption, trust: TrustOption = None) -> Answer:
    """Show the history of a name.

    Signed entries are marked, and those that the trust file refuses.
    """
    rows = listing.log_rows(room.open_registry(registry).known_log(name), Trust.load(trust))
    marked = [{**row, "signed": "yes" if row["key_id"] else "no"} for row in rows]
    columns = "generation kind alias created actor signed refusal reason | digest key_id"
    return Answer(rows, _rows(name, marked, columns).parts)


@verb(
    registry_app,
    "pull",
    examples="""specctl registry pull qwen3-8b+eagle3@h200:chat@prod -o policy""",
)
def pull(
    reference: ReferenceArgument,
    registry: RegistryOption,
    out: Path | None = option(None, "Artifact folder to write", name="--out -o", default="none"),
    *,
    offline: bool = option(False, "Use only the cache: the version that was last pulled"),
    trust: TrustOption = None,
) -> Answer:
    """Fetch an artifact by its name.

    It is checked, loaded, kept in the read-only cache and copied to --out.
    """
    pulled = pull_from(registry, reference, room.Reader(Trust.load(trust)), offline=offline)
    if pulled.remembered is not None:
        console.warn(f"offline: {reference} as of {pulled.remembered}; the registry was not read")
    folder = pulled.folder if out is None else copy_out(pulled, out)
    digest = pulled.artifact.digest
    found = {"reference": reference, "remembered": pulled.remembered, "digest": digest}
    line = f"{reference} is {digest}, in {folder}"
    return Answer({**found, "folder": str(folder)}, [line])


@verb(registry_app, "verify")
def verify(
    registry: RegistryOption,
    reference: Annotated[
        str | None, typer.Argument(help="NAME@ALIAS or NAME@sha256:HEX; default: everything.")
    ] = None,
    trust: TrustOption = None,
) -> Answer:
    """Check histories, digests and signatures.

    Exits with 3 for damage; for a REFERENCE also where the trust file does not accept it.
    """
    opened, wanted = room.open_registry(registry), reference and room.parse_reference(reference)
    done = room.verify(opened, Trust.load(trust), wanted or None)
    what, rows = reference or opened.url, [vars(finding) for finding in done.findings]
    parts = _rows(what, rows, "state code place found").parts if rows else ()
    return Answer(
        asdict(done),
        [*parts, [done.sentence(opened.url)]],
        lambda: done.refuse(opened.url, reference),
    )


def _rows(
    title: str, rows: Sequence[dict[str, Any]], columns: str, *, empty: str = "none"
) -> Answer:
    """Rows as JSON and as a table; `empty` replaces a table without rows."""
    return Answer(
        rows,
        [listing.table(title, rows, columns) if rows else [f"{title}: {empty}"]],
    )


# --------------------------------------------------------------------------- keys


@verb(registry_app)
def keygen(
    out: Annotated[Path, typer.Argument(help="New file for the private key; OUT.pub beside it.")],
) -> Answer:
    """Make a key pair.

    SPECCTL_KEY_PASSPHRASE encrypts the private key.
    """
    key = SigningKey.generate()
    public = key.save(out)
    made = {"key_id": key.key_id, "private": str(out), "public": str(public)}
    return Answer(made, [f"wrote {out}, {public}\n{key.key_id}"])


@verb(
    registry_app,
    examples="""specctl registry sign tuned/policy --name embedded+eagle3@cpu:demo --key alice""",
)
def sign(
    folder: FolderArgument,
    name: SignedNameOption,
    key: Annotated[Path, typer.Option(help="Private key (PEM), of `registry keygen`.")],
) -> Answer:
    """Sign an artifact's folder for a name.

    Writes signature.dsse.json in it.
    """
    digest = sign_folder(folder, SigningKey.load(key), room.parse_name(name))
    return Answer({"digest": digest}, [f"signed {digest}"])


@verb(
    registry_app,
    "verify-signature",
    examples="""specctl registry verify-signature second --name embedded+eagle3@cpu:demo""",
)
def verify_signature(
    folder: FolderArgument, name: SignedNameOption, trust: TrustOption = None
) -> Answer:
    """Check the signature of an artifact's folder."""
    digest, key_id = verify_folder(folder, Trust.load(trust), room.parse_name(name))
    return Answer({"digest": digest, "key_id": key_id}, [f"verified {digest}\n{key_id}"])


@verb(
    trust_app,
    "add",
    examples="""specctl registry trust add alice.pub --name 'embedded*' --comment Alice""",
)
def trust_add(
    public_key: Annotated[Path, typer.Argument(help="Public key (PEM): OUT.pub of keygen.")],
    names: Annotated[
        list[str],
        typer.Option("--name", help="Names that it may sign for, * for any text; repeatable."),
    ],
    comment: str = option("", "Note on its owner; default: none"),
    trust: TrustOption = None,
) -> Answer:
    """Trust a key for names, which replace the names it had.

    From then on these names need a signature of a trusted key.
    """
    key = TrustedKey.of(load_public(public_key), names=names, comment=comment)
    before = edit_trust(trust, lambda known: known.with_key(key)).key(key.key_id)
    replaced = "" if before is None else f", in place of {listed(before.names)}"
    shown = [f"trusted {key.key_id} for {listed(key.names)}{replaced}"]
    data = {"key_id": key.key_id, "names": key.names, "replaced": before and before.names}
    return Answer(data, shown)


@verb(
    trust_app,
    "revoke",
    examples="""specctl registry trust revoke ed25519:1c671e3c4d54 --reason 'lost laptop'""",
)
def trust_revoke(
    key_id: KeyIdArgument,
    reason: Annotated[str, typer.Option(help="Why, for later readers.")],
    trust: TrustOption = None,
) -> Answer:
    """Revoke a key.

    None of its signatures is accepted any more, old ones included.
    """
    before = edit_trust(trust, lambda known: known.with_revoked(key_id, reason))
    whole = before.only_key(key_id).key_id
    return Answer({"key_id": whole}, [f"revoked {whole}"])


@verb(trust_app, "list")
def trust_list(trust: TrustOption = None) -> Answer:
    """Show the trusted keys and their names."""
    found = Trust.load(trust)
    rows = [{**vars(key), "state": key.state, "comment": key.comment or None} for key in found.keys]
    columns = "key_id state names comment"
    table = _rows("trust", rows, columns, empty="no key is trusted yet")
    return Answer(found.model_dump(mode="json"), table.parts)
