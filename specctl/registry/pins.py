"""Pins: artifacts that garbage collection must leave alone, each with an actor and a reason.

A pin is an object; its end is another object beside it. Neither is ever deleted, so that no right
to delete is needed, and the trail stays.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from specctl.artifacts.facts import Digest, Name, UtcTime
from specctl.artifacts.privacy import check_record
from specctl.artifacts.strict_json import parse_strict
from specctl.errors import ArtifactError, RegistryError
from specctl.policy.base import Record
from specctl.policy.parse import canonical_json, describe_violation
from specctl.registry.entries import broken, unfit
from specctl.registry.layout import (
    PINS,
    REGISTRY_VERSION,
    Nonce,
    is_pin_key,
    pin_folder,
)
from specctl.registry.room import Registry
from specctl.stores import KeyTakenError, create
from specctl.stores.creating import read

_PIN_BYTES = 4096
_RELEASED = ".released.json"


class Pin(Record):
    """A pin, or the end of one: who, when and why."""

    registry_version: Literal[1]
    registry_id: Nonce
    digest: Digest
    nonce: Nonce
    actor: Name
    created: UtcTime
    reason: Name


@dataclass(frozen=True)
class Pinned:
    """A pin that a listing shows, and whether it was released."""

    pin: Pin
    is_released: bool


def write_pin(registry: Registry, digest: str, *, actor: str, reason: str) -> Pin:
    """Pins a digest; its caller holds it (`garbage.hold`)."""
    pin = _pin(registry, digest, secrets.token_hex(16), actor, reason)
    create(registry.store, f"{pin_folder(digest)}/{pin.nonce}.json", _bytes(pin))
    return pin


def release_pins(registry: Registry, digest: str, *, actor: str, reason: str) -> int:
    """Ends all pins of a digest; returns how many there were.

    A listing may be stale: a pin whose end is there already counts as none.

    Raises:
        RegistryError: E_NOT_PINNED.
    """
    active = [one.pin for one in pins(registry, pin_folder(digest)) if not one.is_released]
    released = [_release(registry, pin, actor, reason) for pin in active]
    if not any(released):
        raise RegistryError(
            "E_NOT_PINNED",
            f"{registry.url}, {digest}",
            expected="a pinned artifact",
            found="no pin",
            fix="nothing is left to do",
        )
    return sum(released)


def _release(registry: Registry, pin: Pin, actor: str, reason: str) -> bool:
    """Writes the end of a pin; false where another has."""
    released = _pin(registry, pin.digest, pin.nonce, actor, reason)
    try:
        create(registry.store, f"{pin_folder(pin.digest)}/{pin.nonce}{_RELEASED}", _bytes(released))
    except KeyTakenError:
        return False
    return True


def pins(registry: Registry, prefix: str = PINS) -> Iterator[Pinned]:
    """Pins below a prefix, in the order of their keys.

    Raises:
        RegistryError: E_LOG for an object there that is no pin.
    """
    keys = {one.key for one in registry.store.objects(prefix)}
    for key in sorted(keys):
        if not is_pin_key(key):
            raise broken(f"{registry.store.url}, {key}", "a pin", "another object")
    for key in sorted(keys):
        if not key.endswith(_RELEASED):
            released = key.removesuffix(".json") + _RELEASED
            yield Pinned(_read(registry, key), released in keys)


def pinned_digests(registry: Registry) -> set[str]:
    """What is pinned now."""
    return {one.pin.digest for one in pins(registry) if not one.is_released}


def _pin(registry: Registry, digest: str, nonce: str, actor: str, reason: str) -> Pin:
    try:
        made = Pin(
            registry_version=REGISTRY_VERSION,
            registry_id=registry.marker.registry_id,
            digest=digest,
            nonce=nonce,
            actor=actor,
            created=registry.clock.utc(),
            reason=reason,
        )
    except ValidationError as error:
        raise unfit("pin", error) from None
    check_record("pin", made.model_dump(mode="json"))
    return made


def _bytes(pin: Pin) -> bytes:
    return canonical_json(pin.model_dump(mode="json")).encode()


def _read(registry: Registry, key: str) -> Pin:
    where = f"{registry.store.url}, {key}"
    data = read(registry.store, key, max_bytes=_PIN_BYTES)
    try:
        parse_strict(data)
        pin = Pin.model_validate_json(data)
    except ArtifactError as error:
        raise broken(where, error.expected, error.found) from None
    except ValidationError as error:
        raise broken(where, "a pin", describe_violation(error)) from None
    if key != f"{pin_folder(pin.digest)}/{pin.nonce}.json":
        raise broken(where, "a pin at its own place", pin.digest)
    return pin
