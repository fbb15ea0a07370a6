"""What must not travel in an artifact: credentials, and what people wrote to a model (E_PRIVACY).

Patterns are of known shapes, so that digests, commit hashes and model names pass. A refusal names
the kind and the place, never the text itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from specctl.artifacts.manifest import REPORT_JSON
from specctl.errors import ArtifactError

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
    "a JSON web token": r"(?<=[A-Za-z0-9_-]{13})\.eyJ[A-Za-z0-9_-]{10}",
    "a URL with a password": r"://[^\s/:@]{0,100}:[^\s/@]{1,100}@",
    "a signed URL": r"(?i)[?&](?:x-amz-signature|sig|signature)=[0-9a-z%+/=]{16}",
    "a password": r"(?i)\b(?:password|passwd|api[_-]?key|secret)\s{0,32}[=:]\s{0,32}[\"']?"
    r"[^\s\"'<>{}]{8}",
}
"""Every repetition is bounded and no match begins inside another's: a search takes time in
proportion to the text, whoever wrote it. Of a web token the second part is searched for, behind
a first: that begins at a full stop, where a first one may begin at each of its letters."""
PROMPT_MARKS = r"<\|(?:im_start|user|assistant|start_header_id|system)\|>|\[INST\]|<start_of_turn>"
SECRET_NAMES = re.compile(r"(?i)(?:^|[._-])(?:password|passwd|secret|api_?key|access_?key)s?$")
TEXT_NAMES = re.compile(
    r"(?i)^(?:prompts?|messages?|conversations?|responses?|completions?|texts?|token_ids)$"
)
MAX_NAME_CHARS = 256
"""Of a value under a name that promises text: a path fits, a prompt does not have to."""
_SECRETS = {kind: re.compile(pattern) for kind, pattern in SECRETS.items()}
_WORDS = [kind for kind, pattern in SECRETS.items() if pattern.startswith(r"\b")]
_WORD = re.compile(r"\b(?:" + "|".join(SECRETS[kind][2:] for kind in _WORDS) + ")")
"""Any of those that are words of their own, in one search; which one, a second search tells."""
_REST = {kind: pattern for kind, pattern in _SECRETS.items() if kind not in _WORDS}
_MARKS = re.compile(PROMPT_MARKS)


class ValuePath(NamedTuple):
    """Where a value stands: a link to what holds it, so that a step down costs the same anywhere.

    Attributes:
        above: None for a whole file.
        name: the key of the value, or of the list that it stands in; of a file its name.
    """

    above: ValuePath | None
    name: str

    def __str__(self) -> str:
        above, names = self.above, [self.name]
        while above is not None:
            names.append(above.name)
            above = above.above
        return ".".join(reversed(names))


def check_private(
    manifest: Mapping[str, Any], texts: Mapping[str, str], report: Any = None
) -> None:
    """Refuses secrets and prompts in a manifest, in a report and in the texts beside them.

    Args:
        manifest: JSON values of `config.json`.
        texts: the card, by file name.
        report: JSON value of `report.json`; None where there is none.

    Raises:
        ArtifactError: E_PRIVACY.
    """
    for file, tree in (("config.json", manifest), (REPORT_JSON, report)):
        check_record(file, tree)
    for name, text in texts.items():
        _check_text(name, text)


def check_record(name: str, tree: Any) -> None:
    """Refuses secrets and prompts in JSON values that others will read.

    Args:
        name: what they are, for the message.

    Raises:
        ArtifactError: E_PRIVACY.
    """
    for place, value in _values(tree, name):
        _check_value(place, value)


def _values(tree: Any, file: str) -> Iterator[tuple[ValuePath, Any]]:
    """Every value with its place, an object before what it holds; no numbers in lists."""
    pending: list[tuple[ValuePath, Any]] = [(ValuePath(None, file), tree)]
    while pending:
        place, value = pending.pop()
        yield place, value
        if isinstance(value, Mapping):
            pending += ((ValuePath(place, key), inner) for key, inner in value.items())
        elif isinstance(value, list | tuple):
            pending += ((place, item) for item in value if not isinstance(item, int | float))


def _check_value(place: ValuePath, value: Any) -> None:
    name = place.name.rpartition(".")[2]
    if isinstance(value, Mapping):
        for key in value:
            _check_text(place, key, of=", a key")
    if isinstance(value, str):
        _check_text(place, value)
        if SECRET_NAMES.search(name) and value:
            raise _private(place, "a secret by its name")
    is_text = isinstance(value, str) and (len(value) > MAX_NAME_CHARS or "\n" in value)
    if (is_text or isinstance(value, list | tuple)) and TEXT_NAMES.match(name):
        raise _private(place, "text or tokens of a conversation by its name")


def _check_text(place: ValuePath | str, text: str, *, of: str = "") -> None:
    for kind, pattern in (_SECRETS if _WORD.search(text) else _REST).items():
        if pattern.search(text):
            raise _private(f"{place}{of}", kind)
    if _MARKS.search(text):
        raise _private(f"{place}{of}", "marks of a chat template, as prompts have them")


def _private(place: ValuePath | str, found: str) -> ArtifactError:
    return ArtifactError(
        "E_PRIVACY",
        str(place),
        expected="no secrets and no prompts",
        found=found,
        fix="remove it and write the artifact again; if it was published, revoke the secret",
    )
