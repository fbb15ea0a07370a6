"""Figures and tables as text, for terminals, cards and pages."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

NOTHING = "-"
"""Placeholder of an undefined figure."""
PROSE_WIDTH = 24
"""Narrowest readable column of folded prose, characters."""


def number(value: Any, spec: str = ".2f") -> str:
    """A figure or an interval in a format; a dash if it is undefined."""
    if hasattr(value, "text"):
        return str(value.text(spec))
    is_unknown = value is None or (isinstance(value, float) and not math.isfinite(value))
    return NOTHING if is_unknown else format(value, spec)


def count(value: int, noun: str) -> str:
    """`1 prompt`, `2,000 prompts`."""
    return f"{value:,} {noun}" if value == 1 else f"{value:,} {noun}s"


def part(some: int, whole: int, noun: str) -> str:
    """`240 prompts`, or `25 of 240 prompts`."""
    return f"{some:,} of " * (some < whole) + count(whole, noun)


def listed(names: Iterable[str]) -> str:
    """`a, b and c`."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def sampling(settings: dict[str, Any]) -> str:
    """`greedy`, or the temperature."""
    temperature = settings["temperature"]
    return f"temperature {temperature}" if temperature else "greedy"


def pair_title(target: str, drafter: str) -> str:
    """Target and drafter above figures, with a note on the embedded pair."""
    note = " (a fixture: no claim about large models)" if is_fixture(target) else ""
    return f"{target} + {drafter}{note}"


def is_fixture(model: str) -> bool:
    """Whether figures of a model are no claim about large ones."""
    return model.startswith("embedded")


def rounded(label: str) -> str:
    """A policy's label with three digits of each long number, for reading alone."""
    return re.sub(r"\d+\.\d{4,}", lambda found: f"{float(found[0]):.3g}", label)


def short_id(digest: str) -> str:
    """The first twelve digits of `sha256:<hex>`, for a line that tells digests apart."""
    return digest[: len("sha256:") + 12]


class Detail(str):
    """A sentence that a terminal shows only with `--wide`."""


@dataclass(frozen=True)
class Table:
    """Cells as text; the first of a row is its name.

    Attributes:
        legend: explains short heads.
        left: number of columns of names and prose, which may fold; figures never do.
        wide: heads of columns that a terminal shows only with `--wide`.
        is_detail: a terminal shows the table only with `--wide`.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    legend: str = ""
    left: int = 1
    wide: Collection[str] = ()
    is_detail: bool = False

    def narrow(self) -> Table:
        """The table without its `wide` columns."""
        kept = [place for place, name in enumerate(self.columns) if name not in self.wide]
        columns, *rows = ([row[place] for place in kept] for row in (self.columns, *self.rows))
        return replace(self, columns=columns, rows=rows, left=sum(k < self.left for k in kept))

    def fitted(self, width: int) -> Any:
        """A rich renderable: names fold between settings, prose between words.

        If the columns need more than `width`, each row becomes a block of `column: value`.
        """
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        cells = [list(map(str, column)) for column in zip(self.columns, *self.rows, strict=True)]
        whole = [max(map(len, column)) for column in cells]
        prose = PROSE_WIDTH if self.left > 1 else 1
        least = [
            min(own, max(prose, *map(_longest, column))) if place < self.left else own
            for place, (own, column) in enumerate(zip(whole, cells, strict=True))
        ]
        spare = width - sum(least) - _GAP * (len(least) - 1)
        if spare < 0:
            heads = [f"{name}: " if name else "" for name in self.columns]
            blocks = [
                Text("\n").join(
                    Text.assemble((head, "bold"), cell)
                    for head, cell in zip(heads, row, strict=True)
                    if cell != NOTHING
                )
                for row in self.rows
            ]
            return Text("\n\n").join(blocks)
        table = RichTable(
            box=SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, _GAP - 1, 0, 0),  # and a blank between columns
            show_header=any(self.columns),
        )
        for place, name in enumerate(self.columns):
            more = min(spare, whole[place] - least[place])
            spare, least[place] = spare - more, least[place] + more
            justify: Any = "left" if place < self.left else "right"
            table.add_column(Text(name), justify=justify, width=least[place], no_wrap=True)
        for row in self.rows:
            table.add_row(*(Text(_folded(c, w)) for c, w in zip(row, least, strict=True)))
        return table

    @classmethod
    def of(
        cls,
        title: str,
        records: Iterable[Any],
        columns: Mapping[str, str],
        legend: str = "",
        wide: Collection[str] = (),
    ) -> Table:
        """A table of records, one per row.

        Args:
            columns: by head, the path of an attribute and the format of `number`, e.g.
                `"train.mean_loss:.2f"`.
        """
        parts = [field.partition(":") for field in columns.values()]
        found = [[number(attrgetter(p)(one), spec) for p, _, spec in parts] for one in records]
        return cls(title, tuple(columns), found, legend, wide=wide)


# --------------------------------------------------------------------------- on a terminal

_PIECE = re.compile(r"[^\n]+?(?:\s+|(?<=[,;\]}])(?=\S)|:(?=[a-z_]+=)|\n|$)")
"""Text that is never broken: a word, a setting of a policy, an entry of a list."""
_GAP = 2


def _longest(text: str) -> int:
    return max((len(piece.rstrip()) for piece in _PIECE.findall(text)), default=0)


def _folded(text: str, width: int) -> str:
    """Lines of at most `width`; line feeds in the text are kept if it does not fit in one line."""
    if len(text) <= width:
        return text.replace("\n", " ")
    lines: list[str] = []
    for part in text.split("\n"):
        lines.append("")
        for piece in _PIECE.findall(part):
            if lines[-1] and len((lines[-1] + piece).rstrip()) > width:
                lines.append("")
            lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)
