"""`specctl registry copy` and `registry role`: for those who run a registry."""

from __future__ import annotations

from typing import Annotated

import typer

from specctl.cli.options import JsonOption
from specctl.cli.registry import RegistryOption, registry_app, show_rows


@registry_app.command("copy")
def copy(
    destination: Annotated[
        str, typer.Argument(help="Empty place, or an older copy; a URL as --registry takes it.")
    ],
    registry: RegistryOption,
    as_json: JsonOption = False,
) -> None:
    """Bring a place up to this registry: backup, mirror, move or restore."""
    from specctl import console
    from specctl.registry import copy_registry, open_registry

    with console.progress("bytes", None) as tick:
        copied = copy_registry(open_registry(registry), destination, on_bytes=tick)
    columns = "num_names num_entries num_artifacts num_collected num_pins"
    show_rows(destination, [vars(copied)], columns, as_json=as_json)


@registry_app.command("role")
def role(
    name: Annotated[str, typer.Argument(help="reader, publisher, promoter, gc or owner.")],
    registry: RegistryOption,
    names: Annotated[
        str | None,
        typer.Option(
            help="Names that a publisher or promoter may write to, * for any text; default: all."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the IAM policy of a role in a registry's bucket: JSON, with and without --json."""
    del as_json  # such a policy is JSON for people too
    from specctl import console
    from specctl.registry.asked import check_name_pattern
    from specctl.registry.roles import registry_role
    from specctl.stores.roles import iam_policy

    pattern = None if names is None else check_name_pattern(names)
    console.show_json(iam_policy(registry, registry_role(name, pattern)))
