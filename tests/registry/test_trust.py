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
    add_signature,
    envelope_bytes,
    parse_envelope,
    sign_artifact,
    sign_folder,
)
from specctl.errors import ArtifactError, OutputError, UsageError
from specctl.registry.trust import (
    Revocation,
    Role,
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
LONG_AGO, THEN, NOW, LATER = (f"20{year}-01-01T00:00:00Z" for year in (20, 25, 26, 30))
REVOKED = Revocation(at=THEN, reason="lost laptop")
KEY, OTHER = SigningKey.generate(), SigningKey.generate()
LOG_TYPE = "application/vnd.test-log+json"


def trusted(
    key: SigningKey, *roles: Role, names: tuple[str, ...] = ("*",), **changes: Any
) -> TrustedKey:
    """The line of a key in a trust file, by default that of a publisher of everything."""
    line = TrustedKey.of(key.public_key, names=names, roles=roles or ("publisher",))
    return line.model_copy(update=changes)


def trust(*keys: TrustedKey, require: tuple[str, ...] = ()) -> Trust:
    return Trust(keys=keys, require=require)


def signed(key: SigningKey = KEY, created: str = THEN, expires: str | None = None) -> bytes:
    return sign_artifact(key, DIGEST, NAME, created=created, expires=expires)


def verdict(believed: Trust, *envelopes: bytes, digest: str = DIGEST, name: str = NAME) -> str:
    """`ok`, or the refusal."""
    try:
        believed.accepted(envelopes, digest, name=name, now=NOW)
    except ArtifactError as refusal:
        return str(refusal)
    return "ok"


def with_fields(envelope: bytes, **fields: Any) -> bytes:
    """The envelope with fields that its signer did not write."""
    return json.dumps(json.loads(envelope) | fields).encode()


def forged(number: int = 0) -> bytes:
    """A stranger's signature under the id of a trusted key; each number gives other bytes."""
    [made] = json.loads(signed(OTHER))["signatures"]
    more = {"keyid": f"x{number}", "sig": ""}
    return with_fields(signed(OTHER), signatures=[made | {"keyid": KEY.key_id}, more])


BELIEVED, GOOD = trust(trusted(KEY)), signed()
PAYLOAD = parse_envelope(GOOD).payload
STRANGERS = [signed(SigningKey.generate()) for _ in range(100)]
KEYS = {
    "another key": (trusted(OTHER), "not trusted"),
    "another role": (trusted(KEY, "promoter"), "is no publisher"),
    "another name": (trusted(KEY, names=("llama-*",)), "may not sign for"),
    "revoked": (trusted(KEY, revoked=REVOKED), "lost laptop"),
    "expired": (trusted(KEY, not_after=LONG_AGO), "expired 2020.*signed 2025"),
}
VERDICTS: dict[str, tuple[Trust, list[bytes], str]] = {
    "trusted": (BELIEVED, [GOOD], "ok"),
    "beside others": (BELIEVED, [b"{}", signed(OTHER), GOOD], "ok"),
    "behind many": (BELIEVED, [*STRANGERS, *map(forged, range(100)), GOOD], "ok"),
    "expired behind many": (BELIEVED, [*STRANGERS, signed(expires=THEN)], "E_STALE"),
    "expired": (BELIEVED, [signed(expires=NOW)], "E_STALE"),
    "to expire": (BELIEVED, [signed(expires=LATER)], "ok"),
    "one that expired": (BELIEVED, [signed(expires=NOW), signed(expires=LATER)], "ok"),
    "nothing": (BELIEVED, [], "E_SIG.*no signature"),
    "nobody trusted": (Trust(), [GOOD], "E_SIG.*not trusted"),
    "no signature": (BELIEVED, [envelope_bytes(STATEMENT_TYPE, PAYLOAD)], "E_SIG.*no signature"),
    "no envelope": (BELIEVED, [b"no envelope"], "E_SIG"),
    "of another type": (BELIEVED, [KEY.sign(LOG_TYPE, PAYLOAD)], "E_SIG.*found one of application"),
    "of a type since changed": (
        BELIEVED,
        [with_fields(KEY.sign(LOG_TYPE, PAYLOAD), payloadType=STATEMENT_TYPE)],
        "E_SIG.*did not sign these bytes",
    ),
    "under another's id": (BELIEVED, [forged()], "E_SIG.*did not sign these bytes"),
    "no statement": (BELIEVED, [KEY.sign(STATEMENT_TYPE, b'{"created":null}')], "E_SIG"),
    **{name: (trust(line), [GOOD], f"E_SIG.*{says}") for name, (line, says) in KEYS.items()},
    **{
        f"covered by {glob}": (trust(trusted(KEY, names=("no-such", glob))), [GOOD], "ok")
        for glob in ("*", NAME, "qwen3-8b*", "*@h200:*", "*:chat")
    },
    **{
        f"not covered by {glob}": (trust(trusted(KEY, names=(glob,))), [GOOD], "E_SIG")
        for glob in ("qwen3", "*:code", "qwen3-8b+eagle3@h200:cha", "*@h100:*")
    },
}


@pytest.mark.parametrize("case", VERDICTS)
def test_the_verdict_on_signatures(case: str) -> None:
    believed, envelopes, wanted = VERDICTS[case]
    assert re.match(wanted, verdict(believed, *envelopes))


def test_a_signature_is_of_a_manifest_and_a_name() -> None:
    found = BELIEVED.accepted([signed(OTHER), GOOD], DIGEST, name=NAME, now=NOW)
    assert found == {GOOD: (KEY.key_id,)}
    subject = json.loads(PAYLOAD)["subject"]
    assert subject == [{"digest": {"sha256": "a" * 64}, "name": NAME}]
    assert verdict(BELIEVED, GOOD, digest=OTHER_DIGEST).startswith("E_SIG")
    assert verdict(BELIEVED, GOOD, name="qwen3-8b+eagle3@h100:chat").startswith("E_SIG")


@pytest.mark.parametrize("case", sorted(KEYS.keys() - {"another name"}))
def test_the_cure_is_to_sign_and_a_revoked_key_is_not_to_be_trusted(case: str) -> None:
    told = verdict(trust(KEYS[case][0]), GOOD)
    assert "with --key of a publisher key: specctl registry push" in told
    assert told.count("trust add") == (case in ("another key", "another role"))


def test_an_unsigned_move_is_to_be_signed_by_its_verb() -> None:
    nothing = parse_envelope(envelope_bytes(LOG_TYPE, b"{}"))
    with pytest.raises(ArtifactError, match="registry promote or rollback") as refusal:
        BELIEVED.verify(nothing, name=NAME, role="promoter", created=THEN)
    assert "fetch" not in refusal.value.fix


def test_the_envelope_of_most_keys_comes_first() -> None:
    both = trust(trusted(KEY), trusted(OTHER))
    more = add_signature(GOOD, OTHER)
    found = both.accepted([GOOD, more], DIGEST, name=NAME, now=NOW)
    assert list(found) == [more, GOOD]
    assert found[more] == tuple(sorted((KEY.key_id, OTHER.key_id)))
    one = trust(trusted(KEY), trusted(OTHER, revoked=REVOKED))
    assert one.accepted([more], DIGEST, name=NAME, now=NOW) == {more: (KEY.key_id,)}


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
    {"public_key": "?"},
    {"public_key": None},
    {"roles": ["root"]},
    {"roles": []},
    {"roles": ["publisher", "publisher"]},
    {"names": []},
    {"comment": "\x1b[2J"},
    {"not_after": "soon"},
)
BAD_FILES: tuple[dict[str, Any], ...] = (
    {"trust_version": 2},
    {"keys": None},
    {"require": ["[a]"]},
    {"more": 1},
    {"keys": [LINE, LINE]},
    *({"keys": [LINE | change]} for change in BAD_LINES),
)


