"""From parts of several artifacts to one: HeteroSpec's shape with ECHO's budget, say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specctl.artifacts import Artifact, Domain, Evidence, Origin, PairFingerprint, save_artifact
from specctl.artifacts import card as cards
from specctl.errors import UsageError
from specctl.runtime.policy_spec import NamedPolicy

UNTESTED = (
    "The parts were fitted apart and not together. Replay or decode the whole before you trust it."
)
NOT_CERTIFIED = (
    "The acceptance was judged under the shape of its own artifact. What is drafted decides what "
    "can be relaxed, so its quality does not carry over: `specctl fit mars --shape PATH` judges it "
    "here."
)


def compose(named: NamedPolicy, spec: str, folder: Path) -> Artifact:
    """Writes a composed policy as an artifact of its own.

    Args:
        spec: as the user wrote it, for the record.

    Raises:
        UsageError: no part comes from an artifact, parts of different pairs, or a lossy
            acceptance without evidence.
        OutputError: a place that cannot be written, or that holds something else.
    """
    pair = _common_pair(named, spec)
    evidence, domain = _evidence(named, spec)
    parts = {name: artifact.digest for name, artifact in named.parts}
    fit: dict[str, Any] = {"kind": "compose", "spec": spec, "parts": parts}
    origin = Origin(pair=pair, evidence=evidence, fit=fit, domain=domain)
    card = cards.with_domain(write_card(named, pair), domain)
    return save_artifact(folder, named.policy, origin, card=card)


def write_card(named: NamedPolicy, pair: PairFingerprint) -> str:
    """Markdown of `README.md`."""
    policy, rows = named.policy, []
    for part in dict.fromkeys(("shape", "budget", "acceptance", *policy.additions)):
        source = next((a.digest for name, a in named.parts if name == part), "set by hand")
        rows.append((part, f"`{getattr(policy, part).kind}`", f"`{source}`"))
    caution = UNTESTED if policy.lossless else f"{UNTESTED} {NOT_CERTIFIED}"
    sections = (
        f"# {cards.cell(policy.name)} for {cards.cell(pair.target)} with "
        f"{cards.cell(pair.drafter)}",
        cards.lossless_line(policy),
        cards.table(("part", "kind", "artifact"), rows),
        cards.policy_block(policy),
        cards.pair_table(pair),
        "## Use\n\n" + cards.use_block(pair, lossless=policy.lossless),
        f"## Limits\n\n- {caution}\n{cards.FIXTURE_LINE}",
    )
    return "\n\n".join(sections) + "\n"


def _common_pair(named: NamedPolicy, spec: str) -> PairFingerprint:
    pairs = [artifact.manifest.pair for _, artifact in named.parts]
    if not pairs:
        raise UsageError(
            f"compose {spec!r}",
            expected="at least one artifact among the parts, which says for which pair it is",
            found="words alone",
            fix="give the words to `run --policy` as they are",
        )
    keys = {(p.target_digest, p.drafter_digest, p.tokenizer_digest) for p in pairs}
    if len(keys) > 1:
        raise UsageError(
            f"compose {spec!r}",
            expected="artifacts of one pair",
            found=", ".join(sorted({f"{p.target} with {p.drafter}" for p in pairs})),
            fix="fit the parts on one pair",
        )
    return pairs[0]


def _evidence(named: NamedPolicy, spec: str) -> tuple[Evidence | None, Domain | None]:
    """Evidence, and where it holds: the acceptance's if the policy is lossy, else the first's."""
    parts = dict(named.parts)
    if named.policy.lossless:
        first = next(iter(parts.values())).manifest
        return first.evidence, first.domain
    given = parts.get("acceptance")
    if given is None or given.manifest.evidence is None:
        raise UsageError(
            f"compose {spec!r}",
            expected="a lossy acceptance from an artifact that carries its evidence",
            found="none",
            fix="fit it first: specctl fit mars, or specctl fit adasd",
        )
    return given.manifest.evidence, given.manifest.domain
