"""Settings of a registry: they tighten for everybody, and delegate by a root that a user trusts."""

from __future__ import annotations

import json
from pathlib import Path

from specctl.artifacts.registry import Author, Note, Package, promote, pull, push
from specctl.artifacts.registry.entries import Settings
from specctl.artifacts.registry.fsck import fsck
from specctl.artifacts.registry.revising import current_settings, write_settings
from specctl.artifacts.registry.settling import effective_trust
from specctl.artifacts.signing import SigningKey, Trust, TrustRecord
from specctl.artifacts.signing.records import Revocation
from tests.artifacts.registry.test_moving import Overtaken
from tests.artifacts.registry.test_pulling import (
    PROD,
    code_of,
    pull_as,
    real,
    signed_writer,
    store,
    trusting,
)
from tests.artifacts.registry.worlds import NAME, HandClock, MemoryStore, reader_in, registry_on

__all__ = ["real", "store"]  # fixtures


def settle(
    store: MemoryStore,
    record: TrustRecord,
    *keys: SigningKey,
    clock: HandClock | None = None,
    expires: str | None = None,
) -> None:
    data = json.dumps(record.model_dump(mode="json")).encode()
    note = Note("set up", expires)
    write_settings(registry_on(store, clock), data, Author("root", keys), note=note)


def test_settings_require_for_everybody_and_delegate_by_a_root(
    store: MemoryStore, real: tuple[Package, Package], tmp_path: Path
) -> None:
    root, publisher = SigningKey.generate(), SigningKey.generate()
    settle(store, trusting(publisher, "publisher", "promoter"), root)
    assert code_of(pull, registry_on(store), PROD, reader_in(tmp_path)) == "E_SIG"
    push(signed_writer(store, publisher, trust=Trust(trusting(root, "root"))), real[0], NAME)
    writer = signed_writer(store, publisher, trust=Trust(trusting(root, "root")))
    promote(writer, NAME, "prod", real[0].digest)
    assert pull_as(store, tmp_path, trusting(root, "root")).artifact.digest == real[0].digest
    assert code_of(pull_as, store, tmp_path, trusting(SigningKey.generate(), "root")) == "E_SIG"


def revoked(record: TrustRecord) -> TrustRecord:
    key = record.keys[0].model_copy(
        update={"revoked": Revocation(at="2026-01-01T00:00:00Z", reason="stolen")}
    )
    return record.model_copy(update={"keys": (key,)})


NOBODY = TrustRecord(trust_version=1, keys=(), require=(), threshold=1)


def test_unsigned_settings_only_tighten_whoever_wrote_them_last(
    store: MemoryStore, real: tuple[Package, Package], tmp_path: Path
) -> None:
    """Requirements and revocations of all settings add up for who trusts no root."""
    key, root = SigningKey.generate(), SigningKey.generate()
    push(signed_writer(store, key), real[0], NAME)
    promote(signed_writer(store, key), NAME, "prod", real[0].digest)
    believes = trusting(key, "publisher", "promoter").model_copy(update={"require": ()})
    assert pull_as(store, tmp_path / "1", believes)
    settle(store, revoked(trusting(key, "publisher")), root)
    assert code_of(pull_as, store, tmp_path / "2", believes) == "E_SIG"
    settle(store, NOBODY.model_copy(update={"require": ("qwen3*",)}))
    settle(store, NOBODY)
    assert code_of(pull_as, store, tmp_path / "3", believes) == "E_SIG"
    assert code_of(pull_as, store, tmp_path / "4", NOBODY) == "E_SIG"


def test_who_trusts_a_root_uses_no_registry_without_its_settings(
    store: MemoryStore, real: tuple[Package, Package], tmp_path: Path
) -> None:
    """A mirror that leaves the settings out serves a first-time user nothing."""
    root, publisher = SigningKey.generate(), SigningKey.generate()
    push(signed_writer(store, publisher), real[0], NAME)
    promote(signed_writer(store, publisher), NAME, "prod", real[0].digest)
    settle(store, trusting(publisher, "publisher", "promoter"), root)
    by_root = trusting(root, "root").model_copy(update={"require": ()})
    assert pull_as(store, tmp_path / "1", by_root)
    store.delete("log/_settings/000000000000.json")
    assert code_of(pull_as, store, tmp_path / "2", by_root) == "E_SIG"
    writer = signed_writer(store, publisher, trust=Trust(by_root))
    assert code_of(promote, writer, NAME, "prod", real[0].digest) == "E_SIG"


