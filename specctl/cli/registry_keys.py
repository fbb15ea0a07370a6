"""`specctl registry keygen|sign|verify-signature|trust`: keys, and whom to believe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specctl.cli.interrupts import reads_only
from specctl.cli.options import JsonOption
from specctl.cli.registry import ExpiresOption, TrustOption, registry_app

trust_app = typer.Typer(no_args_is_help=True, help="Decide which keys this user believes.")
registry_app.add_typer(trust_app, name="trust")

FolderArgument = Annotated[Path, typer.Argument(help="Folder of an artifact.")]
KeyIdArgument = Annotated[str, typer.Argument(help="Key id, ed25519:HEX, of `trust list`.")]


@registry_app.command()
def keygen(
    out: Annotated[Path, typer.Argument(help="New file for the private key; OUT.pub beside it.")],
    as_json: JsonOption = False,
) -> None:
    """Make a key pair; SPECCTL_KEY_PASSPHRASE, where it is set, encrypts the private key."""
    from specctl.artifacts.signing import SigningKey
    from specctl.artifacts.signing.key_files import check_absent

    public = out.with_name(f"{out.name}.pub")
    check_absent(out, public)
    key = SigningKey.generate()
    key.save(out)
    key.save_public(public)
    made = {"key_id": key.key_id, "private": str(out), "public": str(public)}
    _tell(made, f"wrote {out}, {public}\n{key.key_id}", as_json)


@registry_app.command()
def sign(
    folder: FolderArgument,
    key: Annotated[Path, typer.Option(help="Private key (PEM), of `registry keygen`.")],
    name: Annotated[str, typer.Option(help="Name that it is signed for.")],
    expires: ExpiresOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sign an artifact's folder: signature.dsse.json in it vouches for the manifest and a name."""
    from specctl.artifacts.signing import SigningKey
    from specctl.artifacts.signing.folder import sign_folder
    from specctl.artifacts.signing.options import check_time
    from specctl.registry.names import parse_name

    signed, until = parse_name(name), check_time(expires, "--expires")
    digest = sign_folder(folder, SigningKey.load(key), signed, expires=until)
    _tell({"digest": digest}, f"signed {digest}", as_json)


@registry_app.command("verify-signature")
def verify_signature(
    folder: FolderArgument,
    name: Annotated[str, typer.Option(help="Name that it must be signed for.")],
    trust: TrustOption = None,
    as_json: JsonOption = False,
) -> None:
    """Verify who signed an artifact's folder; what nobody believed signed is refused."""
    from specctl.artifacts.signing import Trust
    from specctl.artifacts.signing.folder import verify_folder
    from specctl.registry.names import parse_name

    digest, verified = verify_folder(folder, Trust.load(trust), parse_name(name))
    found = {"digest": digest, "key_ids": list(verified.key_ids)}
    _tell(found, f"verified {digest}\n" + "\n".join(verified.key_ids), as_json)


@trust_app.command("add")
def trust_add(
    public_key: Annotated[Path, typer.Argument(help="Public key (PEM): OUT.pub of keygen.")],
    names: Annotated[
        list[str],
        typer.Option("--name", help="Names that it may sign for, * for any text; repeatable."),
    ],
    roles: Annotated[
        list[str], typer.Option("--role", help="publisher, promoter or root; repeatable.")
    ],
    not_before: Annotated[
        str | None,
        typer.Option(help="UTC time; what it signed earlier is not believed. Default: all of it."),
    ] = None,
    not_after: Annotated[
        str | None,
        typer.Option(
            help="UTC time after which it may not sign, e.g. 2027-01-31T12:00:00Z; default: never."
        ),
    ] = None,
    comment: Annotated[str, typer.Option(help="Whose it is; default: nothing.")] = "",
    registries: Annotated[
        list[str] | None,
        typer.Option(
            "--registry", help="Registry that a root is one for; repeatable; default: every one."
        ),
    ] = None,
    trust: TrustOption = None,
    as_json: JsonOption = False,
) -> None:
    """Believe a key, for names and roles; a key that is there gets these in place of its own."""
    from specctl.artifacts.signing.keys import load_public
    from specctl.artifacts.signing.options import trusted_key
    from specctl.artifacts.signing.trust_file import edit_trust
    from specctl.registry.urls import registry_url

    key = trusted_key(
        load_public(public_key),
        names=names,
        roles=roles,
        not_before=not_before,
        not_after=not_after,
        comment=comment,
        registries=[registry_url(place) for place in registries or ()],
    )
    with edit_trust(trust) as edit:
        edit.add(key)
    for place in registries or ():
        _warn_unless_registry(place)
    _tell({"key_id": key.key_id}, f"trusted {key.key_id}", as_json)


