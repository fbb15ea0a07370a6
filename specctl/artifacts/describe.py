"""An artifact in words: plain facts and a table of its decisions; rich only when rendered."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specctl.artifacts.card import domain_facts
from specctl.artifacts.manifest import Evidence, Metric
from specctl.plain_text import shown
from specctl.policy.parse import canonical_json, policy_digest
from specctl.policy.records import EntropyBins, PerRequest, Policy, Strict

if TYPE_CHECKING:
    from specctl.artifacts.load import Artifact

_WORD = re.compile(r"[^\s{}\[\],\"]+[,;]?")
_PROSE_WIDTH = 24
_MAX_JSON_CHARS = 400


@dataclass(frozen=True)
class Description:
    """Facts for a person.

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
    pair, written = manifest.pair, manifest.provenance
    verdict = "lossless" if policy.lossless else "LOSSY: may emit other text than the target"
    no_domain = (("domain", "unknown: nothing is recorded of where the evidence holds"),)
    parts = (("budget", policy.budget), ("acceptance", policy.acceptance))
    facts = (
        ("policy", f"{policy.name} ({verdict})"),
        *((name, _json(part)) for name, part in parts if not isinstance(part, PerRequest | Strict)),
        ("target", f"{pair.target}  {pair.target_digest}"),
        ("drafter", f"{pair.drafter}  {pair.drafter_digest}"),
        ("tokenizer", pair.tokenizer_digest),
        *_evidence_facts(manifest.evidence),
        *(no_domain if manifest.domain is None else domain_facts(manifest.domain)),
        ("features", ", ".join(manifest.features) or "none"),
        ("written", f"{written.created}, specctl {written.specctl_version}"),
        ("code", written.source_digest or "unknown"),
        ("commit", written.git_commit or "unknown"),
        ("libraries", written.lock_digest or "unknown"),
        ("parent", written.parent or "none"),
        ("policy digest", policy_digest(policy)),
        ("files", ", ".join(sorted(manifest.files))),
    )
    safe = tuple((label, shown(text, max_chars=4096)) for label, text in facts)
    return Description(f"artifact {artifact.digest}", safe, *_decisions(policy))


def _json(record: Any) -> str:
    text = canonical_json(record.model_dump(mode="json"))
    return text if len(text) <= _MAX_JSON_CHARS else f"{text[:_MAX_JSON_CHARS]} ..."


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


def _decisions(policy: Policy) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Columns and rows: one row a bin of HeteroSpec; of other shapes their record."""
    shape = policy.shape
    if not isinstance(shape, EntropyBins):
        return ("shape",), ((_json(shape),),)
    edges = [f"{edge:.4f}" for edge in shape.edges]
    plans = zip(["-", *edges], [*edges, "-"], shape.plan_depths, shape.plan_tokens, strict=True)
    columns = ("bin", "Φ from (nats)", "Φ to (nats)", "depth (levels)", "tokens (root counted)")
    return columns, tuple((str(i), *map(str, plan)) for i, plan in enumerate(plans))


def render(description: Description, width: int | None = None) -> Any:
    """A rich renderable: facts above, decisions below. Names are shown, never read as markup.

    Its `exact_width` is the least width, in columns, at which no digest, key id, reference or time
    is broken: only prose folds, between its words.

    Args:
        width: columns that there are; rows of a table that needs more are shown as lines instead.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for label, value in description.facts:
        facts.add_row(Text(label, "bold"), Text(value))
    parts: list[Any] = [Text(description.title, "bold", overflow="fold"), facts]
    labels = (len(label) for label, _ in description.facts)
    values = (description.title, *(value for _, value in description.facts))
    facts_width = max(labels, default=0) + 4 + _longest_word(values)

    columns = list(zip(description.columns, *description.rows, strict=True))
    table_width = 1 + sum(3 + _least_width(cells) for cells in columns)
    if width is not None and table_width > width:
        parts += _lines(description) if columns else []
        table_width = max(map(_longest_word, description.rows), default=0)
    elif columns:
        table = Table()
        for cells in columns:
            least = _least_width(cells)
            is_whole = least == max(map(len, cells))
            table.add_column(cells[0], overflow="fold", min_width=least, no_wrap=is_whole)
        for row in description.rows:
            table.add_row(*(Text(cell) for cell in row))
        parts.append(table)
    group: Any = Group(*parts)
    group.exact_width = max(facts_width, table_width)
    return group


def _lines(description: Description) -> Iterator[Any]:
    """Rows as lines of `column: value`, an empty line before each; `-` says nothing."""
    from rich.text import Text

    for row in description.rows:
        yield Text("")
        for column, value in zip(description.columns, row, strict=True):
            if value != "-":
                yield Text.assemble((f"{column}: ", "bold"), value)


def _longest_word(cells: tuple[str, ...]) -> int:
    """Characters of the longest word; long JSON is no word, and may be broken."""
    return max((len(word) for cell in cells for word in _WORD.findall(cell)), default=0)


def _least_width(cells: tuple[str, ...]) -> int:
    """Of a column: prose that folds keeps a width at which it can be read."""
    return max(_longest_word(cells), min(_PROSE_WIDTH, max(map(len, cells))))
