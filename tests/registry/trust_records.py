"""Trust records of a registry and of nobody."""

from __future__ import annotations

import json

from specctl.artifacts.signing import SigningKey, TrustRecord
from specctl.artifacts.signing.records import Revocation
from specctl.registry import Author, Note
from specctl.registry.revising import write_settings
from tests.registry.worlds import HandClock, registry_on
from tests.stores.memory import MemoryStore


def settle(
    store: MemoryStore,
    record: TrustRecord,
    *keys: SigningKey,
    clock: HandClock | None = None,
    expires: str | None = None,
) -> None:
    data = json.dumps(record.model_dump(mode="json")).encode()
    registry, note = registry_on(store, clock), Note("set up", expires)
    newest = registry.settings_log().state.newest
    expect = None if newest is None else newest.entry.generation
    write_settings(registry, data, Author("root", keys), note=note, expect=expect)


def revoked(record: TrustRecord) -> TrustRecord:
    key = record.keys[0].model_copy(
        update={"revoked": Revocation(at="2026-01-01T00:00:00Z", reason="stolen")}
    )
    return record.model_copy(update={"keys": (key,)})


NOBODY = TrustRecord(trust_version=1, keys=(), require=(), threshold=1)
