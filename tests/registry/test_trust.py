"""The verdict on signatures: each way in which one does not count, and nothing else does."""

from __future__ import annotations

import json
import os
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
    """`ok`, or the code of the refusal."""
    try:
        believed.accepted(envelopes, digest, name=name, now=NOW)
    except ArtifactError as refusal:
        return refusal.code
    return "ok"


def test_a_believed_publisher_vouches_for_manifest_and_name() -> None:
    believed = trust(trusted(KEY))
    found = believed.accepted([signed(OTHER), signed()], DIGEST, name=NAME, now=NOW)
    assert found == {signed(): (KEY.key_id,)}
    payload = json.loads(parse_envelope(signed()).payload)
    assert payload["subject"] == [{"digest": {"sha256": "a" * 64}, "name": NAME}]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (trusted(OTHER), "not trusted"),
        (trusted(KEY, "promoter"), "no publisher"),
        (trusted(KEY, names=("llama-*",)), "may not sign for"),
        (trusted(KEY, revoked=REVOKED), "lost laptop"),
        (trusted(KEY, not_after=LONG_AGO), "expired"),
    ],
)
def test_a_key_that_may_not_sign_this_does_not_count(line: TrustedKey, says: str) -> None:
    with pytest.raises(ArtifactError, match=says) as refusal:
        trust(line).accepted([signed()], DIGEST, name=NAME, now=NOW)
    assert refusal.value.code == "E_SIG"


@pytest.mark.parametrize("glob", ["*", NAME, "qwen3-8b*", "*@h200:*", "*:chat"])
def test_globs_cover_names(glob: str) -> None:
    assert verdict(trust(trusted(KEY, names=("no-such", glob))), signed()) == "ok"


@pytest.mark.parametrize("glob", ["qwen3", "*:code", "qwen3-8b+eagle3@h200:cha", "*@h100:*"])
def test_globs_cover_no_other_names(glob: str) -> None:
    assert verdict(trust(trusted(KEY, names=(glob,))), signed()) == "E_SIG"


def test_a_signature_of_another_manifest_or_name_is_refused() -> None:
    believed = trust(trusted(KEY))
    assert verdict(believed, signed(), digest=OTHER_DIGEST) == "E_SIG"
    assert verdict(believed, signed(), name="qwen3-8b+eagle3@h100:chat") == "E_SIG"


def test_nothing_signed_is_refused() -> None:
    payload = parse_envelope(signed()).payload
    for envelopes in ((), (envelope_bytes(STATEMENT_TYPE, payload),), (b"no envelope",)):
        assert verdict(trust(trusted(KEY)), *envelopes) == "E_SIG"
    assert verdict(Trust(), signed()) == "E_SIG"


def test_an_expired_statement_is_stale_and_one_to_expire_is_not() -> None:
    believed = trust(trusted(KEY))
    assert verdict(believed, signed(expires=NOW)) == "E_STALE"
    assert verdict(believed, signed(expires=LATER)) == "ok"
    assert verdict(believed, signed(expires=NOW), signed(expires=LATER)) == "ok"


def test_a_bad_envelope_beside_a_good_one_does_no_harm() -> None:
    assert verdict(trust(trusted(KEY)), b"{}", signed(OTHER), signed()) == "ok"


def test_many_strangers_and_forgeries_hide_no_good_one() -> None:
    strangers = [signed(SigningKey.generate()) for _ in range(100)]
    forged = [edited(signed(OTHER), n) for n in range(100)]
    assert verdict(trust(trusted(KEY)), *strangers, *forged, signed()) == "ok"
    assert verdict(trust(trusted(KEY)), *strangers, signed(expires=THEN)) == "E_STALE"


def edited(envelope: bytes, n: int) -> bytes:
    """An envelope of another key under the id of a believed one; each n gives other bytes."""
    tree = json.loads(envelope)
    more = {"keyid": f"x{n}", "sig": ""}
    tree["signatures"] = [tree["signatures"][0] | {"keyid": KEY.key_id}, more]
    return json.dumps(tree).encode()


@pytest.mark.parametrize(
    ("line", "num_times"),
    [
        (trusted(OTHER), 1),
        (trusted(KEY, "promoter"), 1),
        (trusted(KEY, revoked=REVOKED), 0),
        (trusted(KEY, not_after=LONG_AGO), 0),
    ],
)
def test_the_cure_is_to_sign_and_a_revoked_key_is_not_to_be_trusted(
    line: TrustedKey, num_times: int
) -> None:
    with pytest.raises(ArtifactError) as refusal:
        trust(line).accepted([signed()], DIGEST, name=NAME, now=NOW)
    assert "with --key of a publisher key: specctl registry push" in refusal.value.fix
    assert refusal.value.fix.count("trust add") == num_times


@pytest.mark.parametrize(
    ("role", "cure"),
    [
        ("publisher", "specctl registry push"),
        ("promoter", "specctl registry promote or rollback"),
    ],
)
def test_what_is_unsigned_is_to_be_signed_by_its_verb(role: Role, cure: str) -> None:
    with pytest.raises(ArtifactError) as refusal:
        trust(trusted(KEY)).verify(
            envelope_bytes(LOG_TYPE, entry()), LOG_TYPE, name=NAME, role=role, now=NOW
        )
    assert cure in refusal.value.fix
    assert "fetch" not in refusal.value.fix


