"""Markdown that the cards (`README.md`) of all artifacts share."""

from __future__ import annotations

from collections.abc import Sequence

from specctl.artifacts.manifest import Domain, PairFingerprint
from specctl.policy import Policy, policy_json

FIXTURE_LINE = (
    "- If the pair is specctl's embedded one, these figures are a fixture for people and tests; "
    "they\n  say nothing about large models."
)


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
