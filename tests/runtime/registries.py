"""A registry of toy policies, good ones and bad ones, whose alias `prod` a test moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from specctl.artifacts import Origin, save_artifact
from specctl.artifacts.compatibility import Expectation
from specctl.artifacts.signing import SigningKey
from specctl.policy import Chain, Mars, Policy, StaticTree
from specctl.registry import (
    Cache,
    Reader,
    Reference,
    Writer,
    init_registry,
    open_registry,
    promote,
    push,
    read_package,
)
from specctl.registry.trust import Trust, TrustedKey
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.follow import AliasSource, Follower
from tests.artifacts.examples import EVIDENCE, PAIR, sha

NAME = "toy+head@cpu:toys"
EXPECT = Expectation(PAIR)
LARGE = Policy(shape=StaticTree(depth=4, top_k=3, num_tokens=12))
"""What loops begin with: the memory that it takes is what later policies have."""
GOOD = {
    "large": LARGE,
    "small": Policy(shape=StaticTree(depth=2, top_k=2, num_tokens=4)),
    "chain": Policy(shape=Chain(num_draft_tokens=3)),
}
BAD = ("too large", "lossy", "other pair")
ORIGIN = Origin(pair=PAIR, evidence=EVIDENCE)
ELSEWHERE = Origin(pair=PAIR.model_copy(update={"target_digest": sha("e")}), evidence=EVIDENCE)
VERSIONS = {
    **{word: (policy, ORIGIN) for word, policy in GOOD.items()},
    "too large": (Policy(shape=StaticTree(depth=8, top_k=8, num_tokens=60)), ORIGIN),
    "lossy": (Policy(shape=Chain(), acceptance=Mars()), ORIGIN),
    "other pair": (GOOD["small"], ELSEWHERE),
}


def version(folder: Path, policy: Policy, origin: Origin = ORIGIN) -> Path:
    """An artifact's folder."""
    save_artifact(folder, policy, origin, card="# toy\n")
    return folder


@dataclass
class Shared:
    """The registry, who writes to it, and one of its readers.

    Attributes:
        digests: of the versions, by their words.
    """

    place: Path
    writer: Writer
    reader: Reader
    digests: dict[str, str] = field(default_factory=dict)

    def publish(self, work: Path, *words: str) -> None:
        for word in words:
            package = read_package(version(work / word, *VERSIONS[word]))
            push(self.writer, package, NAME)
            self.digests[word] = package.digest

    def move(self, word: str) -> None:
        promote(self.writer, NAME, "prod", self.digests[word])

    def source(self) -> AliasSource:
        return AliasSource(open_registry(self.place), Reference(NAME, "prod"), self.reader, EXPECT)

    def follower(self, loop: DecodeLoop) -> Follower:
        return Follower(self.source(), loop)


def open_shared(work: Path, key: SigningKey | None = None) -> Shared:
    """A new registry without versions; with a key, one whose reader requires its signatures."""
    trust = Trust() if key is None else trusting(key)
    place = work / "registry"
    writer = Writer(init_registry(place), trust, "test", key)
    return Shared(place, writer, Reader(trust, Cache(work / "cache")))


def trusting(key: SigningKey) -> Trust:
    """One that trusts a key for all names, which it must have signed."""
    return Trust(keys=(TrustedKey.of(key.public_key, names=("*",)),))
