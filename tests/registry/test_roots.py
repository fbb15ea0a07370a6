"""Settings of several roots: each decides about its own names; set anew, nothing is taken back."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from specctl.artifacts.signing import SigningKey, Trust
from specctl.errors import UsageError
from specctl.registry import Author, Note, push
from specctl.registry.entries import Settings
from specctl.registry.fsck import fsck
from specctl.registry.rehearsing import rehearse_settings
from specctl.registry.revising import current_settings, write_settings
from specctl.registry.settling import effective_trust
from tests.registry.pulls import code_of, trusting
from tests.registry.three_versions import Overtaken
from tests.registry.trust_records import NOBODY, revoked, settle
from tests.registry.worlds import NAME, HandClock, package, registry_on, writer_on
from tests.stores.memory import MemoryStore

A, B = "team-a+drafter", "team-b+drafter"
MAIN, OTHERS = SigningKey.generate(), SigningKey.generate()
STOLEN = SigningKey.generate()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


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


def test_fsck_tells_for_which_name_settings_are_not_there(store: MemoryStore) -> None:
    """Those of the name's own root; what other settings require is looked at all the same."""
    one = package("one")
    for name in (A, B, NAME):
        push(writer_on(store), one, name)
    settle(store, NOBODY.model_copy(update={"require": (B,)}), OTHERS)
    found = list(fsck(registry_on(store), two_roots()))
    told = {one.found for one in found if one.place == "settings"}
    assert {name for name in (A, B, NAME) if any(name in text for text in told)} == {A, NAME}
    assert {one.place for one in found if one.code == "E_SIG"} == {
        "settings",
        f"{B}@{one.digest}",
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


@pytest.mark.parametrize("form", ["{}", "oci://host/a/b?log={}"])
def test_another_way_to_a_folder_is_no_way_around_its_root(form: str, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    real, link, other = (form.format(tmp_path / word) for word in ("real", "link", "other"))
    for scope, asked in ((real, link), (link, real)):
        key = trusting(MAIN, "root").keys[0].model_copy(update={"registries": (scope,)})
        trust = Trust(NOBODY.model_copy(update={"keys": (key,)}))
        assert [trust.at(url).has_root for url in (scope, asked, other)] == [True, True, False]


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


def test_the_first_settings_can_lose_a_race_too(store: MemoryStore) -> None:
    """Two owners begin at once: neither has seen what the other requires."""
    slow = Overtaken(store)
    slow.meanwhile = lambda: settle(store, trusting(STOLEN, "publisher"), MAIN)
    data, author = json.dumps(NOBODY.model_dump(mode="json")).encode(), Author("root", (MAIN,))
    assert code_of(write_settings, registry_on(slow), data, author, note=Note()) == (
        "E_SETTINGS_CONFLICT"
    )
    assert len(registry_on(store).settings_log().entries) == 1


def test_nobody_replaces_signed_settings_by_unsigned_ones(store: MemoryStore) -> None:
    """Not by mistake: whoever trusts a root would be shut out, and this user would not see it."""
    settle(store, NOBODY, MAIN)
    data = json.dumps({**NOBODY.model_dump(mode="json"), "require": ["*"]}).encode()
    for author, is_refused in ((Author("bob"), True), (Author("bob", (MAIN,)), False)):
        with nullcontext() if not is_refused else pytest.raises(UsageError, match="--key"):
            rehearse_settings(registry_on(store), data, author, Trust(), Note(), expect=0)


def test_expired_settings_say_still_what_must_be_signed(store: MemoryStore) -> None:
    """`fsck` tells what is wrong beside them: expiry is no damage, an unsigned entry is."""
    clock = HandClock()
    push(writer_on(store, clock), package("unsigned"), A)
    soon = HandClock(clock.now_s + 60).utc()
    settle(
        store,
        trusting(STOLEN, "publisher").model_copy(update={"require": ("*",)}),
        MAIN,
        clock=clock,
        expires=soon,
    )
    later = registry_on(store, HandClock(clock.now_s + 120))
    found = {(one.code, one.is_damage) for one in fsck(later, two_roots())}
    assert found == {("E_STALE", False), ("E_SIG", True)}


def test_an_entry_holds_no_generation_of_its_record(store: MemoryStore) -> None:
    """Only what is shown does: older readers would refuse such an entry."""
    settle(store, NOBODY, MAIN)
    log = registry_on(store).settings_log()
    tree = {**NOBODY.model_dump(mode="json"), "generation": 0}
    made = Settings(settings=tree)
    log.append(made, Author("x", (MAIN,)), created=HandClock().utc(), note=Note())
    assert code_of(effective_trust, registry_on(store), two_roots(), A) == "E_SCHEMA"
