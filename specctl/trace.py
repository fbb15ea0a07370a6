"""The trace format: columns of the two tables, their units, and the schema identity.

`docs/trace-format.md` states the format in words. In short: `rounds` has one row a decoding
round (or, in dense logs, a position), `nodes` one row a drafted node. Values that verification
did not observe are *censored*: null, never false. pyarrow is imported only to build a schema, so
that the runtime loads without it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

TRACE_VERSION = 1
"""Increased where a meaning changes under an old name. A new column changes the schema identity,
which readers compare: sets written without it are refused."""


@dataclass(frozen=True)
class Column:
    """One column. `dtype` is a pyarrow type name, or `dictionary` for repeated strings."""

    name: str
    dtype: str
    unit: str
    meaning: str
    nullable: bool = False


KEY_COLUMNS = (
    Column("request_id", "dictionary", "", "prompt, turn and sampling of one decoded request"),
    Column("round_idx", "int32", "rounds", "0-based within the request"),
)

ROUND_COLUMNS = (
    *KEY_COLUMNS,
    Column("prompt_id", "dictionary", "", "the unit of splits: never train and test on one prompt"),
    Column("category", "dictionary", "", "of the prompt, empty where unknown"),
    Column("turn", "int16", "turns", "0-based, of a multi-turn prompt"),
    Column("kind", "dictionary", "", "`live` or `dense`"),
    Column("position", "int32", "tokens", "output tokens emitted before this round"),
    Column("context_tokens", "int32", "tokens", "length of the text up to and with the root"),
    Column("root_token_id", "int32", "token id", "last committed token; null: left out", True),
    Column(
        "bonus_token_id",
        "int32",
        "token id",
        "the target's token after the deepest accepted; null: the text ended there (dense), or it"
        " is left out",
        True,
    ),
    Column("offered_depth", "int16", "levels", "levels drafted for this request"),
    Column("offered_width", "int16", "nodes", "nodes expanded per level at most"),
    Column("top_k", "int16", "nodes", "children drafted per expanded node"),
    Column("num_drafted", "int32", "nodes", "candidates drafted, root excluded"),
    Column("num_verified", "int32", "nodes", "nodes the target processed, root included"),
    Column("num_accepted", "int32", "tokens", "draft tokens accepted and emitted"),
    Column("num_emitted", "int32", "tokens", "tokens emitted, bonus included, after EOS and limit"),
    Column("fully_accepted", "bool", "", "verification accepted down to the deepest level"),
    Column(
        "tcr", "int32", "rank", "terminal confidence rank, 1-based; null if none accepted", True
    ),
    Column("phi", "float32", "nats", "cumulative meta-path top-K entropy at phi_depth", True),
    Column("phi_depth", "int16", "levels", "T of phi", True),
    Column("batch_size", "int16", "requests", "requests that shared the round; dense: null", True),
    Column("draft_us", "float32", "us", "drafting, whole batch; dense: null", True),
    Column("verify_us", "float32", "us", "target forward, whole batch; dense: null", True),
    Column("policy_us", "float32", "us", "features, decisions, whole batch; dense: null", True),
    Column("other_us", "float32", "us", "commit, bookkeeping, whole batch; dense: null", True),
    Column("step_idx", "int64", "steps", "engine step that verified the round; engines only", True),
    Column(
        "step_tokens", "int32", "tokens", "the target processed in the step, all requests", True
    ),
    Column(
        "step_prompt_tokens",
        "int32",
        "tokens",
        "of these, of prompts being read, or read again",
        True,
    ),
    Column("step_context_tokens", "int64", "tokens", "contexts of the step's requests, sum", True),
    Column("step_levels", "int16", "passes", "of the drafter in the step", True),
    Column("policy_digest", "dictionary", "", "identity of the deciding policy"),
)

NODE_COLUMNS = (
    *KEY_COLUMNS,
    Column("node_idx", "int32", "index", "in the drafted pool, level order; the root is 0"),
    Column("parent_idx", "int32", "index", "-1 at the root"),
    Column("depth", "int16", "levels", "edges from the root"),
    Column("token_id", "int32", "token id", "target vocabulary; null: left out", True),
    Column("sibling_rank", "int16", "rank", "0 for the likeliest child of its parent"),
    Column("draft_logp", "float32", "nats", "log-probability given the parent"),
    Column("joint_logp", "float32", "nats", "log-probability of the path"),
    Column("parent_entropy", "float32", "nats", "drafter's entropy at the parent, all tokens"),
    Column("parent_topk_entropy", "float32", "nats", "the same, renormalised top-K"),
    Column("expanded", "bool", "", "its children were drafted"),
    Column("verified", "bool", "", "the target processed it; dense: its path was accepted"),
    Column(
        "confidence_rank", "int32", "rank", "1-based by joint_logp among verified draft nodes", True
    ),
    Column(
        "node_match", "bool", "", "target chose this token after its parent; null: unseen", True
    ),
    Column(
        "path_accepted",
        "bool",
        "",
        "its token was emitted (the root: true); null: not verified",
        True,
    ),
    Column(
        "target_logp", "float32", "nats", "log-probability under the distribution drawn from", True
    ),
    Column("target_rank", "int32", "rank", "1-based in the target's logits at the parent", True),
    Column("target_top1_logit", "float32", "logit", "target's best at the parent", True),
    Column("target_top2_logit", "float32", "logit", "target's second best at the parent", True),
    Column("target_ratio", "float32", "", "second best over best logit (MARS z2/z1)", True),
    Column("target_margin", "float32", "nats", "best minus second best logit", True),
    Column(
        "target_entropy",
        "float32",
        "nats",
        "of the distribution drawn from, at the parent; null in live logs",
        True,
    ),
)

TABLES = {"rounds": ROUND_COLUMNS, "nodes": NODE_COLUMNS}
TOKEN_COLUMNS = {"rounds": ("root_token_id", "bonus_token_id"), "nodes": ("token_id",)}
"""Columns that hold the text, by table."""


@cache
def schema_id(table: str) -> str:
    """`sha256:<hex>` over names, types, units, meanings and nullability of a table."""
    columns = [asdict(column) for column in TABLES[table]]
    text = json.dumps([TRACE_VERSION, table, columns], sort_keys=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def token_mode(collect: Mapping[str, Any]) -> str:
    """`keep` or `drop`: how token ids are stored, as the header's `collect` says."""
    return str(collect.get("tokens", {"mode": "keep"})["mode"])


def arrow_schema(table: str) -> Any:
    """The pyarrow schema of a table, version and schema id in its metadata, and the unit and
    meaning of each column in that of its field."""
    import pyarrow as pa

    def described(column: Column) -> dict[str, str]:
        return {"unit": column.unit, "meaning": column.meaning}

    def arrow_type(dtype: str) -> Any:
        if dtype == "dictionary":
            return pa.dictionary(pa.int32(), pa.string())
        return pa.bool_() if dtype == "bool" else getattr(pa, dtype)()

    fields = [
        pa.field(column.name, arrow_type(column.dtype), column.nullable, described(column))
        for column in TABLES[table]
    ]
    identity = {"specctl.trace_version": str(TRACE_VERSION), "specctl.schema_id": schema_id(table)}
    return pa.schema(fields, metadata=identity)