@pytest.mark.parametrize("change", BAD_FILES)
def test_another_trust_file_is_refused(change: dict[str, Any]) -> None:
    tree = json.loads(trust(trusted(KEY)).to_bytes())
    assert Trust.parse(json.dumps(tree).encode())
    for wrong in (tree | change, {name: tree[name] for name in tree.keys() - {"require"}}):
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
    edit_trust(place, lambda one: one.with_required("qwen3-*"))
    found = Trust.load(place)
    assert {key.key_id for key in found.keys} == {key.key_id for key in keys}
    assert found.requires(NAME)
    assert not found.requires("other")


def test_a_revoked_key_is_not_trusted_again(tmp_path: Path) -> None:
    place, key = tmp_path / "trust.json", SigningKey.generate()
    edit_trust(place, lambda one: one.with_key(trusted(key)))
    edit_trust(place, lambda one: one.with_revoked(key.key_id, "lost\x1b[2J laptop"))
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
    before = place.read_bytes()
    for change in (
        lambda one: one.with_revoked("ed25519:" + "0" * 64, "lost"),
        lambda one: one.with_required("[a-z]"),
    ):
        with pytest.raises(UsageError):
            edit_trust(place, change)
    assert place.read_bytes() == before
    place.write_bytes(b"{}")
    assert code_of(edit_trust, place, lambda one: one) == "E_SCHEMA"
    with pytest.raises(OutputError):
        edit_trust(place / "below" / "trust.json", lambda one: one)


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o602])
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
        edit_trust(place, lambda one: one.with_required("a*"))
    finally:
        os.umask(before)
    assert Trust.load(place).requires("abc")
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trust.json")
    with pytest.raises(UsageError, match="owner alone"):
        Trust.load(tmp_path / "trust.json")


