"""The domain of evidence: recorded when traces are made, read back, and never guessed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specctl.artifacts import Domain
from specctl.artifacts.manifest import Range
from specctl.collect.live import SetOptions, collect_live
from specctl.collect.prompts import Prompt
from specctl.errors import TraceSchemaError, UsageError
from specctl.logs.trace_set import TraceSet, domain_of
from specctl.policy import Policy, StaticTree
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.identity import config_digest, hardware_name, hub_revision
from specctl.runtime.load import Pair, load_pair, pair_domain

POLICY = Policy(shape=StaticTree(depth=2, top_k=2, num_tokens=4))


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair("embedded", "embedded", device="cpu")


def collect(pair: Pair, folder: Path, first: int, workload: str | None) -> Path:
    prompts = [Prompt(f"p{n}", "", (f"What is {n} plus {n}?",)) for n in range(first, first + 3)]
    settings = DecodeSettings(4)
    options = SetOptions(workload=workload)
    collect_live(pair, prompts, POLICY, settings, folder, options=options, batch_size=2)
    return folder


@pytest.fixture(scope="module")
def folders(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("domain")
    return collect(pair, place / "a", 0, "sums"), collect(pair, place / "b", 9, None)


def test_traces_know_where_they_are_from(pair: Pair, folders: tuple[Path, Path]) -> None:
    found, here = domain_of(TraceSet.open(folders[0])), pair_domain(pair, workload="sums")
    assert found.hardware == here.hardware == (hardware_name(pair.target.model.device),)
    assert found.dtype == "float32"
    assert found.workload == "sums"
    assert found.target_config_digest == config_digest(pair.target.folder)
    assert found.drafter_config_digest not in (None, found.target_config_digest)
    assert found.target_revision is None  # the embedded models are of no hub
    assert found.batch_size == Range(low=1, high=2)
    assert found.context_tokens is not None
    assert found.context_tokens.low < found.context_tokens.high


def with_domain(folder: Path, domain: object) -> TraceSet:
    [part] = TraceSet.open(folder).parts
    collect = {**part.header.collect, "domain": domain}
    header = part.header.model_copy(update={"collect": collect})
    return TraceSet((replace(part, header=header),))


def test_several_folders_name_all_machines_and_nothing_in_which_they_differ(
    folders: tuple[Path, Path],
) -> None:
    found, mine = domain_of(TraceSet.open(*folders)), domain_of(TraceSet.open(folders[1])).hardware
    assert (found.workload, found.dtype) == (None, "float32")
    far = with_domain(folders[0], {"hardware": ["NVIDIA H200"]})
    both = domain_of(TraceSet((*far.parts, *TraceSet.open(folders[1]).parts)))
    assert both.hardware == tuple(sorted({"NVIDIA H200", *(mine or ())}))


def test_a_header_without_a_domain_is_unknown(folders: tuple[Path, Path]) -> None:
    old = domain_of(with_domain(folders[0], None))
    assert old.dtype == "float32"
    assert old.model_copy(update={"dtype": None, "batch_size": None}) == Domain(
        context_tokens=old.context_tokens
    )
    for bad in ({"gpu": "H200"}, {"hardware": []}, {"dtype": "\x1b[2J"}):
        with pytest.raises(TraceSchemaError):
            domain_of(with_domain(folders[0], bad))


@pytest.mark.parametrize("word", ["Chat", "a b", "", "x" * 65, "a/b", "é"])
def test_a_workload_is_a_word_that_a_name_can_carry(pair: Pair, word: str) -> None:
    with pytest.raises(UsageError, match="workload"):
        pair_domain(pair, workload=word)


def test_a_hub_revision_is_the_commit_of_its_cache(tmp_path: Path) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    assert hub_revision(tmp_path / "models--a--b" / "snapshots" / commit) == commit
    assert hub_revision(tmp_path / "models--a--b" / "snapshots" / "main") is None
    assert hub_revision(tmp_path / commit) is None
