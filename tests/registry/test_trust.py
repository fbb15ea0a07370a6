"""The verdict on signatures: each way in which one does not count, and nothing else does."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.artifacts.load import load_artifact
from specctl.artifacts.manifest import SIGNATURE
from specctl.artifacts.signing import (
    STATEMENT_TYPE,
    SigningKey,
    envelope_bytes,
    parse_envelope,
    sign_artifact,
    sign_folder,
)
from specctl.errors import ArtifactError, OutputError, UsageError
from specctl.registry.trust import (
    Revocation,
    Trust,
    TrustedKey,
    edit_trust,
    trust_path,
    verify_folder,
)
from tests.artifacts.examples import write_artifact
from tests.registry.worlds import code_of

NAME = "qwen3-8b+eagle3@h200:chat"
DIGEST, OTHER_DIGEST = "sha256:" + "a" * 64, "sha256:" + "b" * 64
REVOKED = Revocation(at="2025-01-01T00:00:00Z", reason="lost laptop")
KEY, OTHER = SigningKey.generate(), SigningKey.generate()
LOG_TYPE = "application/vnd.test-log+json"


def trusted(key: SigningKey, *names: str, revoked: Revocation | None = None) -> TrustedKey:
    line = TrustedKey.of(key.public_key, names=names or ("*",))
    return line.model_copy(update={"revoked": revoked})


def trust(*keys: TrustedKey) -> Trust:
    return Trust(keys=keys)


def signed(key: SigningKey = KEY) -> bytes:
    return sign_artifact(key, DIGEST, NAME)


def verdict(believed: Trust, *envelopes: bytes, digest: str = DIGEST, name: str = NAME) -> str:
    """`ok`, or the refusal."""
    try:
        believed.accepted(envelopes, digest, name)
    except ArtifactError as refusal:
        return str(refusal)
    return "ok"


def with_fields(envelope: bytes, **fields: Any) -> bytes:
    """The envelope with fields that its signer did not write."""
    return json.dumps(json.loads(envelope) | fields).encode()


def forged(key: SigningKey = OTHER) -> bytes:
    """A stranger's signature under the id of a trusted key."""
    [made] = json.loads(signed(key))["signatures"]
    return with_fields(signed(key), signatures=[made | {"keyid": KEY.key_id}])


BELIEVED, GOOD = trust(trusted(KEY)), signed()
PAYLOAD = parse_envelope(GOOD).payload
STRANGERS = [SigningKey.generate() for _ in range(20)]
KEYS = {
    "another key": (trusted(OTHER), "not trusted"),
    "another name": (trusted(KEY, "llama-*"), "may not sign for"),
    "revoked": (trusted(KEY, revoked=REVOKED), "lost laptop"),
}
VERDICTS: dict[str, tuple[Trust, list[bytes], str]] = {
    "trusted": (BELIEVED, [GOOD], "ok"),
    "beside others": (BELIEVED, [b"{}", signed(OTHER), GOOD], "ok"),
    "behind many": (BELIEVED, [*map(signed, STRANGERS), *map(forged, STRANGERS), GOOD], "ok"),
    "forged behind many": (BELIEVED, [*map(signed, STRANGERS), forged()], "E_SIG.*did not sign"),
    "nothing": (BELIEVED, [], "E_SIG.*there is none"),
    "nobody trusted": (Trust(), [GOOD], "E_SIG.*not trusted"),
    "no signature": (BELIEVED, [envelope_bytes(STATEMENT_TYPE, PAYLOAD)], "E_SIG.*there is none"),
    "no envelope": (BELIEVED, [b"no envelope"], "E_SIG"),
    "of another type": (BELIEVED, [KEY.sign(LOG_TYPE, PAYLOAD)], "E_SIG.*holds application"),
    "of a type since changed": (
        BELIEVED,
        [with_fields(KEY.sign(LOG_TYPE, PAYLOAD), payloadType=STATEMENT_TYPE)],
        "E_SIG.*did not sign these bytes",
    ),
    "under another's id": (BELIEVED, [forged()], "E_SIG.*did not sign these bytes"),
    "no statement": (BELIEVED, [KEY.sign(STATEMENT_TYPE, b'{"created":null}')], "E_SIG"),
    **{name: (trust(line), [GOOD], f"E_SIG.*{says}") for name, (line, says) in KEYS.items()},
    **{
        f"covered by {glob}": (trust(trusted(KEY, "no-such", glob)), [GOOD], "ok")
        for glob in ("*", NAME, "qwen3-8b*", "*@h200:*", "*:chat")
    },
    **{
        f"not covered by {glob}": (trust(trusted(KEY, glob)), [GOOD], "E_SIG")
        for glob in ("qwen3", "*:code", "qwen3-8b+eagle3@h200:cha", "*@h100:*")
    },
}


