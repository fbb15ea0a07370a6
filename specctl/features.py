"""The inputs of policies: one registry of named features, one function that computes them.

Fit, replay and runtime share this code. An artifact holds the `features_digest` of its policy's
features, and the loader refuses another. All features are *predictable*: they come from the
drafter's distributions and from committed text, never from draws of verification, so a policy
built on them is lossless.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from specctl.errors import UsageError
from specctl.lazy import Tensor, torch
from specctl.tree import DraftPool, gather, path_sum

RECENT_TOKENS = 64
"""Committed tokens that a draft is compared with."""
SUFFIX_TOKENS = 4
"""Matches of the text's end are counted up to this length."""
COPIED_LEVELS = 16
"""Levels of a draft that are compared with what followed the text's end before."""
NO_TEXT = -1
"""Padding before the text in a row of recent tokens."""
ENTROPY_TOP_K = 10
"""K of the renormalised top-K entropy (HeteroSpec, Eq. 1). Thresholds hold for one K only, so K is
part of every digest."""


# --------------------------------------------------------------------------- text
#
# Prompt lookup and suffix decoding draft the tokens that followed an earlier match of the text's
# end (Saxena 2023, "Prompt Lookup Decoding"; arXiv:2411.04975). Here the match is a feature: a path
# that repeats the text is accepted more often than its probability, and its siblings less often.


class Copy(NamedTuple):
    """The tokens that followed the longest earlier match of each of B texts' ends.

    Of equally long matches the latest counts. The continuation wraps around at the text's end, so
    that a loop is a copy of any length.

        text   the cat sat on the cat ■     copy: "sat", "on", "the", "cat", "sat", ...

    The feature of a node is the length of the match: positive if its whole path copies, negative if
    only its parent's path does, 0 elsewhere.
    """

    token_ids: Tensor  # `[B, COPIED_LEVELS]` int64
    length: Tensor  # `[B]` int64, matching tokens, at most `SUFFIX_TOKENS`; 0 for none

    def of_level(self, depth: int, token_ids: Tensor, of_parent: Tensor) -> Tensor:
        """`[B, W, K]` int64 of a level's nodes.

        Args:
            token_ids: `[B, W, K]`.
            of_parent: `[B, W]`, the result for their parents.
        """
        above = of_parent.clamp(min=0)[..., None]
        if depth > COPIED_LEVELS:
            return torch.zeros_like(token_ids)
        return torch.where(token_ids == self.token_ids[:, depth - 1, None, None], above, -above)


def copy_of(recent: Tensor) -> Copy:
    """The copy of each of B texts.

    Args:
        recent: `[B, RECENT_TOKENS]` int64, the end of the emitted text, the root last; `NO_TEXT`
            before its start.
    """
    windows = recent.unfold(1, SUFFIX_TOKENS, 1)  # `[B, W, SUFFIX_TOKENS]`, the text's end last
    agree = (windows[:, :-1] == windows[:, -1:]) & (windows[:, -1:] != NO_TEXT)
    lengths = agree.flip(-1).cumprod(-1).sum(-1)
    num_places = lengths.shape[1]
    place = (lengths * num_places + torch.arange(num_places, device=recent.device)).argmax(1, True)
    period = num_places - place
    ahead = torch.arange(COPIED_LEVELS, device=recent.device) % period
    return Copy(recent.gather(1, place + SUFFIX_TOKENS + ahead), lengths.gather(1, place)[:, 0])


def recent_tokens(texts: list[list[int]], device: torch.device) -> Tensor:
    """`[B, RECENT_TOKENS]` int64: the ends of texts."""
    ends = [text[-RECENT_TOKENS:] for text in texts]
    rows = [[NO_TEXT] * (RECENT_TOKENS - len(end)) + end for end in ends]
    return torch.tensor(rows, device=device)


# --------------------------------------------------------------------------- the registry


@dataclass(frozen=True)
class Feature:
    """One named column."""

    name: str
    unit: str
    meaning: str
    compute: Callable[[DraftPool, int], Tensor]  # `[B, C]` for the nodes of a pool from an index on
    dtype: str = "float32"
    reads_text: bool = False  # compares tokens with the recent text
    version: int = 1  # increased when the meaning changes


def _drafted(name: str, unit: str, meaning: str, column: str = "") -> Feature:
    """A column of the pool, by the feature's own name unless another is given."""
    read = attrgetter(column or name)
    return Feature(name, unit, meaning, lambda pool, start: read(pool)[:, start:])


