"""Families of decoders: tree verification and compaction must be right for each of them.

Random weights, transformers' own classes. The reference for every node is its path, run alone
and uncached with transformers' own attention.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, PreTrainedConfig

from specctl.errors import InvariantError, ModelConfigError
from specctl.policy import Policy, RootOnly, StaticTree
from specctl.runtime.api import Decoder
from specctl.runtime.attention import ATTENTION, Pass
from specctl.runtime.cached_model import CachedModel, check_model
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.drafter import SmallModelDrafter
from specctl.runtime.requests import Request
from tests.runtime.captured import make_loop, pair, tape
from tests.runtime.toy import FAMILIES, GROUPED, toy_config, toy_model, toy_requests
from tests.trees import ancestor_mask

PREFIX = [5, 9, 2, 7, 30, 11]
PARENT = [-1, 0, 0, 1, 1, 2, 3]
TOKENS = [40, 41, 42, 43, 44, 45, 46]
PATH = [0, 1, 3, 6]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> PreTrainedConfig:
    return FAMILIES[request.param]


def path_to(node: int) -> list[int]:
    return [] if node < 0 else [*path_to(PARENT[node]), TOKENS[node]]


def tree_pass(offsets: list[int], tokens: Tensor, parent: Tensor, depth: Tensor) -> Pass:
    """One tree behind each of some texts."""
    rows, nodes = tokens.shape
    prefixes, steps = torch.tensor(offsets), torch.arange(nodes)
    return Pass(
        token_ids=tokens.flatten(),
        position_ids=(prefixes[:, None] + depth).flatten(),
        row=torch.arange(rows).repeat_interleave(nodes),
        place=(prefixes[:, None] + steps).flatten(),
        prefixes=prefixes,
        offsets=nodes * torch.arange(rows + 1),
        max_nodes=nodes,
        behind=0,
        width=max(offsets) + nodes,
        visible=ancestor_mask(parent, 4).expand(rows, -1, -1).flatten(0, 1),
        exact=True,
    )


def test_tree_logits_equal_each_path_alone(family: PreTrainedConfig) -> None:
    model = toy_model(0, family)
    reference = toy_model(0, family)
    reference.set_attn_implementation("eager")
    cached = CachedModel(model)
    cached.allocate(2, 32)
    parent = torch.tensor([PARENT])
    depth = torch.tensor([[len(path_to(node)) - 1 for node in range(len(PARENT))]])
    with torch.inference_mode():
        for slot in (0, 1):  # a ragged batch: the second slot holds a shorter prefix
            cached.extend(slot, 0, torch.tensor([PREFIX[slot:]]))
        offsets = [len(PREFIX), len(PREFIX) - 1]
        result = cached.forward(tree_pass(offsets, torch.tensor([TOKENS] * 2), parent, depth))
        logits = result.logits.view(2, len(PARENT), -1)
        for row in (0, 1):
            for node in range(len(PARENT)):
                text = torch.tensor([PREFIX[row:] + path_to(node)])
                alone = reference(input_ids=text, use_cache=False).logits[0, -1]
                torch.testing.assert_close(logits[row, node], alone, atol=2e-5, rtol=1e-4)
        cached.cache.commit(torch.tensor(offsets), torch.tensor([PATH, [0, 2, -1, -1]]))
        kept = [PREFIX + [TOKENS[n] for n in PATH], [*PREFIX[1:], TOKENS[0], TOKENS[2]]]
        for row, text in enumerate(kept):
            after = cached.extend(row, len(text), torch.tensor([[77]])).logits[-1]
            alone = reference(input_ids=torch.tensor([[*text, 77]]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(after, alone, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("captures", [False, True])
def test_decoding_equals_transformers_generate(family: PreTrainedConfig, *, captures: bool) -> None:
    target, requests = toy_model(0, family), toy_requests(3, max_new_tokens=12)
    drafter = SmallModelDrafter(CachedModel(toy_model(0, family, noise=0.01)))
    policy = Policy(shape=StaticTree(depth=3, top_k=3, num_tokens=8))
    options = {"batch_size": 2, "max_text_tokens": 64, "eos_ids": ()}
    graphs = tape() if captures else None
    loop = DecodeLoop(CachedModel(target), drafter, policy, graphs=graphs, **options)
    found = {done.request.request_id: list(done.token_ids) for done in loop.run(requests)}
    assert loop.graph_counters.failed_captures == 0
    assert (loop.graph_counters.replays > 0) == captures
    target.set_attn_implementation("sdpa")
    for request in requests:
        ids = torch.tensor([request.prompt_ids])
        output = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
        )
        assert found[request.request_id] == output[0, ids.shape[1] :].tolist()


def test_a_window_narrower_than_the_text_is_refused() -> None:
    config = MistralConfig(**GROUPED, sliding_window=16)
    model = CachedModel(toy_model(0, config))
    model.allocate(1, 16)
    with pytest.raises(ModelConfigError, match="sliding window of 16"):
        model.allocate(1, 17)


@pytest.mark.parametrize("kinds", [["linear_attention", "full_attention"], ["mamba"] * 2])
def test_recurrent_layers_are_refused(kinds: list[str]) -> None:
    config = toy_config()
    config.layer_types = kinds
    with pytest.raises(ModelConfigError, match="is not supported: it has"):
        check_model(config)


def test_a_model_that_drops_the_option_is_refused() -> None:
    model = toy_model(0)
    assert model.config._attn_implementation == ATTENTION
    # Else transformers would build or omit a mask by itself.
    with pytest.raises(InvariantError, match="option 'reads'"):
        model.model.layers[0].self_attn(
            torch.zeros(1, 2, 32), position_embeddings=(torch.ones(1, 2, 8),) * 2
        )


@torch.inference_mode()
def test_prompts_are_read_causally_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mask and grouped heads, CUDA is left with its slowest kernel and no memory."""
    asked: list[tuple[bool, bool]] = []

    def watched(*args: Any, attn_mask: Any = None, is_causal: bool = False, **rest: Any) -> Tensor:
        asked.append((attn_mask is None, is_causal))
        return attend(*args, attn_mask=attn_mask, is_causal=is_causal, **rest)

    attend = torch.nn.functional.scaled_dot_product_attention
    cached = CachedModel(toy_model(0))
    cached.allocate(1, 40)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    whole = cached.extend(0, 0, torch.arange(30)[None]).logits
    assert set(asked) == {(True, True)}
    cached.extend(0, 0, torch.arange(20)[None])
    in_parts = cached.extend(0, 20, torch.arange(20, 30)[None]).logits
    torch.testing.assert_close(in_parts, whole, atol=2e-5, rtol=1e-4)


def test_requests_read_together_as_alone() -> None:
    """Texts of different lengths in one pass of a head, as after a round; a small model's:
    test_policies.py."""
    policy, given = Policy(shape=StaticTree(depth=5, top_k=6, num_tokens=24)), toy_requests(5, 12)
    alone, together = (
        {
            done.request.request_id: (done.token_ids, done.metrics.accepted_lengths)
            for done in make_loop(policy, given, None, batch_size=batch_size).run(given)
        }
        for batch_size in (1, 4)
    )
    assert together == alone, "a drafter that read another text drafts other trees"


def test_text_may_fill_the_context() -> None:
    """Up to the very last position of the model."""
    context = pair().target.model.context_tokens
    request = Request("long", tuple(5 + i % 200 for i in range(context - 12)), 100)
    texts = []
    for shape in (RootOnly(), StaticTree(depth=6, top_k=2, num_tokens=12)):
        loop = Decoder(pair(), Policy(shape=shape)).loop([request])
        [done] = loop.run([request])
        assert done.finish_reason in ("context", "eos")
        assert len(done.token_ids) <= 12
        texts.append(done.token_ids)
    assert texts[0] == texts[1]