# --------------------------------------------------------------------------- signed folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_artifact(tmp_path / "artifact", "chain")


def test_signing_does_not_change_the_identity(folder: Path) -> None:
    before = load_artifact(folder).digest
    assert sign_folder(folder, KEY, NAME) == before == load_artifact(folder).digest
    assert verify_folder(folder, trust(trusted(KEY)), NAME) == (before, (KEY.key_id,))


def test_another_publisher_signs_beside_the_first(folder: Path) -> None:
    sign_folder(folder, KEY, NAME)
    sign_folder(folder, OTHER, NAME)
    both = trust(trusted(KEY), trusted(OTHER))
    assert len(verify_folder(folder, both, NAME)[1]) == 2
    sign_folder(folder, KEY, NAME, expires=LATER)  # another promise: of this key alone
    [signature] = parse_envelope((folder / SIGNATURE).read_bytes()).signatures
    assert signature.key_id == KEY.key_id


def test_a_folder_that_changed_is_not_vouched_for(folder: Path, tmp_path: Path) -> None:
    sign_folder(folder, KEY, NAME)
    other = write_artifact(tmp_path / "other", "eagle2")
    (other / SIGNATURE).write_bytes((folder / SIGNATURE).read_bytes())
    assert code_of(verify_folder, other, BELIEVED, NAME) == "E_SIG"
    sign_folder(other, OTHER, NAME)  # a signature of something else is replaced
    verify_folder(other, trust(trusted(OTHER)), NAME)


def test_absent_huge_and_endless_signatures_are_refused(folder: Path) -> None:
    """Whoever opens a pipe waits for ever."""
    with pytest.raises(ArtifactError, match="no signature"):
        verify_folder(folder, BELIEVED, NAME)
    (folder / SIGNATURE).write_bytes(b" " * (2 << 20))
    assert code_of(verify_folder, folder, BELIEVED, NAME).startswith("E_SI")
    (folder / SIGNATURE).unlink()
    os.mkfifo(folder / SIGNATURE)
    assert code_of(verify_folder, folder, BELIEVED, NAME) == "E_FILETYPE"
    assert code_of(sign_folder, folder, KEY, NAME) == "E_FILETYPE"
