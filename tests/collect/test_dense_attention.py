"""Merged attention equals one masked softmax; trees in a model equal each path read alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from specctl.collect.dense.attention import Nodes, Prefix, merged_attention
from specctl.collect.dense.drafters import DenseSmallModel
from specctl.runtime.attention import ATTENTION
from specctl.runtime.cached_model import CachedModel
from tests.collect.attention import exact_attention
from tests.runtime.toy import FAMILIES, VOCAB, toy_model

HEADS, KV_HEADS, DIM = 6, 2, 8


def random_parts(
    *, rows: int, width: int, size: int, nodes: int, seed: int = 0
) -> tuple[Tensor, Prefix, Nodes]:
    """Queries, a prefix whose last `rows` entries are seen by ever more trees, and a forest."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return 2 * torch.randn(*shape, generator=draw, dtype=torch.float64)

    stable = torch.arange(size - rows + 1, size + 1)
    prefix = Prefix(
        normal(KV_HEADS, size, DIM), normal(KV_HEADS, size, DIM), stable, size - rows + 1
    )
    seen = torch.rand(rows, width, nodes, generator=draw) < 0.4
    seen[:, :, -width:] = torch.eye(width, dtype=torch.bool)
    tree = Nodes(normal(rows, KV_HEADS, nodes, DIM), normal(rows, KV_HEADS, nodes, DIM), seen)
    return normal(rows, HEADS, width, DIM), prefix, tree


@pytest.mark.parametrize(
    ("sizes", "scaling"),
    [
        ({"rows": 1, "width": 1, "size": 1, "nodes": 1}, 0.3),
        ({"rows": 5, "width": 3, "size": 5, "nodes": 3}, 0.3),
        ({"rows": 4, "width": 7, "size": 40, "nodes": 21}, 1000.0),
    ],
)
def test_merged_equals_exact_in_float64(sizes: dict[str, int], scaling: float) -> None:
    """Also where the exponential of a score overflows."""
    query, prefix, nodes = random_parts(**sizes)
    merged = merged_attention(query, prefix, nodes, scaling)
    exact = exact_attention(query, prefix, nodes, scaling)
    torch.testing.assert_close(merged, exact, atol=1e-12, rtol=1e-12)


TEXT = [5, 9, 2, 7, 30, 11, 4]
ROOTS = range(3, 6)
LEVELS = [
    # tokens [W], parent column [W], of the same tree below each root
    ([40, 41, 42], [0, 0, 0]),
    ([43, 44], [1, 0]),
    ([45, 46, 47, 48], [1, 1, 0, 0]),
]


def paths() -> list[list[list[int]]]:
    found: list[list[list[int]]] = []
    for tokens, parents in LEVELS:
        above = found[-1] if found else [[]]
        found.append([[*above[up], token] for token, up in zip(tokens, parents, strict=True)])
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_tree_logits_equal_each_path_alone(family: str) -> None:
    """For every family of decoders, levels of unequal width included."""
    config: PreTrainedConfig = FAMILIES[family]
    model, reference = toy_model(0, config), toy_model(0, config)
    reference.set_attn_implementation("eager")
    drafter = DenseSmallModel(CachedModel(model), VOCAB)
    with torch.inference_mode():
        drafter.begin_text(torch.tensor(TEXT))
        drafter.read(range(1, 3), None)  # an earlier chunk of roots
        drafter.read(ROOTS, None)
        found = [drafter.begin_round()[:, None]]
        for tokens, parents in LEVELS:
            rows = (torch.tensor(values).expand(len(ROOTS), -1) for values in (tokens, parents))
            found.append(drafter.expand(*rows))
        for row, root in enumerate(ROOTS):
            for level, ends in enumerate([[[]], *paths()]):
                for column, path in enumerate(ends):
                    text = torch.tensor([TEXT[: root + 1] + path])
                    alone = reference(input_ids=text, use_cache=False).logits[0, -1]
                    here = found[level][row, column]
                    torch.testing.assert_close(here, alone, atol=2e-5, rtol=1e-4)
    assert model.config._attn_implementation == ATTENTION  # as it was before
