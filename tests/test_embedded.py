"""The pair that ships with the package: tokenizer, prompts and record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from specctl.embedded import PROMPTS, embedded_path, name_of
from specctl.errors import UsageError


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(embedded_path("target"))


def test_unknown_name_is_refused() -> None:
    with pytest.raises(UsageError, match="target, eagle3, small"):
        embedded_path("large")


def test_a_folder_of_the_pair_is_named_as_a_fixture() -> None:
    """Under whatever path an engine has loaded it; other models keep the name they were given."""
    assert name_of(str(embedded_path("eagle3"))) == "embedded:eagle3"
    assert name_of(str(embedded_path("target") / ".." / "target")) == "embedded:target"
    assert name_of("org/head") == "org/head"


def test_models_share_one_vocabulary(tokenizer: Any) -> None:
    configs = [AutoConfig.from_pretrained(embedded_path(name)) for name in ("target", "small")]
    head = json.loads((embedded_path("eagle3") / "config.json").read_text())
    assert {c.vocab_size for c in configs} == {head["vocab_size"]} == {len(tokenizer)}
    assert all(c.eos_token_id == tokenizer.eos_token_id for c in configs)


def test_plain_text_gets_one_bos_and_comes_back(tokenizer: Any) -> None:
    text = "def f(x):\n    return x + 12  # naïve ✓\n"
    ids = tokenizer(text).input_ids
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_chat_template_extends_a_conversation_by_its_end(tokenizer: Any) -> None:
    said = [{"role": "user", "content": "What is 2 + 3?"}]
    answered = [*said, {"role": "assistant", "content": "2 + 3 = 5.\n#### 5"}]
    asked = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template([*answered, *said], tokenize=False)
    assert asked == "<|bos|><|user|>\nWhat is 2 + 3?<|eos|>\n<|assistant|>\n"
    assert whole.startswith(asked + "2 + 3 = 5.\n#### 5<|eos|>\n<|user|>\n")
    assert tokenizer.encode(whole, add_special_tokens=False).count(tokenizer.bos_token_id) == 1


def test_prompts_are_distinct_and_of_five_categories() -> None:
    rows = [json.loads(line) for line in Path(PROMPTS).read_text(encoding="utf-8").splitlines()]
    assert len(rows) == len({r["id"] for r in rows}) == len({r["prompt"] for r in rows}) == 240
    assert {r["category"] for r in rows} == {"arithmetic", "strings", "code", "prose", "chat"}
    assert {r["category"] for r in rows if r.get("raw")} == {"code", "prose"}