def _warn_unless_registry(place: str) -> None:
    """A mistyped place would make a key the root of nothing, and its user feel protected."""
    from specctl import console
    from specctl.errors import RegistryError, StoreError
    from specctl.registry import open_registry

    try:
        open_registry(place)
    except (RegistryError, StoreError) as error:
        console.warn(f"the key is a root for {place}, which cannot be opened now: {error}")


@trust_app.command("revoke")
def trust_revoke(
    key_id: KeyIdArgument,
    reason: Annotated[str, typer.Option(help="Why, for those who meet it.")],
    trust: TrustOption = None,
    as_json: JsonOption = False,
) -> None:
    """Never believe a key again, whatever it signed and whenever."""
    from specctl.artifacts.signing.trust_file import edit_trust

    with edit_trust(trust) as edit:
        edit.revoke(key_id, reason)
    _tell({"key_id": key_id}, f"revoked {key_id}", as_json)


@trust_app.command("remove")
def trust_remove(
    key_id: KeyIdArgument, trust: TrustOption = None, as_json: JsonOption = False
) -> None:
    """Forget a key; one that may be in wrong hands is to be revoked instead."""
    from specctl.artifacts.signing.trust_file import edit_trust

    with edit_trust(trust) as edit:
        edit.remove(key_id)
    _tell({"key_id": key_id}, f"removed {key_id}", as_json)


@trust_app.command("require")
def trust_require(
    glob: Annotated[str, typer.Argument(help="Names, * for any text, e.g. 'qwen3-*'.")],
    num_keys: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=16,
            help="Believed keys that must have signed, of all names; default: as it was, 1 at "
            "first.",
        ),
    ] = None,
    trust: TrustOption = None,
    as_json: JsonOption = False,
) -> None:
    """Accept nothing unsigned under these names from now on."""
    from specctl.artifacts.signing.trust_file import edit_trust

    with edit_trust(trust) as edit:
        edit.require(glob)
        if num_keys is not None:
            edit.record = edit.record.model_copy(update={"threshold": num_keys})
        threshold = edit.record.threshold
    enough = "a believed key" if threshold == 1 else f"{threshold} believed keys"
    line = f"signatures of {enough} are required for {glob}"
    _tell({"require": glob, "threshold": threshold}, line, as_json)


@trust_app.command("list")
@reads_only
def trust_list(trust: TrustOption = None, as_json: JsonOption = False) -> None:
    """Show which keys are believed, for what, and which names must be signed."""
    from dataclasses import replace

    from specctl import console
    from specctl.artifacts.describe import render
    from specctl.artifacts.signing.options import describe_trust
    from specctl.artifacts.signing.trust_file import read_trust

    record = read_trust(trust)
    if as_json:
        console.show_json(record.model_dump(mode="json"))
    elif record.keys:
        console.show(render(describe_trust(record), console.terminal_width()))
    else:
        console.show(render(replace(describe_trust(record), columns=(), rows=())))
        console.show_lines(["no key is believed yet"], as_json=False)


def _tell(found: dict[str, Any], line: str, as_json: bool) -> None:  # noqa: FBT001
    """The outcome, for a program or for a person."""
    from specctl import console

    if as_json:
        console.show_json(found)
    else:
        console.show(line)
