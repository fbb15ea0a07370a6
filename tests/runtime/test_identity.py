"""Models by their identity: digests, tokenizers, and what cannot be loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import errors
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from specctl.embedded import embedded_path
from specctl.errors import ModelConfigError, ModelError
from specctl.runtime.checkpoints import kind_of
from specctl.runtime.identity import (
    hub_revision,
    load_tokenizer,
    model_folder,
    quietly,
    tokenizer_digest,
    weights_digest,
)
from specctl.runtime.load import load_pair

VOCAB = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4}
MERGES = [("a", "b"), ("b", "c")]


def tokenizer(
    merges: list[tuple[str, str]] = MERGES, vocab: dict[str, int] = VOCAB, added: str | None = None
) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if added is not None:
        backend.add_tokens([added])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


OTHERS = {
    "other merges, the same vocabulary": tokenizer(MERGES[::-1]),
    "ids that changed places": tokenizer(vocab={**VOCAB, "ab": 4, "bc": 3}),
    "an added token": tokenizer(added="<|im_start|>"),
    "another added token": tokenizer(added="<|im_end|>"),
}


def test_each_tokenizer_has_a_digest_of_its_own() -> None:
    digests = {tokenizer_digest(one) for one in (tokenizer(), *OTHERS.values())}
    assert len(digests) == 1 + len(OTHERS)


def test_what_a_call_sets_is_no_part_of_a_tokenizer() -> None:
    used = tokenizer()
    used.pad_token = "a"
    before = tokenizer_digest(tokenizer())
    used(["ab", "abc"], padding="max_length", truncation=True, max_length=7)
    assert tokenizer_digest(used) == before


# --------------------------------------------------------------------------- models


def test_a_models_folder_gives_the_digests_of_its_pair() -> None:
    pair = load_pair("embedded", "embedded", device="cpu").fingerprint
    assert weights_digest(embedded_path("target")) == pair.target_digest
    assert weights_digest(embedded_path("eagle3")) == pair.drafter_digest
    assert tokenizer_digest(load_tokenizer(embedded_path("target"))) == pair.tokenizer_digest


def test_a_folder_without_a_model_or_its_tokenizer_is_refused_on_one_line(tmp_path: Path) -> None:
    """Each state that a half-finished download leaves; transformers has 64 lines to say of a
    missing tokenizer."""
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match=r"no config\.json, but model\.gguf; give its file /"):
        weights_digest(tmp_path)
    shutil.copy(embedded_path("target") / "config.json", tmp_path)
    with pytest.raises(ModelError, match=r"no weights, .* among config\.json, model\.gguf; downl"):
        weights_digest(tmp_path)
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "deleted")
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read: no such file"):
        weights_digest(tmp_path)
    (tmp_path / "deleted").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d\n")
    with pytest.raises(ModelError, match=r"is a pointer of Git LFS, not the weights; .*lfs pull"):
        weights_digest(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to(tmp_path / "no blob")
    with pytest.raises(ModelError, match=r"config\.json is gone; download the model again"):
        weights_digest(tmp_path)
    (tmp_path / "config.json").unlink()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(embedded_path("target") / name, tmp_path)
    with pytest.raises(ModelError, match=r"no tokenizer, such as .*, among") as refused:
        load_tokenizer(tmp_path)
    assert len(str(refused.value).splitlines()) == 1


def test_a_hub_id_is_found_in_the_cache_behind_its_links(tmp_path: Path) -> None:
    source, commit = embedded_path("eagle3"), "a" * 40
    place = tmp_path / "models--me--head"
    for folder in ("blobs", "refs", f"snapshots/{commit}"):
        (place / folder).mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)

    def found() -> Path:
        return model_folder("me/head", embedded_default="eagle3", cache=str(tmp_path))

    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, place / "blobs")
        (place / "snapshots" / commit / name).symlink_to(f"../../blobs/{name}")
        if name == "config.json":
            with pytest.raises(ModelError, match=r"has no weights, .* among config"):
                weights_digest(found())
    assert weights_digest(found()) == weights_digest(source)
    assert (hub_revision(found()), kind_of(found())) == (commit, "eagle3")


# --------------------------------------------------------------------------- loading


ANSWER: Any = SimpleNamespace(headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "offline", "says"),
    [
        (errors.LocalEntryNotFoundError("x"), "1", "HF_HUB_OFFLINE is set; .*=0 hf download me/it"),
        (
            errors.LocalEntryNotFoundError("x"),
            "",
            "does not answer .*download me/it --local",
        ),
        (errors.GatedRepoError("x", response=ANSWER), "", "gated; accept .*: hf auth login"),
        (
            errors.RepositoryNotFoundError("x", response=ANSWER),
            "",
            "not known .*check the name",
        ),
        (errors.RevisionNotFoundError("x", response=ANSWER), "", "without that revision"),
        (PermissionError(13, "no"), "", "not to be stored: .*permissions"),
    ],
)
def test_a_hub_id_that_cannot_be_fetched_is_refused_with_the_next_step(
    error: Exception, offline: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    with pytest.raises(ModelError, match=f"model 'me/it' is no folder here and, as a .*{says}"):
        model_folder("me/it", embedded_default="target")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError("\nno backend\nand 60 lines more"), "does not fit the others (ValueError); "),
        (ImportError("pip this", name="tiktoken"), "needs tiktoken; install tikt"),
    ],
    ids=repr,
)
def test_every_failure_of_transformers_is_named_on_one_line(
    error: Exception, says: str, tmp_path: Path
) -> None:
    class Factory:
        @staticmethod
        def from_pretrained(*_: Any, **__: Any) -> None:
            raise error

    before = logging.get_verbosity()
    with pytest.raises(ModelError) as refused:
        quietly(Factory, tmp_path)
    assert says in str(refused.value)
    assert refused.value.__cause__ is error
    assert logging.get_verbosity() == before


def test_weights_in_several_files_need_their_index(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(embedded_path("target"), folder)
    (folder / "model.safetensors").rename(folder / "model-1-of-2.safetensors")
    (folder / "model-2-of-2.safetensors").touch()
    with pytest.raises(ModelError, match=r"several files and no index .*download \*\.index\.json"):
        load_pair(str(folder), None, device="cpu")


def test_weights_that_a_config_leaves_unused_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a config.json that states fewer layers than there are."""
    folder = tmp_path / "target"
    shutil.copytree(embedded_path("target"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 7}))
    load_pair(str(folder), None, device="cpu")
    assert (
        "has 9 tensors that its config.json leaves unused, such as model.layers.7." in caplog.text
    )


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "unheard-of"])
def test_a_quantised_target_is_refused_by_name_before_its_weights_are_read(
    method: str, tmp_path: Path
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(embedded_path("target"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    for path in folder.glob("*.safetensors"):
        path.write_bytes(b"not read")
    with pytest.raises(ModelConfigError, match=f"{method} weights on cpu"):
        load_pair(str(folder), None, device="cpu")