def test_a_root_may_be_that_of_some_registries_alone(
    store: MemoryStore, real: tuple[Package, Package], tmp_path: Path
) -> None:
    """An unsigned registry beside a signed one stays usable, and only that."""
    root, publisher = SigningKey.generate(), SigningKey.generate()

    def scoped(*urls: str) -> TrustRecord:
        key = trusting(root, "root").keys[0].model_copy(update={"registries": urls})
        return NOBODY.model_copy(update={"keys": (key,)})

    assert pull_as(store, tmp_path / "1", scoped("elsewhere"))
    assert code_of(pull_as, store, tmp_path / "2", scoped("elsewhere", "memory")) == "E_SIG"
    push(signed_writer(store, publisher), real[0], NAME)
    promote(signed_writer(store, publisher), NAME, "prod", real[0].digest)
    settle(store, trusting(publisher, "publisher", "promoter"), root)
    assert pull_as(store, tmp_path / "3", scoped("memory"))
    # Where it is no root it delegates nothing; what it requires is asked for all the same.
    assert code_of(pull_as, store, tmp_path / "4", scoped("elsewhere")) == "E_SIG"


def test_settings_cannot_be_loosened_without_the_root(store: MemoryStore, tmp_path: Path) -> None:
    """An attacker who may write appends empty settings; a user who trusts a root sees it."""
    root = SigningKey.generate()
    settle(store, trusting(root, "publisher"), root)
    nobody = TrustRecord(trust_version=1, keys=(), require=(), threshold=1)
    settle(store, nobody)
    assert code_of(pull_as, store, tmp_path, trusting(root, "root")) == "E_SIG"


def test_settings_put_back_are_refused(store: MemoryStore, tmp_path: Path) -> None:
    reader = reader_in(tmp_path)
    nobody = TrustRecord(trust_version=1, keys=(), require=(), threshold=1)
    settle(store, nobody)
    pull(registry_on(store), PROD, reader)
    store.delete("log/_settings/000000000000.json")
    assert code_of(pull, registry_on(store), PROD, reader) == "E_ROLLBACK"


# ------------------------------------------------------------------ several roots

A, B = "team-a+drafter", "team-b+drafter"
MAIN, OTHERS = SigningKey.generate(), SigningKey.generate()
STOLEN = SigningKey.generate()


def two_roots() -> Trust:
    """One root is for every name, the other for those of one team."""
    main, others = trusting(MAIN, "root").keys[0], trusting(OTHERS, "root").keys[0]
    others = others.model_copy(update={"names": ("_settings", "team-b*")})
    return Trust(NOBODY.model_copy(update={"keys": (main, others)}))


def test_the_root_of_a_team_loosens_no_other_team_s_names(store: MemoryStore) -> None:
    """Requirement, threshold, revocation and keys: each name has those of its newest root."""
    of_main = revoked(trusting(STOLEN, "publisher")).model_copy(
        update={"require": ("*",), "threshold": 2}
    )
    of_others = trusting(STOLEN, "publisher").model_copy(update={"require": ("team-c*",)})
    settle(store, of_main, MAIN)
    settle(store, of_others, OTHERS)
    here = effective_trust(registry_on(store), two_roots(), A)
    assert (here.requires(A), here.record.threshold) == (True, 2)
    stolen = here.record.key(STOLEN.key_id)
    assert stolen is not None
    assert stolen.revoked is not None
    there = effective_trust(registry_on(store), two_roots(), B)
    assert (there.requires(B), there.record.threshold) == (False, 1)
    settle(store, NOBODY, MAIN)  # the root of all names may, for all of them
    assert not effective_trust(registry_on(store), two_roots(), A).requires(A)
    assert effective_trust(registry_on(store), two_roots(), B).record.key(STOLEN.key_id) is None


def test_a_name_of_no_root_has_all_that_settings_ever_required(store: MemoryStore) -> None:
    """Of who trusts the team's root alone."""
    settle(store, NOBODY.model_copy(update={"require": ("team-a*",)}), OTHERS)
    settle(store, NOBODY, OTHERS)
    team = two_roots().record.keys[1:]
    trust = Trust(NOBODY.model_copy(update={"keys": team}))
    assert effective_trust(registry_on(store), trust, A).requires(A)
    assert not effective_trust(registry_on(store), trust, B).requires(B)


def test_a_registry_without_settings_of_the_root_for_a_name_is_not_used_for_it(
    store: MemoryStore,
) -> None:
    """Those of the other root alone: whoever serves them may have left out the first."""
    settle(store, NOBODY, OTHERS)
    assert code_of(effective_trust, registry_on(store), two_roots(), A) == "E_SIG"
    assert effective_trust(registry_on(store), two_roots(), B)


