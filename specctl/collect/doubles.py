"""Keys of rounds that two commits of a set hold: each file is sound, and the set is not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.collect.chains import Damage
from specctl.collect.commits import Commit
from specctl.collect.keys import scan_files
from specctl.collect.row_laws import ROUND_KEY
from specctl.parquet import collected

if TYPE_CHECKING:
    import polars as pl


class RoundKeys:
    """Keys of the rounds of some commits, taken while their files are at hand.

    Args:
        commits: those whose keys must differ; others are passed over.
    """

    def __init__(self, commits: Iterable[Commit]) -> None:
        self._digests = {commit.digest for commit in commits}
        self._frames: list[pl.DataFrame] = []

    def take(self, commit: Commit, rounds: Path) -> None:
        """The keys of a commit, out of a file that can be read."""
        import polars as pl

        if commit.digest in self._digests:
            columns = (pl.col(name) for name in (*ROUND_KEY, "prompt_id"))
            owner = pl.lit(commit.key).cast(pl.Categorical).alias("commit")
            keys = scan_files("rounds", [rounds]).select(*columns, owner)
            self._frames.append(collected(keys, str(rounds)))

    def damages(self, repeats: Collection[str]) -> Iterator[Damage]:
        """One for all keys that the same commits hold.

        Args:
            repeats: prompts that stand in several commits, whose keys do so too.
        """
        import polars as pl

        if not self._frames:
            return
        rows = pl.concat(self._frames).with_columns(pl.col(pl.Categorical).cast(pl.String))
        doubled = (
            rows.filter(~pl.col("prompt_id").is_in(list(repeats)))
            .group_by(ROUND_KEY)
            .agg(pl.col("commit").unique().sort().str.join(" and "), pl.len())
            .filter(pl.col("len") > 1)
            .sort(ROUND_KEY)
            .unique("commit", keep="first", maintain_order=True)
        )
        for request, commits in doubled.select("request_id", "commit").iter_rows():
            yield Damage(f"request {request!r}", f"rounds of request {request!r} in {commits}")