@pytest.mark.parametrize("case", VERDICTS)
def test_the_verdict_on_signatures(case: str) -> None:
    believed, envelopes, wanted = VERDICTS[case]
    assert re.match(wanted, verdict(believed, *envelopes))


def test_a_signature_is_of_a_manifest_and_a_name() -> None:
    assert BELIEVED.accepted([signed(OTHER), GOOD], DIGEST, NAME) == [GOOD]
    subject = json.loads(PAYLOAD)["subject"]
    assert subject == [{"digest": {"sha256": "a" * 64}, "name": NAME}]
    assert verdict(BELIEVED, GOOD, digest=OTHER_DIGEST).startswith("E_SIG")
    assert verdict(BELIEVED, GOOD, name="qwen3-8b+eagle3@h100:chat").startswith("E_SIG")


def test_a_name_that_a_key_is_for_must_be_signed_though_the_key_is_revoked() -> None:
    """Else revoking the only key would open its names to everybody."""
    for revoked in (None, REVOKED):
        line = trusted(KEY, "qwen3-*", revoked=revoked)
        assert trust(line).requires(NAME)
        assert not trust(line).requires("other")
    assert not Trust().requires(NAME)


@settings(max_examples=60)
@given(st.integers(0, 10**9), st.integers(0, 7))
def test_one_bit_is_enough_to_refuse(place: int, bit: int) -> None:
    """Of the signature, of the payload, of their names: no flip leaves another believed text."""
    data = bytearray(GOOD)
    data[place % len(data)] ^= 1 << bit
    assert verdict(BELIEVED, bytes(data)).startswith("E_SIG")


# --------------------------------------------------------------------------- records


LINE = trusted(KEY).model_dump(mode="json")
BAD_LINES: tuple[dict[str, Any], ...] = (
    {"key_id": OTHER.key_id},
    {"public_key": "AAAA"},
    {"names": []},
    {"names": ["[a]"]},
    {"comment": "\x1b[2J"},
    {"revoked": "yes"},
)
BAD_FILES: tuple[dict[str, Any], ...] = (
    {"trust_version": 2},
    {"keys": None},
    {"more": 1},
    {"keys": [LINE, LINE]},
    *({"keys": [LINE | change]} for change in BAD_LINES),
)


@pytest.mark.parametrize("change", BAD_FILES)
def test_another_trust_file_is_refused(change: dict[str, Any]) -> None:
    tree = json.loads(trust(trusted(KEY)).to_bytes())
    assert Trust.parse(json.dumps(tree).encode())
    for wrong in (tree | change, {name: tree[name] for name in tree.keys() - {"keys"}}):
        assert code_of(Trust.parse, json.dumps(wrong).encode()) == "E_SCHEMA"


# --------------------------------------------------------------------------- the file


def test_without_a_file_nobody_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert trust_path() == tmp_path / "specctl" / "trust.json"
    assert Trust.load() == Trust()
    with pytest.raises(UsageError):
        Trust.load(tmp_path / "named.json")


