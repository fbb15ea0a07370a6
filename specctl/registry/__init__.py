"""The registry that teams share: artifacts by digest, histories by name, on any store.

    names        the grammar of names and references, and the key of each
    layout       where things lie
    entries      one generation of a history: strict, chained, signed or not
    state        what a history adds up to
    log          reading and appending, the only commit point
    content      where bytes live: an interface; store_content and oci implement it
    room         a registry: content, logs and the marker
    urls         the one form of a registry's URL, and references behind it
    opening      registries by URL
    trusting     whether readers take an entry: signed in time where that is asked for
    settling     the settings, for each user and name
    revising     settings anew
    floors       how far a user has seen each log
    cache        what a user pulled
    recalling    whether what was pulled would still be believed
    resolving    from a reference to a digest
    pulling      from a digest to a loaded artifact
    transfers    the same by the words that a user typed
    packages     what is published
    writing      who writes, and what stands before every commit
    publishing   push, pin
    moving       promote, rollback
    holding      the right to make digests reachable
    garbage      mark and sweep, and why they never take what is used
    collecting   one turn of that, as its user asks for it
    pins         what garbage collection leaves alone
    fsck         recomputes everything, changes nothing
    copying      backup, mirror, restore
    roles        what a bucket's account may do
    asked        words and units of users, checked
    rehearsing   what is about to be written, made and checked once before the first write
    unlike       whether a name says what a manifest says
    views        rows and tables
    verdicts     what a check found and what it went over

docs/registry.md states the format and the protocol.
"""

from typing import TYPE_CHECKING

from specctl.lazy import lazy_exports

if TYPE_CHECKING:
    from specctl.registry.cache import Cache
    from specctl.registry.content import Content
    from specctl.registry.copying import Copied, copy_registry
    from specctl.registry.entries import Author, Note
    from specctl.registry.floors import Floors
    from specctl.registry.moving import promote, rollback
    from specctl.registry.names import Reference, parse_name, parse_reference
    from specctl.registry.opening import init_registry, open_registry
    from specctl.registry.packages import Package, read_package
    from specctl.registry.publishing import pin, push
    from specctl.registry.pulling import Pulled, Reader, pull, pull_offline
    from specctl.registry.resolving import resolve
    from specctl.registry.room import Registry
    from specctl.registry.store_content import StoreContent
    from specctl.registry.urls import split_reference
    from specctl.registry.writing import Writer

__all__ = [
    "Author",
    "Cache",
    "Content",
    "Copied",
    "Floors",
    "Note",
    "Package",
    "Pulled",
    "Reader",
    "Reference",
    "Registry",
    "StoreContent",
    "Writer",
    "copy_registry",
    "init_registry",
    "open_registry",
    "parse_name",
    "parse_reference",
    "pin",
    "promote",
    "pull",
    "pull_offline",
    "push",
    "read_package",
    "resolve",
    "rollback",
    "split_reference",
]
__getattr__ = lazy_exports(
    __name__,
    {
        "Author": "entries",
        "Cache": "cache",
        "Content": "content",
        "Copied": "copying",
        "Floors": "floors",
        "Note": "entries",
        "Package": "packages",
        "Pulled": "pulling",
        "Reader": "pulling",
        "Reference": "names",
        "Registry": "room",
        "StoreContent": "store_content",
        "Writer": "writing",
        "copy_registry": "copying",
        "init_registry": "opening",
        "open_registry": "opening",
        "parse_name": "names",
        "parse_reference": "names",
        "pin": "publishing",
        "promote": "moving",
        "pull": "pulling",
        "pull_offline": "pulling",
        "push": "publishing",
        "read_package": "packages",
        "resolve": "resolving",
        "rollback": "moving",
        "split_reference": "urls",
    },
)