def test_the_envelope_of_most_keys_comes_first() -> None:
    both = trust(trusted(KEY), trusted(OTHER))
    more = add_signature(signed(), OTHER)
    found = both.accepted([signed(), more], DIGEST, name=NAME, now=NOW)
    assert list(found) == [more, signed()]
    assert found[more] == tuple(sorted((KEY.key_id, OTHER.key_id)))
    one = trust(trusted(KEY), trusted(OTHER, revoked=REVOKED))
    assert one.accepted([more], DIGEST, name=NAME, now=NOW) == {more: (KEY.key_id,)}


def test_a_payload_of_one_type_is_never_of_another() -> None:
    """An entry of a log, signed by the same key, is no statement about an artifact."""
    payload = parse_envelope(signed()).payload
    believed = trust(trusted(KEY))
    assert verdict(believed, KEY.sign(LOG_TYPE, payload)) == "E_SIG"
    retyped = json.loads(KEY.sign(LOG_TYPE, payload)) | {"payloadType": STATEMENT_TYPE}
    assert verdict(believed, json.dumps(retyped).encode()) == "E_SIG"


def test_a_signature_under_the_id_of_a_believed_key_is_checked_with_that_key() -> None:
    forged = json.loads(signed(OTHER))
    forged["signatures"][0]["keyid"] = KEY.key_id
    assert verdict(trust(trusted(KEY)), json.dumps(forged).encode()) == "E_SIG"


@settings(max_examples=60)
@given(st.integers(0, 10**9), st.integers(0, 7))
def test_one_bit_is_enough_to_refuse(place: int, bit: int) -> None:
    """Of the signature, of the payload, of their names: no flip leaves another believed text."""
    data = bytearray(GOOD)
    data[place % len(data)] ^= 1 << bit
    assert verdict(BELIEVED, bytes(data)) == "E_SIG"


GOOD, BELIEVED = signed(), trust(trusted(KEY))


def entry(**fields: Any) -> bytes:
    return json.dumps({"created": THEN, "expires": None, **fields}).encode()


def test_other_payloads_are_verified_by_type_role_and_time() -> None:
    believed = trust(trusted(KEY, "promoter"))
    ask: dict[str, Any] = {"name": NAME, "role": "promoter", "now": NOW}
    assert believed.verify(KEY.sign(LOG_TYPE, entry()), LOG_TYPE, **ask) == (KEY.key_id,)
    for bad in (
        entry(created="yesterday"),
        entry(expires=1),
        b"[]",
        b"{}",
        b"\xff",
        b'{"a":1,"a":1}',
    ):
        with pytest.raises(ArtifactError, match="E_SIG"):
            believed.verify(KEY.sign(LOG_TYPE, bad), LOG_TYPE, **ask)
    stale = KEY.sign(LOG_TYPE, entry(expires=THEN))
    with pytest.raises(ArtifactError, match="E_STALE"):
        believed.verify(stale, LOG_TYPE, **ask)


# --------------------------------------------------------------------------- records


def test_a_trust_file_comes_back_from_its_bytes() -> None:
    found = trust(trusted(KEY, revoked=REVOKED), trusted(OTHER, "promoter"), require=("*",))
    assert Trust.parse(found.to_bytes()) == found


@pytest.mark.parametrize(
    "change",
    [
        {"trust_version": 2},
        {"keys": None},
        {"require": ["[a]"]},
        {"more": 1},
        {"keys": [trusted(KEY).model_dump(), trusted(KEY).model_dump()]},
        {"keys": [trusted(KEY).model_dump() | {"key_id": OTHER.key_id}]},
        {"keys": [trusted(KEY).model_dump() | {"public_key": "AAAA"}]},
        {"keys": [trusted(KEY).model_dump() | {"public_key": "?"}]},
        {"keys": [trusted(KEY).model_dump() | {"roles": ["root"]}]},
        {"keys": [trusted(KEY).model_dump() | {"roles": []}]},
        {"keys": [trusted(KEY).model_dump() | {"names": []}]},
        {"keys": [trusted(KEY).model_dump() | {"comment": "\x1b[2J"}]},
        {"keys": [trusted(KEY).model_dump() | {"not_after": "soon"}]},
    ],
)
def test_another_trust_file_is_refused(change: dict[str, Any]) -> None:
    tree = json.loads(trust(trusted(KEY)).to_bytes()) | change
    for wrong in (tree, {name: value for name, value in tree.items() if name != "require"}):
        with pytest.raises(ArtifactError, match="E_SCHEMA"):
            Trust.parse(json.dumps(wrong).encode())


# --------------------------------------------------------------------------- the file


def test_a_user_without_a_file_believes_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    with pytest.raises(ArtifactError, match="E_SCHEMA"):
        edit_trust(place, lambda one: one)
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
    with pytest.raises(ArtifactError, match="E_SIG"):
        verify_folder(other, trust(trusted(KEY)), NAME)
    sign_folder(other, OTHER, NAME)  # a signature of something else is replaced
    verify_folder(other, trust(trusted(OTHER)), NAME)


def test_unsigned_and_huge_are_refused(folder: Path) -> None:
    believed = trust(trusted(KEY))
    with pytest.raises(ArtifactError, match="no signature"):
        verify_folder(folder, believed, NAME)
    (folder / SIGNATURE).write_bytes(b" " * (2 << 20))
    with pytest.raises(ArtifactError, match="E_SI"):
        verify_folder(folder, believed, NAME)


def test_what_would_wait_for_ever_is_no_signature(folder: Path) -> None:
    """A pipe, or a link to one, in place of the signature: whoever opens it is hung."""
    os.mkfifo(folder / SIGNATURE)
    with pytest.raises(ArtifactError, match="E_FILETYPE"):
        verify_folder(folder, trust(trusted(KEY)), NAME)
    with pytest.raises(ArtifactError, match="E_FILETYPE"):
        sign_folder(folder, KEY, NAME)
