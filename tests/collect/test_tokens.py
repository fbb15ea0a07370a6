"""Token ids by choice: what is left out is gone, what is hashed keeps its equalities."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from specctl.collect.reader import TraceSet
from specctl.collect.store import TraceWriter
from specctl.collect.tables import read_tables
from specctl.collect.tokens import KEEP, TokenTreatment, token_treatment
from specctl.errors import InputError, InvariantError, TraceError, TraceMismatchError, UsageError
from specctl.policy import Policy, StaticTree
from specctl.replay.log import TEXT_COLUMNS, DenseLog
from specctl.replay.rounds import Rounds, replay
from tests.collect.rounds import header
from tests.collect.test_store import rows_of
from tests.replay.logs import random_traces
from tests.replay.test_text_features import POLICY as TEXT_POLICY

VOCABULARY = 40
KEY = b"k" * 32
HASHED = TokenTreatment("hash", KEY, VOCABULARY)


def test_hashing_is_a_permutation_that_follows_the_key() -> None:
    one, two = HASHED._permutation, TokenTreatment("hash", b"l" * 32, VOCABULARY)._permutation
    assert sorted(one) == list(range(VOCABULARY))
    assert one.tolist() == TokenTreatment("hash", KEY, VOCABULARY)._permutation.tolist()
    assert one.tolist() != two.tolist()


@pytest.mark.parametrize("treatment", [KEEP, HASHED, TokenTreatment("drop")])
def test_columns_are_treated_and_others_untouched(treatment: TokenTreatment) -> None:
    for table, rows in rows_of("a").items():
        treated = treatment.applied(table, rows)
        for name in rows.schema.names:
            before, after = rows[name].to_pylist(), treated[name].to_pylist()
            if not name.endswith("token_id") or treatment.mode == "keep":
                assert after == before
            elif treatment.mode == "drop":
                assert after == [None] * len(before)
            else:
                assert after == [treatment._permutation[token] for token in before]
                assert after != before


def test_an_id_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvariantError, match="below the vocabulary's size, 3"):
        TokenTreatment("hash", KEY, 3).applied("nodes", rows_of("a")["nodes"])


def test_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "tokens"
    first = token_treatment("hash", path, VOCABULARY)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert token_treatment("hash", path, VOCABULARY) == first
    assert path.read_bytes().hex() not in str(first.header)
    path.write_bytes(b"short")
    with pytest.raises(InputError, match="5 bytes"):
        token_treatment("hash", path, VOCABULARY)


@pytest.mark.parametrize(("mode", "key"), [("hash", None), ("drop", Path("k")), ("no", None)])
def test_options_that_do_not_fit_are_refused(mode: str, key: Path | None) -> None:
    with pytest.raises(UsageError, match="--tokens"):
        token_treatment(mode, key, VOCABULARY)


def test_a_set_has_one_treatment(tmp_path: Path) -> None:
    made = header(collect={"max_new_tokens": 32, **HASHED.header})
    with TraceWriter.open(tmp_path / "set", made, tokens=HASHED) as writer:
        writer.commit(["a"], rows_of("a"))
    other = TokenTreatment("hash", b"l" * 32, VOCABULARY)
    for number, treatment in enumerate((KEEP, other, TokenTreatment("drop"))):
        changed = header(collect={"max_new_tokens": 32, **treatment.header})
        with pytest.raises(TraceMismatchError, match="token ids: expected --tokens"):
            TraceWriter.open(tmp_path / "set", changed, resume=True)
        TraceWriter.open(tmp_path / f"{number}", changed).close()
        with pytest.raises(TraceMismatchError, match="token ids: expected --tokens"):
            TraceSet.open(tmp_path / "set", tmp_path / f"{number}")


# --------------------------------------------------------------------------- replay


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DenseLog]:
    """One dense log under each treatment."""
    folder = tmp_path_factory.mktemp("tokens")
    traces = random_traces(folder / "made", num_prompts=3)
    [log], found = traces.logs, {}
    for treatment in (KEEP, HASHED, TokenTreatment("drop")):
        collect = {**traces.header.collect, **treatment.header}
        made = traces.header.model_copy(update={"collect": collect})
        with TraceWriter.open(folder / treatment.mode, made, tokens=treatment) as writer:
            for commit in log.commits:
                writer.commit(commit.prompt_ids, read_tables(log.place, commit))
        found[treatment.mode] = DenseLog.open(TraceSet.open(folder / treatment.mode))
    return found


def counts(rounds: Rounds) -> list[object]:
    return [value.tolist() for value in vars(rounds).values() if hasattr(value, "tolist")]


def test_replay_does_not_need_tokens(logs: dict[str, DenseLog]) -> None:
    policy = Policy(shape=StaticTree(depth=4, top_k=3, num_tokens=10))
    keep, hashed, drop = (counts(replay(logs[name], [policy])[0]) for name in logs)
    assert keep
    assert keep == hashed == drop


def test_text_features_need_equality_alone(logs: dict[str, DenseLog]) -> None:
    keep, hashed = (counts(replay(logs[name], [TEXT_POLICY])[0]) for name in ("keep", "hash"))
    assert keep
    assert keep == hashed
    with pytest.raises(TraceError, match="--tokens keep or hash, found --tokens drop"):
        replay(logs["drop"], [TEXT_POLICY])


def test_denied_tokens_need_identity(logs: dict[str, DenseLog]) -> None:
    for mode in ("hash", "drop"):
        with pytest.raises(TraceError, match=f"--tokens keep, found --tokens {mode}"):
            logs[mode].check_tokens("tokens that are never relaxed", "keep")
    assert next(logs["hash"].chunks(extra=TEXT_COLUMNS)).token_ids is not None