def _copied(pool: DraftPool, start: int) -> Tensor:
    if pool.copied is None:
        raise UsageError(
            "features of the text need rounds with the recent text",
            hint="collect dense traces, or leave these features out",
        )
    return pool.copied[:, start:]


_FEATURES = (
    Feature(
        "joint_prob",
        "probability",
        "product of path probabilities",
        lambda pool, start: pool.joint_logp[:, start:].exp(),
    ),
    _drafted("joint_logp", "nats", "log of joint_prob"),
    _drafted("draft_logp", "nats", "log-probability given the parent"),
    _drafted("parent_entropy", "nats", "entropy of the parent's distribution", "entropy"),
    _drafted("parent_topk_entropy", "nats", "the same over renormalised top-K", "topk_entropy"),
    _drafted("depth", "levels", "edges from the root"),
    _drafted("sibling_rank", "rank", "0 for the likeliest sibling"),
    Feature(
        "copy_length",
        "tokens",
        "longest earlier match of the text's end, positive on the path that goes on as the text "
        "did there, negative beside it, 0 elsewhere",
        _copied,
        reads_text=True,
    ),
)

NODE_FEATURES = {feature.name: feature for feature in _FEATURES}
"""Features of a node, by name."""

ROUND_FEATURES = {"phi": ("nats", "cumulative meta-path top-K entropy, HeteroSpec Eq. 1")}
"""Features of a round: name to (unit, meaning); computed by the function of the same name."""


def node_features(pool: DraftPool, names: Sequence[str], start: int = 0) -> Tensor:
    """The named features of every node from pool index `start` on.

    Returns:
        `[B, P - start, F]` float32, F in the order of `names`.

    Raises:
        UsageError: a name that is not registered.
    """
    columns = [feature.compute(pool, start).float() for feature in _registered(names)]
    return torch.stack(columns, -1)


def check_registered(names: Sequence[str]) -> None:
    """Refuses names without a node feature (UsageError)."""
    _registered(names)


def needs_text(names: Sequence[str]) -> bool:
    """Whether one of these features compares tokens with the recent text."""
    return any(feature.reads_text for feature in _registered(names))


def meta_path(pool: DraftPool, *, conditional: bool = False) -> Tensor:
    """The node where the meta path P* ends: the best node of the deepest level drafted.

    HeteroSpec's "highest final-token confidence" is read as the highest cumulative score, by which
    EAGLE ranks.

    Args:
        conditional: rank by the final token's own probability instead.

    Returns:
        `[B]` int64, index into the pool.
    """
    score = pool.draft_logp if conditional else pool.joint_logp
    deepest = pool.depth.masked_fill(~pool.valid, -1)
    last_level = deepest == deepest.max(1, keepdim=True).values
    return score.masked_fill(~last_level, float("-inf")).argmax(1)


def phi(pool: DraftPool, *, conditional: bool = False) -> Tensor:
    """Cumulative meta-path top-K entropy (HeteroSpec, Eq. 1): entropies summed along P*.

    The sum has one entropy for each of the T drafted tokens, from the root's distribution on. It
    grows with depth, so only trees of equal depth compare.

    Returns:
        `[B]` float32, nats.
    """
    depth = int(pool.depth.max())
    totals = path_sum(pool.topk_entropy, pool.parent, depth)
    return gather(totals, meta_path(pool, conditional=conditional)[:, None], 0.0)[:, 0]


def features_digest(names: Sequence[str]) -> str:
    """Identity of an ordered choice of features: names, units, dtypes, meanings, versions, K.

    Returns:
        `sha256:<hex>`.
    """
    described: list[list[str | int]] = []
    for name in names:
        if name in ROUND_FEATURES:
            described.append([name, "round", *ROUND_FEATURES[name], "float32", 1])
            continue
        [feature] = _registered([name])
        window = [RECENT_TOKENS, SUFFIX_TOKENS, COPIED_LEVELS]
        facts = (feature.unit, feature.meaning, feature.dtype, feature.version)
        described.append([name, "node", *facts, *(window if feature.reads_text else ())])
    text = json.dumps({"features": described, "entropy_top_k": ENTROPY_TOP_K}, sort_keys=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _registered(names: Sequence[str]) -> list[Feature]:
    unknown = [name for name in names if name not in NODE_FEATURES]
    if unknown:
        raise UsageError(
            f"features {unknown!r} are none of {sorted([*NODE_FEATURES, *ROUND_FEATURES])}",
            hint="fit the policy again with this version of specctl",
        )
    return [NODE_FEATURES[name] for name in names]
