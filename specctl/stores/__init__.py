"""Shared storage: folders and S3 buckets behind one small interface.

    interface   the interface, its errors, and the grammar of keys
    creating    exclusive creation with retries that resolve unknown outcomes; the probe of a store
    local       a folder; exclusive creation by POSIX links, safe for many processes
    s3          S3 and compatible stores; exclusive creation by conditional put (obstore)
    places      a store by its folder or URL

A store must offer put-if-absent. Objects are never overwritten or deleted.
"""

from specctl.stores.creating import PROBE_KEY, create, ensure, probe, read
from specctl.stores.interface import (
    KeyAbsentError,
    KeyTakenError,
    ObjectStore,
    ObjectTooLargeError,
    StoredObject,
    TransientError,
    UnknownOutcomeError,
    UnreadableError,
)
from specctl.stores.local import TEMPORARY, LocalStore
from specctl.stores.places import canonical_store, check_no_secret, is_store_url, open_store

__all__ = [
    "PROBE_KEY",
    "TEMPORARY",
    "KeyAbsentError",
    "KeyTakenError",
    "LocalStore",
    "ObjectStore",
    "ObjectTooLargeError",
    "StoredObject",
    "TransientError",
    "UnknownOutcomeError",
    "UnreadableError",
    "canonical_store",
    "check_no_secret",
    "create",
    "ensure",
    "is_store_url",
    "open_store",
    "probe",
    "read",
]