def test_fsck_tells_for_which_name_settings_are_not_there(
    store: MemoryStore, real: tuple[Package, Package]
) -> None:
    """Those of the name's own root; what other settings require is looked at all the same."""
    for name in (A, B, NAME):
        push(signed_writer(store), real[0], name)
    settle(store, NOBODY.model_copy(update={"require": (B,)}), OTHERS)
    found = list(fsck(registry_on(store), two_roots()))
    told = {one.found for one in found if one.place == "settings"}
    assert {name for name in (A, B, NAME) if any(name in text for text in told)} == {A, NAME}
    assert {one.place for one in found if one.code == "E_SIG"} == {
        "settings",
        f"{B}@{real[0].digest}",
        f"{B}, generation 0",
    }


def test_settings_of_another_root_neither_renew_nor_end_those_that_decide(
    store: MemoryStore,
) -> None:
    clock = HandClock()
    soon, later = HandClock(clock.now_s + 1).utc(), HandClock(clock.now_s + 100).utc()
    settle(store, NOBODY, MAIN, expires=later)
    settle(store, NOBODY, OTHERS, expires=soon)
    clock.now_s += 10
    assert effective_trust(registry_on(store, clock), two_roots(), A)
    assert code_of(effective_trust, registry_on(store, clock), two_roots(), B) == "E_STALE"
    settle(store, NOBODY, OTHERS)
    clock.now_s += 100
    assert code_of(effective_trust, registry_on(store, clock), two_roots(), A) == "E_STALE"
    assert effective_trust(registry_on(store, clock), two_roots(), B)


def test_a_root_that_has_expired_does_not_sign_on_by_an_old_date(store: MemoryStore) -> None:
    """Behind settings of another root; alone, or dated ahead, nothing tells."""
    old = SigningKey.generate()
    line = trusting(old, "root").keys[0]
    line = line.model_copy(update={"not_after": "2020-06-01T00:00:00Z"})
    record = two_roots().record
    trust = Trust(record.model_copy(update={"keys": (*record.keys, line)}))
    then = HandClock(1_580_515_200.0)  # February 2020, while the key was good
    settle(store, NOBODY.model_copy(update={"require": ("*",)}), old, clock=then)
    assert effective_trust(registry_on(store), trust, A).requires(A)
    settle(store, NOBODY.model_copy(update={"require": ("*",)}), MAIN)
    settle(store, NOBODY, old, clock=then)
    assert code_of(effective_trust, registry_on(store), trust, A) == "E_SIG"
    settle(store, NOBODY, OTHERS)  # the newest are right again, and decide about no name of team A
    assert effective_trust(registry_on(store), trust, A).requires(A)


def test_settings_from_a_clock_that_is_ahead_shut_nobody_out_later(store: MemoryStore) -> None:
    clock = HandClock()
    settle(store, NOBODY, MAIN, clock=HandClock(clock.now_s + 400 * 86_400))
    settle(store, NOBODY, MAIN, clock=clock)
    for later_days in (0, 1, 399, 401):
        now = HandClock(clock.now_s + later_days * 86_400)
        assert effective_trust(registry_on(store, now), two_roots(), A)


# ------------------------------------------------------------------ set anew


def test_settings_that_lost_a_race_are_refused(store: MemoryStore) -> None:
    """Looked at again at the commit: another owner was faster."""
    settle(store, NOBODY, MAIN)
    base = current_settings(registry_on(store))
    assert base is not None
    slow = Overtaken(store)
    stolen = revoked(trusting(STOLEN, "publisher"))
    slow.meanwhile = lambda: settle(store, stolen, MAIN)
    data = json.dumps({**base, "require": ["*"]}).encode()
    author = Author("root", (MAIN,))
    assert code_of(write_settings, registry_on(slow), data, author, note=Note()) == (
        "E_SETTINGS_CONFLICT"
    )
    again = current_settings(registry_on(store))
    assert again is not None
    assert (again["generation"], again["require"]) == (1, ["qwen3*"])
    data = json.dumps({**again, "require": ["*"]}).encode()
    write_settings(registry_on(store), data, author, note=Note())
    here = effective_trust(registry_on(store), two_roots(), A)
    assert (here.requires(A), here.record.generation) == (True, None)


def test_an_entry_holds_no_generation_of_its_record(store: MemoryStore) -> None:
    """Only what is shown does: older readers would refuse such an entry."""
    settle(store, NOBODY, MAIN)
    log = registry_on(store).settings_log()
    tree = {**NOBODY.model_dump(mode="json"), "generation": 0}
    made = Settings(settings=tree)
    log.append(made, Author("x", (MAIN,)), created=HandClock().utc(), note=Note())
    assert code_of(effective_trust, registry_on(store), two_roots(), A) == "E_SCHEMA"
