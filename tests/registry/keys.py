"""Keys and trust records for tests."""

from __future__ import annotations

from typing import Any

from specctl.artifacts.signing import SigningKey
from specctl.registry.trust import Revocation, Role, Trust, TrustedKey, TrustRecord

NAME = "qwen3-8b+eagle3@h200:chat"
DIGEST, OTHER_DIGEST = "sha256:" + "a" * 64, "sha256:" + "b" * 64
LONG_AGO, THEN, NOW, LATER = (f"20{year}-01-01T00:00:00Z" for year in (20, 25, 26, 30))
REVOKED = Revocation(at=THEN, reason="lost laptop")


def trusted(
    key: SigningKey, *roles: Role, names: tuple[str, ...] = ("*",), **changes: Any
) -> TrustedKey:
    """A trust record's line for a key, by default that of a publisher of everything."""
    line = TrustedKey.of(
        key.public_key, names=names, roles=roles or ("publisher",), not_before=LONG_AGO
    )
    return line.model_copy(update=changes)


def trust(*keys: TrustedKey, **changes: Any) -> Trust:
    plain = TrustRecord(trust_version=1, keys=keys, require=(), threshold=1)
    return Trust(plain.model_copy(update=changes))