def test_edits_add_up(tmp_path: Path) -> None:
    """Threads here; each edit opens a lock of its own, as a process would."""
    place, keys = tmp_path / "deep" / "trust.json", [SigningKey.generate() for _ in range(8)]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: edit_trust(place, lambda one: one.with_key(trusted(key))), keys))
    found = Trust.load(place)
    assert {key.key_id for key in found.keys} == {key.key_id for key in keys}


def test_a_revoked_key_is_not_trusted_again(tmp_path: Path) -> None:
    place, key = tmp_path / "trust.json", SigningKey.generate()
    edit_trust(place, lambda one: one.with_key(trusted(key)))
    edit_trust(place, lambda one: one.with_revoked(key.key_id[:20], "lost\x1b[2J laptop"))
    before = place.read_bytes()
    with pytest.raises(UsageError, match="revoked"):
        edit_trust(place, lambda one: one.with_key(trusted(key)))
    assert place.read_bytes() == before
    revoked = Trust.load(place).keys[0].revoked
    assert revoked is not None
    assert "\x1b" not in revoked.reason


def test_a_refused_edit_changes_nothing(tmp_path: Path) -> None:
    place = tmp_path / "trust.json"
    edit_trust(place, lambda one: one.with_key(trusted(SigningKey.generate())))
    edit_trust(place, lambda one: one.with_key(trusted(KEY)))
    before = place.read_bytes()
    for start, found in (("ed25519:" + "0" * 64, "no key"), ("ed25519:", "2 keys")):
        with pytest.raises(UsageError, match=f"{found} with an id that begins {start}; .*--json"):
            edit_trust(place, lambda one, start=start: one.with_revoked(start, "lost"))
    assert place.read_bytes() == before
    place.write_bytes(b"{}")
    assert code_of(edit_trust, place, lambda one: one) == "E_SCHEMA"
    with pytest.raises(OutputError):
        edit_trust(place / "below" / "trust.json", lambda one: one)


@pytest.mark.parametrize("mode", [0o664, 0o602])
def test_a_trust_file_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    place, key = tmp_path / "trust.json", SigningKey.generate()
    edit_trust(place, lambda one: one.with_key(trusted(key)))
    place.chmod(mode)
    with pytest.raises(UsageError, match="chmod go-w"):
        Trust.load(place)
    with pytest.raises(UsageError, match="chmod go-w"):
        edit_trust(place, lambda one: one)
    place.chmod(0o644)
    assert Trust.load(place).key(key.key_id)


def test_what_is_written_can_be_read_again_whatever_the_umask(tmp_path: Path) -> None:
    place, before = tmp_path / "trust.json", os.umask(0o002)
    try:
        edit_trust(place, lambda one: one.with_key(trusted(KEY)))
    finally:
        os.umask(before)
    assert Trust.load(place).requires(NAME)
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trust.json")
    with pytest.raises(UsageError, match="must be a regular file"):
        Trust.load(tmp_path / "trust.json")


# --------------------------------------------------------------------------- signed folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_artifact(tmp_path / "artifact", "chain")


def test_signing_does_not_change_the_identity(folder: Path) -> None:
    before = load_artifact(folder).digest
    assert sign_folder(folder, KEY, NAME) == before == load_artifact(folder).digest
    assert verify_folder(folder, trust(trusted(KEY)), NAME) == (before, KEY.key_id)


def test_a_folder_that_changed_is_not_vouched_for(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="there is none"):
        verify_folder(folder, BELIEVED, NAME)
    sign_folder(folder, KEY, NAME)
    other = write_artifact(tmp_path / "other", "eagle2")
    (other / SIGNATURE).write_bytes((folder / SIGNATURE).read_bytes())
    assert code_of(verify_folder, other, BELIEVED, NAME) == "E_SIG"
    sign_folder(other, OTHER, NAME)  # a signature of something else is replaced
    verify_folder(other, trust(trusted(OTHER)), NAME)
