"""The verdict on signatures: each way in which one does not count, and nothing else does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.artifacts.signing import (
    STATEMENT_TYPE,
    Role,
    SigningKey,
    Trust,
    TrustedKey,
    Verified,
    add_signature,
    envelope_bytes,
    parse_envelope,
    parse_trust,
    sign_artifact,
)
from specctl.artifacts.signing.records import trust_bytes
from specctl.errors import ArtifactError
from tests.artifacts.signing.keys import (
    DIGEST,
    LATER,
    LONG_AGO,
    NAME,
    NOW,
    OTHER_DIGEST,
    REVOKED,
    THEN,
    record,
    trust,
    trusted,
)

KEY, OTHER = SigningKey.generate(), SigningKey.generate()
LOG_TYPE = "application/vnd.test-log+json"


def signed(key: SigningKey = KEY, created: str = THEN, expires: str | None = None) -> bytes:
    return sign_artifact(key, DIGEST, NAME, created=created, expires=expires)


def verdict(believed: Trust, *envelopes: bytes, digest: str = DIGEST, name: str = NAME) -> str:
    """`ok`, or the code of the refusal."""
    try:
        believed.verify_artifact(envelopes, digest, name=name, now=NOW)
    except ArtifactError as refusal:
        return refusal.code
    return "ok"


def test_a_believed_publisher_vouches_for_manifest_and_name() -> None:
    believed = trust(trusted(KEY))
    found = believed.verify_artifact([signed()], DIGEST, name=NAME, now=NOW)
    assert found.key_ids == (KEY.key_id,)
    assert json.loads(found.payload)["subject"] == [{"digest": {"sha256": "a" * 64}, "name": NAME}]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (trusted(OTHER), "not trusted"),
        (trusted(KEY, "promoter", "root"), "no publisher"),
        (trusted(KEY, names=("llama-*",)), "may not sign for"),
        (trusted(KEY, revoked=REVOKED), "lost laptop"),
        (trusted(KEY, not_after=LONG_AGO), "expired"),
        (trusted(KEY, not_before=NOW), "not valid before"),
    ],
)
def test_a_key_that_may_not_sign_this_does_not_count(line: TrustedKey, says: str) -> None:
    with pytest.raises(ArtifactError, match=says) as refusal:
        trust(line).verify_artifact([signed()], DIGEST, name=NAME, now=NOW)
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
        trust(line).verify_artifact([signed()], DIGEST, name=NAME, now=NOW)
    assert "with --key of a publisher key: specctl registry push" in refusal.value.fix
    assert refusal.value.fix.count("trust add") == num_times


@pytest.mark.parametrize(
    ("role", "cure"),
    [
        ("publisher", "specctl registry push"),
        ("promoter", "specctl registry promote or rollback"),
        ("root", "whoever holds the root key signs them: specctl registry settings FILE"),
    ],
)
def test_what_is_unsigned_is_to_be_signed_by_its_verb(role: Role, cure: str) -> None:
    with pytest.raises(ArtifactError) as refusal:
        trust(trusted(KEY)).verify(
            envelope_bytes(LOG_TYPE, entry()), LOG_TYPE, name=NAME, role=role, now=NOW
        )
    assert cure in refusal.value.fix
    assert "fetch" not in refusal.value.fix


def test_the_threshold_counts_keys_not_signatures() -> None:
    both = trust(trusted(KEY), trusted(OTHER), threshold=2)
    assert verdict(both, signed(), signed(created=NOW)) == "E_SIG"
    assert verdict(both, signed(), signed(OTHER)) == "ok"
    assert verdict(both, add_signature(signed(), OTHER)) == "ok"
    assert verdict(both, signed(), sign_artifact(OTHER, OTHER_DIGEST, NAME)) == "E_SIG"
    revoked = trust(trusted(KEY), trusted(OTHER, revoked=REVOKED), threshold=2)
    assert verdict(revoked, signed(), signed(OTHER)) == "E_SIG"


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
    found = believed.verify(KEY.sign(LOG_TYPE, entry()), LOG_TYPE, name=NAME, role="promoter")
    assert found == Verified(entry(), (KEY.key_id,))
    for bad in (
        entry(created="yesterday"),
        entry(expires=1),
        b"[]",
        b"{}",
        b"\xff",
        b'{"a":1,"a":1}',
    ):
        with pytest.raises(ArtifactError, match="E_SIG"):
            believed.verify(KEY.sign(LOG_TYPE, bad), LOG_TYPE, name=NAME, role="promoter")
    stale = KEY.sign(LOG_TYPE, entry(expires=THEN))
    with pytest.raises(ArtifactError, match="E_STALE"):
        believed.verify(stale, LOG_TYPE, name=NAME, role="promoter", now=NOW)
    with pytest.raises(ArtifactError, match="no root"):
        believed.verify(KEY.sign(LOG_TYPE, entry()), LOG_TYPE, name=NAME, role="root")


# --------------------------------------------------------------------------- delegation

ROOT = SigningKey.generate()
BY_ROOT = Verified(b"", (ROOT.key_id,))


def test_a_root_delegates_keys_and_the_registry_alone_does_not() -> None:
    ours, theirs = trust(trusted(ROOT, "root")), record(trusted(KEY))
    assert verdict(ours, signed()) == "E_SIG"
    assert verdict(ours.with_delegated(theirs, BY_ROOT), signed()) == "ok"
    assert verdict(ours.with_delegated(theirs, None), signed()) == "E_SIG"


def test_a_delegated_key_is_never_a_root() -> None:
    ours = trust(trusted(ROOT, "root"))
    extended = ours.with_delegated(
        record(trusted(KEY, "root"), trusted(OTHER, "root", "publisher")), BY_ROOT
    )
    assert extended.record.key(KEY.key_id) is None
    assert extended.record.key(OTHER.key_id) == trusted(OTHER, "publisher")


@pytest.mark.parametrize("verified", [BY_ROOT, None])
def test_a_revocation_on_either_side_wins(verified: Verified | None) -> None:
    plain, revoked = trusted(KEY), trusted(KEY, revoked=REVOKED)
    for ours, theirs in ((plain, revoked), (revoked, plain)):
        assert verdict(trust(ours).with_delegated(record(theirs), verified), signed()) == "E_SIG"


def test_a_record_cannot_widen_what_we_gave_a_key() -> None:
    ours = trust(trusted(KEY, "promoter"), trusted(ROOT, "root"))
    wider = ours.with_delegated(record(trusted(KEY, "publisher")), BY_ROOT)
    assert verdict(wider, signed()) == "E_SIG"


def test_a_root_delegates_for_no_names_but_its_own() -> None:
    limited = trusted(ROOT, "root", names=("_settings", "team-b*"))
    ours = trust(limited).with_delegated(record(trusted(KEY)), BY_ROOT)
    assert verdict(ours, signed()) == "E_SIG"
    with pytest.raises(ArtifactError, match="the root behind it"):
        ours.at("anywhere").verify_artifact([signed()], DIGEST, name=NAME)
    inside = sign_artifact(KEY, DIGEST, "team-b", created=THEN)
    assert verdict(ours, inside, name="team-b") == "ok"
    wider = trust(limited, trusted(OTHER, "root"))
    by_both = Verified(b"", (OTHER.key_id, ROOT.key_id))
    assert verdict(wider.with_delegated(record(trusted(KEY)), by_both), signed()) == "ok"
    assert verdict(wider.with_delegated(record(trusted(KEY)), BY_ROOT), signed()) == "E_SIG"


def test_requirements_only_grow() -> None:
    ours = trust(require=("qwen3-*",), threshold=2)
    both = ours.with_delegated(record(require=("llama-*",)), None)
    assert both.requires(NAME)
    assert both.requires("llama-3")
    assert not both.requires("gemma")
    assert both.record.threshold == 2
    assert not Trust().requires(NAME)


# --------------------------------------------------------------------------- records


def test_a_trust_record_comes_back_from_its_bytes() -> None:
    given_one = record(trusted(KEY, revoked=REVOKED), trusted(OTHER, "root"), require=("*",))
    assert parse_trust(trust_bytes(given_one)) == given_one


@pytest.mark.parametrize(
    "change",
    [
        {"trust_version": 2},
        {"threshold": 0},
        {"require": ["[a]"]},
        {"more": 1},
        {"keys": [trusted(KEY).model_dump(), trusted(KEY).model_dump()]},
        {"keys": [trusted(KEY).model_dump() | {"key_id": OTHER.key_id}]},
        {"keys": [trusted(KEY).model_dump() | {"public_key": "AAAA"}]},
        {"keys": [trusted(KEY).model_dump() | {"public_key": "?"}]},
        {"keys": [trusted(KEY).model_dump() | {"roles": ["admin"]}]},
        {"keys": [trusted(KEY).model_dump() | {"roles": []}]},
        {"keys": [trusted(KEY).model_dump() | {"names": []}]},
        {"keys": [trusted(KEY).model_dump() | {"comment": "\x1b[2J"}]},
        {"keys": [trusted(KEY).model_dump() | {"not_before": "soon"}]},
    ],
)
def test_another_trust_record_is_refused(change: dict[str, Any]) -> None:
    tree = json.loads(trust_bytes(record(trusted(KEY)))) | change
    with pytest.raises(ArtifactError) as refusal:
        parse_trust(json.dumps(tree).encode())
    assert refusal.value.code == "E_SCHEMA"
