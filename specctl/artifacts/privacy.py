"""Texts that must not travel in an artifact: credentials, and prompts (E_PRIVACY).

Patterns are of known shapes, so that digests, commit hashes and model names pass. A refusal names
the kind and the place, never the text itself. Every repetition is bounded and no match begins
inside another's: a search takes time in proportion to the text, whoever wrote it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from specctl.artifacts.manifest import MANIFEST, REPORT_JSON
from specctl.errors import ArtifactError, shown

log = logging.getLogger("specctl.artifacts")
SECRETS = {
    "an AWS access key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "an AWS secret key": r"(?i)aws_?secret_?(?:access_?)?key\W{1,8}[A-Za-z0-9/+]{40}\b",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{40})",
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{30}",
    "an API key": r"\bsk-[A-Za-z0-9_-]{32}",
    "a Google key": r"\bAIza[0-9A-Za-z_-]{35}\b",
    "a Slack token": r"\bxox[abprs]-[0-9A-Za-z-]{10}",
    "a private key": r"-----BEGIN [A-Z ]{0,32}PRIVATE KEY-----",
    "a bearer token": r"(?i)\bbearer\s{1,32}[A-Za-z0-9._~+/-]{20}",
    # The second part, behind a first: it begins at a full stop, a first at each of its letters.
    "a JSON web token": r"(?<=[A-Za-z0-9_-]{13})\.eyJ[A-Za-z0-9_-]{10}",
    "a URL with a password": r"://[^\s/:@]{0,100}:[^\s/@]{1,100}@",
    "a signed URL": r"(?i)[?&](?:x-amz-signature|sig|signature)=[0-9a-z%+/=]{16}",
    "a password": r"(?i)\b(?:password|passwd|api[_-]?key|secret)\s{0,32}[=:]\s{0,32}[\"']?"
    r"[^\s\"'<>{}]{8}",
    "marks of a chat template, as prompts have them": r"<\|(?:im_start|user|assistant|"
    r"start_header_id|system)\|>|\[INST\]|<start_of_turn>",
}
_SECRETS = {kind: re.compile(pattern) for kind, pattern in SECRETS.items()}
_WORDS = [kind for kind, pattern in SECRETS.items() if pattern.startswith(r"\b")]
_WORD = re.compile(r"\b(?:" + "|".join(SECRETS[kind][2:] for kind in _WORDS) + ")")
"""Any of the patterns that begin a word, in one search; a second search tells which."""
_REST = {kind: pattern for kind, pattern in _SECRETS.items() if kind not in _WORDS}
SECRET_NAMES = re.compile(r"(?i)(?:^|[._-])(?:password|passwd|secret|api_?key|access_?key)s?$")
TEXT_NAMES = re.compile(
    r"(?i)^(?:prompts?|messages?|conversations?|responses?|completions?|texts?|token_ids)$"
)
MAX_NAME_CHARS = 256
"""Of a value under a name that promises text: a path fits, a prompt does not have to."""
_ACTIVE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]"
    r"|(?i:<\s{0,4}/?\s{0,4}(?:script|iframe|object|embed|style|img|svg|form)\b|javascript:)"
)


def check_private(
    manifest: Mapping[str, Any], texts: Mapping[str, str], report: Any = None
) -> None:
    """Refuses secrets and prompts in a manifest, a report and the texts beside them (E_PRIVACY).

    Args:
        manifest: JSON values of `config.json`.
        texts: the card, by file name.
        report: JSON value of `report.json`; None where there is none.
    """
    check_record(MANIFEST, manifest)
    check_record(REPORT_JSON, report)
    for name, text in texts.items():
        _check_text([name], text)


def check_record(name: str, tree: Any) -> None:
    """Refuses secrets and prompts in JSON values that others will read (E_PRIVACY).

    Args:
        name: of the values, for the message.
    """
    _check_values(tree, [name])


def _check_values(value: Any, place: list[str]) -> None:
    """Every value within, whose place is the names above it."""
    last = place[-1].rpartition(".")[2]
    if isinstance(value, str):
        _check_text(place, value)
        if value and SECRET_NAMES.search(last):
            raise _private(place, "a secret by its name")
    is_text = isinstance(value, str) and (len(value) > MAX_NAME_CHARS or "\n" in value)
    if (is_text or isinstance(value, list | tuple)) and TEXT_NAMES.match(last):
        raise _private(place, "text or tokens of a conversation by its name")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_text(place, key, of=", a key")
            _check_values(inner, [*place, key])
    elif isinstance(value, list | tuple):
        for item in value:
            if not isinstance(item, int | float):  # there may be many thousands
                _check_values(item, place)


def _check_text(place: Sequence[str], text: str, *, of: str = "") -> None:
    for kind, pattern in (_SECRETS if _WORD.search(text) else _REST).items():
        if pattern.search(text):
            raise _private(place, kind, of)


def _private(place: Sequence[str], found: str, of: str = "") -> ArtifactError:
    return ArtifactError(
        "E_PRIVACY",
        ".".join(place) + of,
        expected="no secrets and no prompts",
        found=found,
        fix="remove it and write the artifact again; if it was published, revoke the secret",
    )


def warn_of_text(file: str, text: str) -> None:
    """Logs W_TEXT for a card with terminal escapes, hidden characters or active HTML.

    specctl shows no card itself, and escapes every text of an artifact that it does show. The
    warning is for people who open the file.
    """
    found = _ACTIVE.search(text)
    if found is not None:
        part = shown(text[max(0, found.start() - 8) : found.end() + 16])
        log.warning("W_TEXT %s holds what a terminal or browser would obey: %s", file, part)
