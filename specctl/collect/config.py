"""The options of `specctl collect`: names, defaults, bounds, help, and which exclude each other."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ConfigDict

from specctl.errors import UsageError
from specctl.records import PositiveInt, TypedModel, canonical_json, option

if TYPE_CHECKING:
    from specctl.policy import FullTree

LIVE_POLICY = "eagle2"
FINISHED = "finished prompts"
"""The unit in which collections show progress."""
TokenMode = Literal["keep", "drop"]
"""Token ids in a trace set: kept, or left out (docs/trace-format.md, "Token ids")."""


@dataclass(frozen=True)
class Shard:
    """One part of the prompts, chosen by id: shards of one count are disjoint."""

    index: int = 1  # 1-based
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Reads `2/4`, the second of four; `UsageError` for other text."""
        found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
        shard = None if found is None else cls(int(found[1]), int(found[2]))
        if shard is None or not 1 <= shard.index <= shard.count:
            raise UsageError(f"--shard must be I/N with 1 <= I <= N, not {text!r}")
        return shard

    def holds(self, prompt_id: str) -> bool:
        """Whether a prompt belongs to this shard."""
        number = int.from_bytes(hashlib.sha256(prompt_id.encode()).digest()[:8], "big")
        return number % self.count == self.index - 1


WHOLE = Shard()


class CollectConfig(TypedModel):
    """The options of `specctl collect` besides models, sampling and the form of the output."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dense: bool = option(
        False,
        "Draft a full tree at every position of every response, for fitting and replay, or decode "
        "with a policy and record its rounds",
        name="--dense/--live",
        group="common",
    )
    policy: str | None = option(
        None,
        "Live: static policy to decode with, e.g. eagle2:depth=6:top_k=8",
        default=LIVE_POLICY,
        group="common",
    )
    responses: Path | None = option(
        None,
        "Dense: JSON lines with each prompt's response, e.g. production logs",
        default="the target generates them",
        group="common",
    )
    depth: int | None = option(
        None, "Dense: levels drafted", default="11", group="common", ge=1, le=64
    )
    width: int | None = option(
        None,
        "Dense: likeliest nodes expanded per level, beside those of all smaller static trees",
        default="--children",
        ge=1,
        le=64,
    )
    nested: bool = option(
        True,
        "Dense: also expand what smaller static trees would, so that replaying them is exact",
    )
    dense_every: PositiveInt | None = option(
        None,
        "Live: log each N-th prompt densely too, into OUT-dense, whose trees --depth and "
        "--children size",
        default="none",
    )
    workload: str | None = option(
        None, "What the prompts are, e.g. chat; artifacts say it", default="unknown"
    )
    resume: bool = option(False, "Go on with a set of the same run", group="common")
    shard: str = option("1/1", "Take part I of N of the prompts, where N processes share one set")
    workers: PositiveInt | None = option(
        None,
        "Collect in N processes that share the set, one a GPU where there are GPUs (needs Ray)",
        default="this process alone",
    )
    ray: str | None = option(
        None,
        "Collect on a Ray cluster, 'auto' or HOST:PORT, with as many workers as it has room for, "
        "or --workers",
        default="none",
    )
    gpus_per_worker: float | None = option(
        None,
        "With --workers or --ray: GPUs of a worker, a part of one or a whole number over whose "
        "GPUs the target's layers are spread",
        default="1 where there are any",
        ge=0,
    )
    tokens: TokenMode = option("keep", "Token ids: keep, or drop")
    children: int | None = option(
        None, "Dense: children drafted per expanded node", default="10", group="common", ge=1, le=64
    )

    @property
    def is_spread(self) -> bool:
        """Whether Ray workers collect."""
        return self.workers is not None or self.ray is not None

    def check(self) -> None:
        """Checks that the options go together, before any file is read.

        Raises:
            UsageError: an option that another one excludes.
        """
        if not self.is_spread:
            _refuse("gpus_per_worker", self, "needs --workers or --ray")
        else:
            fix = "collect the sample by a command of its own, with --dense"
            _refuse("dense_every", self, "does not work with --workers and --ray", fix)
        if self.dense:
            _refuse("policy", self, "does not go with --dense, whose log serves every policy")
            _refuse("dense_every", self, "does not go with --dense, which logs all prompts")
            self.dense_shape()
            return
        _refuse("responses", self, "needs --dense")
        if self.dense_every is not None:
            self.dense_shape()
            return
        for name in ("depth", "width", "children"):
            _refuse(name, self, "needs --dense")

    def dense_shape(self) -> FullTree:
        """The trees of a dense collection; options that were left out are as in `FullTree`.

        Raises:
            UsageError: a number out of range.
        """
        from specctl.policy import FullTree, parse_policy

        given = {"depth": self.depth, "top_k": self.children, "width": self.width}
        fields = {name: value for name, value in given.items() if value is not None}
        record = {"kind": "full", "nested": self.nested, **fields}
        shape = parse_policy(canonical_json({"shape": record})).shape
        assert isinstance(shape, FullTree)
        return shape


def _refuse(name: str, config: CollectConfig, problem: str, fix: str = "") -> None:
    """Raises `UsageError` if an option is given."""
    if getattr(config, name) is not None:
        raise UsageError(f"--{name.replace('_', '-')} {problem}", hint=fix)
