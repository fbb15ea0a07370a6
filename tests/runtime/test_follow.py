"""`Decoder.follow`: by words, and as strict as the decoder's own start."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.artifacts import Origin, save_artifact
from specctl.errors import ArtifactError, RegistryError, UsageError
from specctl.policy import Policy, StaticTree
from specctl.registry import Writer, init_registry, promote, push, read_package
from specctl.registry.trust import Trust
from specctl.runtime.api import Decoder
from specctl.runtime.load import Pair, pair_domain
from tests.artifacts.examples import EVIDENCE

NAME = "embedded+eagle3@cpu:demo"
PLAYED = Policy(shape=StaticTree(depth=4, top_k=4, num_tokens=16))
FITTED = Policy(shape=StaticTree(depth=3, top_k=4, num_tokens=12))


def fitted(folder: Path, pair: Pair, hardware: str | None = None) -> Path:
    """An artifact that was fitted here, or on other hardware."""
    domain = pair_domain(pair, batch_size=2)
    if hardware is not None:
        domain = domain.model_copy(update={"hardware": (hardware,)})
    origin = Origin(pair=pair.fingerprint, evidence=EVIDENCE, domain=domain)
    save_artifact(folder, FITTED, origin, card="# fitted\n")
    return folder


def test_a_folder_that_is_not_there_yet_is_said(
    pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = Decoder(pair, PLAYED)
    decoder.follow("polcy", decoder.loop_for(64))
    assert "artifact folder polcy does not exist yet" in caplog.text


@pytest.mark.parametrize("allow_mismatch", [False, True])
def test_what_was_fitted_elsewhere_is_treated_as_at_the_start(
    allow_mismatch: bool,  # noqa: FBT001
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By the same rule, whether it is there first or comes later."""
    decoder = Decoder.from_pretrained(
        "embedded", "embedded", device="cpu", batch_size=2, allow_mismatch=allow_mismatch
    )
    loop = decoder.loop_for(64)
    played = loop.policy
    follower = decoder.follow(tmp_path / "policy", loop)
    follower.look()
    assert not follower.poll(), "nothing there for now"
    folder = fitted(tmp_path / "policy", decoder.pair, "NVIDIA H200")
    follower.look()
    assert follower.poll() == allow_mismatch
    assert loop.policy == (FITTED if allow_mismatch else played)
    assert "W_DOMAIN" in caplog.text
    if not allow_mismatch:
        assert getattr(follower.last_error, "code", None) == "W_DOMAIN"
        with pytest.raises(ArtifactError, match="W_DOMAIN"):
            Decoder.from_pretrained(
                "embedded", "embedded", policy=str(folder), device="cpu", batch_size=2
            )


def test_an_alias_by_the_words_of_the_command_line(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "team"
    writer = Writer(init_registry(place), Trust(), "test")
    package = read_package(fitted(tmp_path / "policy", pair))
    push(writer, package, NAME)
    promote(writer, NAME, "prod", package.digest)
    decoder = Decoder(pair, PLAYED, batch_size=2)
    loop = decoder.loop_for(64)
    follower = decoder.follow(f"{place}/{NAME}@prod", loop)
    follower.look()
    assert follower.poll()
    assert (loop.policy, follower.digest) == (FITTED, package.digest)
    monkeypatch.setenv("SPECCTL_REGISTRY", str(place))
    again = decoder.follow(f"{NAME}@prod", loop)
    again.look()
    assert not again.poll(), "it plays already"
    assert again.digest == package.digest


def test_what_cannot_be_followed_is_said_at_once(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = Decoder(pair, PLAYED)
    loop = decoder.loop_for(64)
    monkeypatch.delenv("SPECCTL_REGISTRY", raising=False)
    with pytest.raises(UsageError, match="or set SPECCTL_REGISTRY"):
        decoder.follow(f"{NAME}@prod", loop)
    with pytest.raises(RegistryError, match="E_NO_REGISTRY"):
        decoder.follow(f"{tmp_path}/nowhere/{NAME}@prod", loop)
    init_registry(tmp_path / "team")
    with pytest.raises(UsageError, match="is not NAME@ALIAS"):
        decoder.follow(f"{tmp_path}/team/{NAME}", loop)


def test_a_folder_among_the_histories_of_a_registry_is_no_policy(
    pair: Pair, tmp_path: Path
) -> None:
    """Whoever may write there could otherwise pass by signatures, floors and digests."""
    init_registry(tmp_path / "team")
    folder = fitted(tmp_path / "team" / "policy", pair)
    decoder = Decoder(pair, PLAYED, batch_size=2)
    loop = decoder.loop_for(64)
    follower = decoder.follow(folder, loop)
    follower.look()
    assert not follower.poll()
    assert "skips a registry's checks" in str(follower.last_error)
    assert loop.policy == PLAYED
