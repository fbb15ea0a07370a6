"""An artifact in words: plain facts and a table of what it decides; rich only when rendered."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specctl.artifacts.card import domain_facts
from specctl.artifacts.facts import Domain, Evidence, Metric, Provenance
from specctl.plain_text import shown
from specctl.policy.parse import canonical_json, policy_digest
from specctl.policy.records import EntropyBins, PerRequest, Policy, Strict

if TYPE_CHECKING:
    from specctl.artifacts.codec import Artifact

_WORD = re.compile(r"[^\s{}\[\],\"]+[,;]?")
_PROSE_WIDTH = 24


@dataclass(frozen=True)
class Description:
    """What a person wants to know.

    Attributes:
        facts: label and value, most important first.
        columns, rows: a table of decisions; both empty where there is none to show.
    """

    title: str
    facts: tuple[tuple[str, str], ...]
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def describe_artifact(artifact: Artifact) -> Description:
    """Describes an artifact that was loaded."""
    manifest, policy = artifact.manifest, artifact.policy
    verdict = "lossless" if policy.lossless else "LOSSY: may emit other text than the target"
    facts = (
        ("policy", f"{policy.name} ({verdict})"),
        *_part_facts(policy),
        ("target", f"{manifest.pair.target}  {manifest.pair.target_digest}"),
        ("drafter", f"{manifest.pair.drafter}  {manifest.pair.drafter_digest}"),
        ("tokenizer", manifest.pair.tokenizer_digest),
        *_evidence_facts(manifest.evidence),
        *_domain_facts(manifest.domain),
        ("features", ", ".join(manifest.features) or "none"),
        (
            "written",
            f"{manifest.provenance.created}, specctl {manifest.provenance.specctl_version}",
        ),
        *_code_facts(manifest.provenance),
        ("parent", manifest.provenance.parent or "none"),
        ("policy digest", policy_digest(policy)),
        ("files", ", ".join(sorted(manifest.files))),
    )
    safe = tuple((label, shown(text, max_chars=4096)) for label, text in facts)
    return Description(f"artifact {artifact.digest}", safe, *_decisions(policy))


def _part_facts(policy: Policy) -> tuple[tuple[str, str], ...]:
    """Budget and acceptance, where they are not the default; the shape has a table."""
    parts = (("budget", policy.budget), ("acceptance", policy.acceptance))
    return tuple(
        (name, _shortened(canonical_json(record.model_dump(mode="json"))))
        for name, record in parts
        if not isinstance(record, PerRequest | Strict)
    )


def _shortened(text: str) -> str:
    return text if len(text) <= 400 else f"{text[:400]} ..."


def _evidence_facts(evidence: Evidence | None) -> tuple[tuple[str, str], ...]:
    if evidence is None:
        return (("evidence", "none: set by hand"),)
    splits = ", ".join(
        f"{name} {size.num_prompts} prompts / {size.num_rounds} rounds"
        for name, size in evidence.splits.items()
    )
    metrics = ", ".join(f"{name} {_metric(found)}" for name, found in evidence.metrics.items())
    return (
        ("evidence", f"{evidence.num_prompts} prompts, {evidence.num_rounds} rounds ({splits})"),
        ("metrics", metrics or "none"),
        ("traces", evidence.trace_digest),
    )


def _metric(found: Metric) -> str:
    """`1.2 [1.1, 1.3]`, `1.2` where no interval was computed, or `undefined`."""
    if found.value is None:
        return "undefined"
    interval = "" if found.low is None else f" [{found.low:.4g}, {found.high:.4g}]"
    return f"{found.value:.4g}{interval}"


def _domain_facts(domain: Domain | None) -> tuple[tuple[str, str], ...]:
    if domain is None:
        return (("domain", "unknown: nothing is recorded of where the evidence holds"),)
    return domain_facts(domain)


def _code_facts(provenance: Provenance) -> tuple[tuple[str, str], ...]:
    return (
        ("code", provenance.source_digest or "unknown"),
        ("commit", provenance.git_commit or "unknown"),
        ("libraries", provenance.lock_digest or "unknown"),
    )


def _decisions(policy: Policy) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    if not isinstance(policy.shape, EntropyBins):
        shape = canonical_json(policy.shape.model_dump(mode="json"))
        return ("shape",), ((_shortened(shape),),)
    columns = ("bin", "Φ from (nats)", "Φ to (nats)", "depth (levels)", "tokens (root counted)")
    return columns, bin_rows(policy.shape)


def bin_rows(shape: EntropyBins) -> tuple[tuple[str, ...], ...]:
    """One row a bin: number, Φ above, Φ up to and with, drafted levels, submitted nodes."""
    lows = ("-", *(f"{edge:.4f}" for edge in shape.edges))
    highs = (*(f"{edge:.4f}" for edge in shape.edges), "-")
    plans = zip(lows, highs, shape.plan_depths, shape.plan_tokens, strict=True)
    return tuple(
        (str(index), low, high, str(depth), str(tokens))
        for index, (low, high, depth, tokens) in enumerate(plans)
    )


def render(description: Description, width: int | None = None) -> Any:
    """A rich renderable: facts above, decisions below. Names are shown, never read as markup.

    Its `exact_width` is the least width, in columns, at which no digest, key id, reference or time
    is broken: only prose folds, between its words.

    Args:
        width: columns that there are; rows of a table that needs more are shown as lines instead.
    """
    from rich.console import Group
    from rich.text import Text

    facts_width, table_width = _facts_width(description), _table_width(description)
    is_narrow = width is not None and table_width > width
    parts: list[Any] = [Text(description.title, "bold", overflow="fold"), _facts(description)]
    if description.columns:
        parts += _lines(description) if is_narrow else [_table(description)]
    group: Any = Group(*parts)
    if is_narrow:
        table_width = max(map(_longest_word, description.rows), default=0)
    group.exact_width = max(facts_width, table_width)
    return group


def _facts(description: Description) -> Any:
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for label, value in description.facts:
        facts.add_row(Text(label, "bold"), Text(value))
    return facts


def _lines(description: Description) -> Iterator[Any]:
    """Rows as lines of `column: value`, an empty line before each; `-` says nothing."""
    from rich.text import Text

    for row in description.rows:
        yield Text("")
        for column, value in zip(description.columns, row, strict=True):
            if value != "-":
                yield Text.assemble((f"{column}: ", "bold"), value)


def _table(description: Description) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for name, cells in zip(description.columns, _cells(description), strict=True):
        least = _least_width(cells)
        is_whole = least == max(map(len, cells))
        table.add_column(name, overflow="fold", min_width=least, no_wrap=is_whole)
    for row in description.rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _cells(description: Description) -> list[tuple[str, ...]]:
    """By column, the headers first."""
    rows = [description.columns, *description.rows]
    return [tuple(column) for column in zip(*rows, strict=True)]


def _longest_word(cells: tuple[str, ...]) -> int:
    """Characters of the longest word; long JSON is no word, and may be broken."""
    return max((len(word) for cell in cells for word in _WORD.findall(cell)), default=0)


def _least_width(cells: tuple[str, ...]) -> int:
    """Of a column: prose that folds keeps a width at which it can be read."""
    return max(_longest_word(cells), min(_PROSE_WIDTH, max(map(len, cells))))


def _facts_width(description: Description) -> int:
    labels = (len(label) for label, _ in description.facts)
    values = tuple(value for _, value in description.facts)
    return max(labels, default=0) + 2 + _longest_word((*values, description.title)) + 2


def _table_width(description: Description) -> int:
    widths = [_least_width(cells) for cells in _cells(description)]
    return sum(widths) + 3 * len(widths) + 1
