"""Where shared bytes live: folders and object stores behind one small interface.

    interface   what a store must be able to do, and its errors
    local       a folder: POSIX links are the exclusive creation, safe for many processes
    s3          S3 and compatible stores, by conditional put (obstore)
    creating    exclusive creation with retries and unknown outcomes resolved
    probing     refuses a store that ignores the condition
    opening     a store by its URL
    urls        the one form of that URL

All that is asked of a store is put-if-absent. Nothing here knows of registries or traces.
"""

from specctl.stores.creating import create, create_file, ensure, read
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
from specctl.stores.opening import open_store
from specctl.stores.probing import PROBE_KEY, probe
from specctl.stores.urls import canonical_store, check_no_secret, is_store_url

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
    "create_file",
    "ensure",
    "is_store_url",
    "open_store",
    "probe",
    "read",
]
