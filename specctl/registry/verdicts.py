"""What a check found and what it went over, for scripts and for people."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from specctl.errors import ArtifactError
from specctl.registry.fsck import EXPIRED, OF_AN_OBJECT, Finding
from specctl.registry.names import RESERVED, name_of_segment
from specctl.registry.room import Registry

Row = dict[str, Any]
_RESTORE = "restore those objects from a backup, or delete them and push the artifacts again"
_FIXES = {
    "E_SIG": "let who may do it sign or publish it again, or decide about the key: "
    "specctl registry trust add",
    "E_LOG": "restore that entry from a backup (what is no pin among pins, move away); delete no "
    "entry, and nothing that no log names until all can be read",
    "E_STORE": "let its owner open what is closed (docs/operators.md); find out who made a link or "
    "an odd key, and move it away",
    "E_EXTRA": "find out who put it there, and move it away",
}
"""What to do about damage that no backup mends."""


def finding_row(finding: Finding) -> Row:
    """One finding of fsck."""
    return {**vars(finding)}


@dataclass(frozen=True)
class Checked:
    """What a check went over.

    Attributes:
        num_entries: of the histories, those of the registry itself included.
        num_artifacts: versions that are not collected as garbage, each digest once.
    """

    num_names: int
    num_entries: int
    num_artifacts: int

    def sentence(self, findings: Sequence[Finding]) -> str:
        """`no damage: 2 names, 5 entries, 2 artifacts checked`."""
        damage = sum(finding.is_damage for finding in findings)
        counts = (
            _count(self.num_names, "name"),
            _count(self.num_entries, "entry", "entries"),
            _count(self.num_artifacts, "artifact"),
        )
        verdict = f"damage at {_count(damage, 'place')}" if damage else "no damage"
        expired = sum(finding.code == EXPIRED for finding in findings)
        late = f", {expired} expired, which readers refuse" if expired else ""
        return f"{verdict}{late}: {', '.join(counts)} checked"


def checked_all(registry: Registry) -> Checked:
    """What `fsck` went over; a history that cannot be read is among its findings, not here."""
    names, entries, digests = 0, 0, set[str]()
    for segment in registry.segments():
        try:
            log = registry.any_log(name_of_segment(segment))
        except OF_AN_OBJECT:
            continue
        entries += len(log.entries)
        if log.name not in RESERVED:
            names += 1
            digests |= set(log.state.versions)
    with suppress(*OF_AN_OBJECT):  # a finding, too
        digests -= registry.garbage_log().state.collected
    return Checked(names, entries, len(digests))


def checked_one(registry: Registry, name: str) -> Checked:
    """What `verify` of one reference went over."""
    return Checked(1, len(registry.known_log(name).entries), 1)


def findings_json(checked: Checked, findings: Sequence[Finding]) -> Row:
    """The outcome of a check for scripts."""
    return {**vars(checked), "findings": [finding_row(finding) for finding in findings]}


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def refuse_damage(findings: Sequence[Finding], what: str) -> None:
    """Ends a check that found damage.

    Raises:
        ArtifactError: with the code of the first finding; all were shown before.
    """
    damage = [finding for finding in findings if finding.is_damage]
    if damage:
        raise ArtifactError(
            damage[0].code,
            what,
            expected="no damage",
            found=f"{_count(len(damage), 'finding')}, the first at {damage[0].place}",
            fix=_FIXES.get(damage[0].code, _RESTORE),
        )


def refuse_unusable(findings: Sequence[Finding], what: str) -> None:
    """Ends the check of a reference that a pull would refuse: for damage, or as it has expired.

    Raises:
        ArtifactError: as `refuse_damage`, and E_STALE.
    """
    refuse_damage(findings, what)
    expired = [finding for finding in findings if finding.code == EXPIRED]
    if expired:
        raise ArtifactError(
            EXPIRED,
            what,
            expected="entries and signatures that are valid now",
            found=f"{expired[0].place}: {expired[0].found}",
            fix="have it promoted, published or signed anew",
        )
