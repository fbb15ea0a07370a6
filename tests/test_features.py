"""The feature registry: values on a hand-made pool, identity of a choice of names."""

from __future__ import annotations

import pytest
import torch

from specctl.errors import UsageError
from specctl.features import NODE_FEATURES, features_digest, node_features
from specctl.policy import StaticTree, build_shape
from specctl.tree import joint_logp
from tests.policy.drafts import grow
from tests.policy.test_eagle2 import hand_law


def test_values_are_what_the_names_say() -> None:
    pool, _, _ = grow(build_shape(StaticTree(depth=2, top_k=2, num_tokens=7)), [hand_law])
    names = list(NODE_FEATURES)
    values = dict(zip(names, node_features(pool, names).unbind(-1), strict=True))
    assert values["depth"][0].tolist() == [0, 1, 1, 2, 2, 2, 2]
    assert values["sibling_rank"][0].tolist() == [0, 0, 1, 0, 1, 0, 1]
    expected = torch.tensor([1.0, 0.6, 0.3, 0.36, 0.18, 0.24, 0.03])
    torch.testing.assert_close(values["joint_prob"][0], expected)
    torch.testing.assert_close(values["joint_logp"], joint_logp(pool.tree), rtol=0, atol=0)
    assert float(values["parent_entropy"][0, 1]) == float(values["parent_entropy"][0, 2])
    # Four tokens in all: the top 10 are the whole vocabulary.
    torch.testing.assert_close(values["parent_entropy"], values["parent_topk_entropy"])
    assert pool.expanded[0].tolist() == [True, True, True] + [False] * 4


def test_a_digest_names_an_ordered_choice() -> None:
    assert features_digest(["depth", "phi"]) == features_digest(["depth", "phi"])
    assert features_digest(["depth", "phi"]) != features_digest(["phi", "depth"])
    assert features_digest([]) != features_digest(["depth"])


@pytest.mark.parametrize("use", [features_digest, lambda names: node_features(None, names)])
def test_an_unknown_name_is_refused(use: object) -> None:
    with pytest.raises(UsageError, match="names among"):
        use(["depth", "mood"])
