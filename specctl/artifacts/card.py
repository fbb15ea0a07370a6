"""Text about an artifact: what the cards (`README.md`) of all artifacts share, in Markdown, and a
description for a terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specctl.artifacts.manifest import Domain, Evidence, Metric, PairFingerprint
from specctl.errors import shown
from specctl.policy import EntropyBins, Policy, policy_digest, policy_json
from specctl.records import canonical_json

if TYPE_CHECKING:
    from specctl.artifacts.load import Artifact

FIXTURE_LINE = (
    "- If the pair is specctl's embedded one, these figures are a fixture for people and tests; "
    "they\n  say nothing about large models."
)
_MAX_CELL_CHARS = 60


def cell(text: str) -> str:
    """Text that may stand in a Markdown table."""
    return text.replace("|", "\\|")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; cells are not escaped."""
    lines = (columns, ("---",) * len(columns), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bullets(*lines: str) -> str:
    """A Markdown list."""
    return "\n".join(f"- {line}" for line in lines)


def pair_table(pair: PairFingerprint) -> str:
    """A table of a pair's parts and digests."""
    rows = (
        ("target", cell(pair.target), f"`{pair.target_digest}`"),
        ("drafter", cell(pair.drafter), f"`{pair.drafter_digest}`"),
        ("tokenizer", "", f"`{pair.tokenizer_digest}`"),
    )
    return table(("part of the pair", "name", "digest"), rows)


def lossless_line(policy: Policy) -> str:
    """The effect of the policy on the text."""
    if policy.lossless:
        return "Lossless: the emitted text follows the target's own distribution."
    return f"**Lossy** (`{policy.acceptance.kind}`): the emitted text is not the target's own."


def head(name: str, what: str, policy: Policy, pair: PairFingerprint) -> str:
    """The beginning of a card: title, description and pair."""
    title = f"# {name} for {cell(pair.target)} with {cell(pair.drafter)}"
    return "\n\n".join((title, what, lossless_line(policy), pair_table(pair)))


def with_domain(card: str, domain: Domain | None) -> str:
    """Appends the conditions under which the evidence was gathered."""
    if domain is None:
        return card
    lines = bullets(*(f"{name}: {cell(value)}" for name, value in domain_facts(domain)))
    return f"{card.rstrip()}\n\n## Domain of the evidence\n\n{lines}\n"


def domain_facts(domain: Domain) -> tuple[tuple[str, str], ...]:
    """Label and value of each condition, `unknown` where none is recorded."""
    found = (
        ("hardware", None if domain.hardware is None else ", ".join(domain.hardware)),
        ("dtype", domain.dtype),
        ("workload", domain.workload),
        ("batch size (requests)", domain.batch_size),
        ("context (tokens)", domain.context_tokens),
        ("target revision", domain.target_revision),
        ("target config", domain.target_config_digest),
        ("drafter revision", domain.drafter_revision),
        ("drafter config", domain.drafter_config_digest),
    )
    return tuple((name, "unknown" if value is None else str(value)) for name, value in found)


def policy_block(policy: Policy) -> str:
    """The whole policy as one line of JSON."""
    return f"```\n{policy_json(policy)}\n```"


def use_block(pair: PairFingerprint, *more: str, lossless: bool = True) -> str:
    """The commands that show and run the artifact, and `more` commands."""
    flag = "" if lossless else " --allow-lossy"
    commands = "\n".join(("specctl show PATH", f"specctl run --policy PATH{flag} ...", *more))
    return f"""```
{commands}
```

specctl refuses to run it on another pair than {cell(pair.target)} with {cell(pair.drafter)}."""


# --------------------------------------------------------------------------- on a terminal


@dataclass(frozen=True)
class Description:
    """Facts and a table, for `console.show`."""

    title: str
    facts: tuple[tuple[str, str], ...]  # label and value, most important first
    columns: tuple[str, ...] = ()  # of the table; empty without one
    rows: tuple[tuple[str, ...], ...] = ()
    verdict: str = ""  # in one line, above the title
    details: tuple[tuple[str, str], ...] = ()  # facts that a terminal shows only with `--wide`
    legend: str = ""
    wide: tuple[str, ...] = ()  # columns that a terminal shows only with `--wide`


def describe_artifact(artifact: Artifact) -> Description:
    """Describes a loaded artifact."""
    manifest, policy = artifact.manifest, artifact.policy
    pair, written = manifest.pair, manifest.provenance
    effect = "lossless" if policy.lossless else "LOSSY: may emit other text than the target"
    evidence, metrics = _evidence_facts(manifest.evidence)
    domain = () if manifest.domain is None else domain_facts(manifest.domain)
    facts = (
        *((name, _in_one_line(part)) for name, part in policy.additions.items()),
        ("target", f"{pair.target}  {pair.target_digest}"),
        ("drafter", f"{pair.drafter}  {pair.drafter_digest}"),
        *evidence,
        *((name, text) for name, text in domain if name in MAIN_CONDITIONS),
        ("written", f"{written.created}, specctl {written.specctl_version}"),
    )
    details = (
        ("tokenizer", pair.tokenizer_digest),
        *metrics,
        *((name, text) for name, text in domain if name not in MAIN_CONDITIONS),
        ("features", ", ".join(manifest.features) or "none"),
        ("code", written.source_digest or "unknown"),
        ("parent", written.parent or "none"),
        ("policy digest", policy_digest(policy)),
        ("files", ", ".join(sorted(manifest.files))),
    )
    safe, more = (
        tuple((label, shown(text, max_chars=4096)) for label, text in part)
        for part in (facts, details)
    )
    verdict = shown(f"{policy.name}, {effect}", max_chars=4096)
    title = f"artifact {artifact.digest}"
    return Description(title, safe, *_decisions(policy), verdict=verdict, details=more)


MAIN_CONDITIONS = ("hardware", "dtype", "workload", "batch size (requests)")
"""Conditions of the evidence that are always shown, `unknown` where none is recorded."""


def _in_one_line(record: Any) -> str:
    text = ", ".join(map(" ".join, _settings(record.model_dump(mode="json"))))
    return text.removeprefix("kind ")


def _evidence_facts(
    evidence: Evidence | None,
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """The evidence with its first figures, and all figures."""
    if evidence is None:
        return (("evidence", "none: set by hand"),), ()
    splits = "; ".join(
        f"{name} {size.num_prompts} prompts, {size.num_rounds} rounds"
        for name, size in evidence.splits.items()
    )
    metrics = tuple((name, _metric(found)) for name, found in evidence.metrics.items())
    main = [one for one in metrics if one[0] in MAIN_METRICS] or metrics[:3]
    named = ((MAIN_METRICS.get(name, name), text) for name, text in main)
    facts = (("evidence", splits), ("traces", evidence.trace_digest), *named)
    return facts, tuple(one for one in metrics if one not in main)


MAIN_METRICS = {
    "held_out_against_plain": "× plain decoding",
    "held_out_against_static": "× best static",
    "held_out_tokens_per_s": "tokens/s",
}
"""Figures that stand first, with their labels: of held-out prompts."""


def _metric(found: Metric) -> str:
    """`1.2 [1.1, 1.3]`, `1.2` without an interval, or `n/a`."""
    if found.value is None:
        return "n/a"
    interval = "" if found.low is None else f" [{found.low:.4g}, {found.high:.4g}]"
    return f"{found.value:.4g}{interval}"


def _decisions(policy: Policy) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Columns and rows: one row per bin of HeteroSpec, or per setting of another shape."""
    shape = policy.shape
    if not isinstance(shape, EntropyBins):
        settings = tuple(_settings(shape.model_dump(mode="json")))
        return ("setting", "value"), tuple((name, shown(text)) for name, text in settings)
    edges = [f"{edge:.4f}" for edge in shape.edges]
    plans = zip(["-", *edges], [*edges, "-"], shape.plan_depths, shape.plan_tokens, strict=True)
    columns = ("bin", "Φ from (nats)", "Φ to (nats)", "depth (levels)", "tokens (root counted)")
    return columns, tuple((str(i), *map(str, plan)) for i, plan in enumerate(plans))


def _settings(record: dict[str, Any], within: str = "") -> Iterator[tuple[str, str]]:
    """Names and values of all fields; of weights and of long values the size."""
    for name, value in record.items():
        text = "not set" if value is None else canonical_json(value)
        if isinstance(value, dict) and value:
            yield from _settings(value, f"{within}{name}.")
        elif isinstance(value, list) and (
            len(text) > _MAX_CELL_CHARS or (within == "scorer." and name != "features")
        ):
            sizes, inner = [], value
            while isinstance(inner, list) and inner:
                sizes.append(str(len(inner)))
                inner = inner[0]
            yield within + name, f"{' x '.join(sizes)} values"
        else:
            if isinstance(value, float):
                text = f"{value:.6g}"
            yield within + name, value if isinstance(value, str) else text
