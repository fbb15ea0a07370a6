"""The registry that teams share: artifacts by digest, a history for each name, on any store.

    names        names, references, and the place in front of a reference
    log          the history of one name: strict, chained entries; the only commit point
    content      files of artifacts and signatures, by digest
    opening      makes and opens a registry by its URL; the newest entries that a user saw
    trust        the keys that a user trusts, and the verdict on signatures
    resolving    from a reference to a digest: history, signatures
    pulling      from a digest to a loaded artifact; the cache and `--offline`
    publishing   push, promote, rollback
    verifying    recomputes chains, digests and signatures
    listing      rows and tables

docs/registry.md states the format and the protocol. torch is imported when an artifact is loaded.
"""

from specctl.registry.names import Reference, parse_name, parse_reference, split_reference
from specctl.registry.opening import Registry, init_registry, open_registry
from specctl.registry.publishing import Package, Writer, promote, push, read_package, rollback
from specctl.registry.pulling import Cache, Pulled, Reader, pull, pull_offline
from specctl.registry.resolving import resolve
from specctl.registry.verifying import verify

__all__ = [
    "Cache",
    "Package",
    "Pulled",
    "Reader",
    "Reference",
    "Registry",
    "Writer",
    "init_registry",
    "open_registry",
    "parse_name",
    "parse_reference",
    "promote",
    "pull",
    "pull_offline",
    "push",
    "read_package",
    "resolve",
    "rollback",
    "split_reference",
    "verify",
]
