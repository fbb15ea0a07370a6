"""Why a signature does not count, and what mends that, by who has to sign."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specctl.artifacts.signing.dsse import bad_signature
from specctl.artifacts.signing.records import Role
from specctl.errors import ArtifactError

Cure = Literal["sign", "trust", "fetch"]
_SIGN: dict[Role, str] = {
    "publisher": "sign it with --key of a publisher key: specctl registry push, or registry sign "
    "for a folder alone",
    "promoter": "sign it with --key of a promoter key: specctl registry promote or rollback",
    "root": "whoever holds the root key signs them: specctl registry settings FILE --key ROOT",
}
_RENEW: dict[Role, str] = {
    "publisher": "push it anew: specctl registry push FOLDER NAME --expires TIME (a folder alone: "
    "registry sign)",
    "promoter": "promote it anew: specctl registry promote NAME ALIAS VERSION --expires TIME",
    "root": "whoever holds the root key sets them anew: specctl registry settings FILE --key ROOT",
}
_MORE: dict[Role, str] = {
    "publisher": "let another publisher sign it too, or sign it first: specctl registry sign",
    "promoter": "give --key once for each promoter key that must sign: specctl registry promote",
    "root": "give --key once for each root that must sign: specctl registry settings FILE",
}
_OTHERS: dict[Cure, str] = {
    "trust": "believe that key, or the root key behind the registry's settings, if you know whose "
    "it is: specctl registry trust add",
    "fetch": "fetch it again: these are not the bytes that were signed",
}


@dataclass(frozen=True)
class Doubt:
    """Why one signature does not count, and what would mend that."""

    why: str
    cures: tuple[Cure, ...] = ("sign",)


UNSIGNED = Doubt("no signature")
STRANGER = Doubt("is not trusted", ("sign", "trust"))
FORGED = Doubt("did not sign these bytes", ("fetch",))


def unbelieved(name: str, role: Role, doubts: Sequence[Doubt]) -> ArtifactError:
    """E_SIG: nothing that a believed key signed for the name in the role."""
    return bad_signature(
        f"a signature for {name} of a {role} key that is trusted for it",
        "; ".join(doubt.why for doubt in doubts or [UNSIGNED]),
        _fix(role, [cure for doubt in doubts or [UNSIGNED] for cure in doubt.cures]),
    )


def _fix(role: Role, cures: Sequence[Cure]) -> str:
    known: dict[Cure, str] = {**_OTHERS, "sign": _SIGN[role]}
    return "; or ".join(text for cure, text in known.items() if cure in cures)


def too_few(role: Role, wanted: int, found: int) -> ArtifactError:
    """E_SIG: what fewer keys signed than must."""
    return bad_signature(f"{wanted} believed keys", str(found), _MORE[role])


def renewal(role: Role) -> str:
    """How what expired is made anew, by who has to sign it."""
    return _RENEW[role]


def stale(role: Role, expires: str, now: str) -> ArtifactError:
    """E_STALE: what was signed does not hold any more."""
    return ArtifactError(
        "E_STALE",
        "signed statement",
        expected=f"one that still holds at {now}",
        found=f"one that expired {expires}",
        fix=renewal(role),
    )
