"""vLLM: `--speculative-config`, and the plugin's file for rules and logs."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from specctl.engines.engine import (
    Engine,
    Export,
    Serving,
    as_json,
    made,
    parsed,
    refused,
)
from specctl.engines.settings import FILE_NAME, VARIABLE, PluginSettings
from specctl.errors import EngineError
from specctl.formatting import listed
from specctl.policy import (
    Chain,
    ChainSchedule,
    PerRequest,
    Policy,
    Ratio,
    RootOnly,
    Shape,
    Strict,
    TopProbability,
    as_chain,
    build_shape,
)
from specctl.policy.family import Depth, Length
from specctl.records import PositiveInt, Probability, Record, require
from specctl.runtime.checkpoints import Kind

log = logging.getLogger(__name__)
CONFIG_FILE = "speculative-config.json"
Triple = tuple[PositiveInt, PositiveInt, Length]
"""First and last batch size, and draft tokens."""


VllmMethod = Literal["eagle3", "eagle", "medusa", "dflash", "dspark", "mtp", "draft_model"]
KINDS: tuple[Kind, ...] = (*get_args(VllmMethod), "peagle")
"""Drafters that vLLM serves; MLP speculators ended before 0.32 (`models/registry.py`)."""
UNTIL_0_32 = "medusa"
"""A method that 0.33 removed."""
MODELS: dict[Kind, str] = {
    "dflash": "speculators/.*|DFlash(2|2Beam)?DraftModel|LiLiCorrDraftModel|"
    "(DFlash)?(LagunaForCausalLM|MuseGlimmerAssistantModel|Qwen3XPressModel)",
    "dspark": "speculators/.*|DSpark(V41)?DraftModel|"
    "(Gemma4|K3|MuseSpark|Qwen3|Qwen3Omni)DSparkModel",
}
"""Architectures of its block drafters (`models/registry.py`). It puts DFlash before another one,
which it then lacks, and reads another DSpark drafter as DeepSeek-V4's."""
SINCE_0_33 = ("DFlash2BeamDraftModel", "MuseSparkDSparkModel", "Qwen3XPressModel")
FOR_PLUGIN: frozenset[Kind] = frozenset({"eagle3", "eagle", "mtp", "draft_model"})
"""Drafters that draft token by token, between which the plugin's rules decide."""
PASSED_OVER = {
    "enforce_eager",
    "draft_tensor_parallel_size",
    "tensor_parallel_size",
    "quantization",
}
PASSED_OVER |= {"moe_backend", "attention_backend", "kv_cache_dtype", "max_model_len", "revision"}
PASSED_OVER |= {"code_revision", "draft_load_config", "disable_padded_drafter_batch"}
PASSED_OVER |= {"disable_eagle_block_drop", "use_local_argmax_reduction"}
PASSED_OVER |= {"disable_lookahead_block_hashes"}
"""vLLM's keys for the drafter's place and speed, which leave the policy as it is."""
NOT_READ = {"synthetic_acceptance_length", "prompt_lookup_max", "prompt_lookup_min"}
NOT_READ |= {"dspark_draft_topk", "use_heterogeneous_vocab", "enable_adaptive_verification"}
NOT_READ |= {"index_share_for_mtp_iteration", "draft_lm_head_quantization", "xpress_topc"}
NOT_READ |= {"fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k"}
NOT_READ |= {"suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"}
NOT_READ |= {"suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"}
"""vLLM's keys that change what is drafted or accepted."""


class VllmConfig(Record):
    """`--speculative-config` (vLLM 0.32 and 0.33, `config/speculative.py`)."""

    method: VllmMethod
    model: Annotated[str, Field(min_length=1)]
    num_speculative_tokens: Depth
    parallel_drafting: bool | None = None  # all tokens in one pass: P-EAGLE
    # In any order; gaps, and sizes after the last range, keep the length before. vLLM silently caps
    # lengths at `num_speculative_tokens`: here a longer one is an error.
    num_speculative_tokens_per_batch_size: (
        Annotated[tuple[Triple, ...], Field(min_length=1)] | None
    ) = None
    # `probabilistic` samples drafts and verifies them by p/q; vLLM's default is greedy.
    draft_sample_method: Literal["greedy", "probabilistic"] | None = None
    rejection_sample_method: Literal["standard", "synthetic"] | None = None
    synthetic_acceptance_rates: tuple[Probability, ...] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        triples = sorted(self.num_speculative_tokens_per_batch_size or ((1, 1, 1),))
        require(triples[0][0] == 1, f"the first range must start at 1, not {triples[0][0]}")
        for low, high, length in triples:
            require(low <= high, f"a range from {low} to {high}")
            most = self.num_speculative_tokens
            require(length <= most, f"{length} tokens, above num_speculative_tokens {most}")
        for (_, end, _), (start, _, _) in pairwise(triples):
            require(end < start, f"a range starts at {start}, the one before ends at {end}")
        has_rates = self.synthetic_acceptance_rates is not None
        both = has_rates == (self.rejection_sample_method == "synthetic")
        require(
            both, "synthetic_acceptance_rates and rejection_sample_method synthetic go together"
        )
        return self


def loss(shape: Shape) -> str | None:
    if isinstance(shape, TopProbability):
        return (
            "llama.cpp's stop, on a token's probability among the ten likeliest: our plugin reads "
            "it among all tokens"
        )
    if build_shape(shape).top_k > 1:
        return f"the tree of {shape.kind}: vLLM drafts and verifies chains"
    return None


def draws(shape: Shape) -> str | None:
    if isinstance(shape, Chain | ChainSchedule):
        return None
    return f"sampled drafts under {shape.kind}: our plugin reads only the likeliest ones"


def triples_of(
    from_batch: Sequence[int], lengths: Sequence[int], max_batch_size: int = 0
) -> list[tuple[int, int, int]]:
    """First and last batch size and length of each stretch; vLLM keeps the last beyond its end."""
    ends = [start - 1 for start in from_batch[1:]]
    last = max(max_batch_size, from_batch[-1])
    return list(zip(from_batch, [*ends, last], lengths, strict=True))


def write(policy: Policy, serving: Serving) -> Export:
    """Flags of `vllm serve`, and the plugin's file for rules and logs."""
    shape, trace = policy.shape, serving.trace
    if isinstance(shape, RootOnly):
        if trace is not None:
            raise EngineError(
                "--trace logs drafts, and ar makes none",
                hint="export a chain, e.g. chain:8 with --dense",
            )
        return Export(notes=("vLLM decodes plainly without --speculative-config.",))
    samples = isinstance(policy.acceptance, Ratio)
    if trace is not None and samples:
        raise EngineError(
            f"--trace logs drafts of the likeliest tokens, and {policy.name} samples its drafts",
            hint="leave --trace out, or export the shape alone",
        )
    drafter = serving.drafter_for("vLLM", KINDS, MODELS)
    own, most = build_shape(shape).max_depth, serving.max_draft_tokens or 0
    is_fixed = isinstance(as_chain(policy).shape, Chain | ChainSchedule)
    decides = not is_fixed or not isinstance(policy.budget, PerRequest)
    if trace is not None and trace.dense and decides:
        raise EngineError(
            f"--dense verifies no drafts, so it leaves nothing to the rules of {policy.name}",
            hint=f"export chain:{own} for the log, or log a sample with --dense-every N",
        )
    if trace is None or not trace.dense:
        decides |= most > own  # only the plugin can draft less than vLLM may
    triples = None
    if isinstance(shape, ChainSchedule):
        triples = triples_of(shape.from_batch, shape.num_draft_tokens, serving.max_batch_size or 0)
    if drafter.method not in FOR_PLUGIN and (decides or trace is not None):
        raise EngineError(
            f"the plugin decides and logs between draft tokens, and a drafter of kind "
            f"{drafter.method} drafts them together",
            hint=f"export chain:{own} without --trace",
        )
    fields: dict[str, Any] = {
        "method": "eagle3" if drafter.method == "peagle" else drafter.method,
        "model": drafter.model,
        "parallel_drafting": True if drafter.method == "peagle" else None,
        "num_speculative_tokens": max(own, most),
        "num_speculative_tokens_per_batch_size": triples,
        "draft_sample_method": "probabilistic" if samples else None,
    }
    if (rates := serving.synthetic_rates) is not None:
        if decides or max(own, most) != len(rates):
            raise EngineError(
                f"--synthetic: vLLM draws acceptances for one length, and {policy.name} changes it",
                hint="export a chain, or another engine",
            )
        fields |= {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": rates,
        }
    config = made(VllmConfig, fields, "vLLM's --speculative-config")
    flags, files = ["--speculative-config", as_json(config)], {CONFIG_FILE: as_json(config) + "\n"}
    if serving.max_batch_size is not None:
        flags += ["--max-num-seqs", str(serving.max_batch_size)]
    notes = []
    if drafter.method == UNTIL_0_32:
        notes.append("vLLM 0.33 removed Medusa drafters: serve this one with 0.32 or older.")
    if drafter.architecture in SINCE_0_33:
        notes.append(f"vLLM 0.32 has no {drafter.architecture}: serve this one with 0.33 or newer.")
    if drafter.block_size is not None and max(own, most) > drafter.block_size:
        notes.append(
            f"The drafter was trained to draft {drafter.block_size} tokens a round: later ones are "
            "rarely accepted."
        )
    if triples:
        notes.append(
            "vLLM looks up the length by the requests scheduled in a step, prompts included, and "
            "uses it for the next step; more requests than the table names keep its last length. "
            "Data parallelism switches this off."
        )
    if not decides and trace is None:
        return Export(tuple(flags), files=files, notes=tuple(notes))
    settings = PluginSettings(policy=serving.reference(policy) if decides else None, trace=trace)
    content = settings.to_json()
    environment = {
        VARIABLE: content.strip() if serving.folder is None else serving.path(FILE_NAME),
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    beside = f", with {listed(settings.packages)} beside it" if settings.packages else ""
    notes.append(
        f"Install specctl where vLLM is{beside}. Its plugin needs vLLM's V1 model runner and "
        f"synchronous scheduling, which these settings choose. Without {VARIABLE} it does nothing: "
        "to take it out, start vLLM without these settings."
    )
    flags.append("--no-async-scheduling")
    if trace is not None:
        flags += ["--shutdown-timeout", "10"]
        notes.append(
            "Without --shutdown-timeout the server kills its processes when it ends, and the last "
            "rows are lost."
        )
    return Export(tuple(flags), environment, files=files | {FILE_NAME: content}, notes=tuple(notes))


def read(files: Mapping[str, str]) -> Policy:
    """The policy; one in the plugin's file is loaded and put on a chain."""
    if FILE_NAME in files:
        settings = parsed(PluginSettings, files[FILE_NAME], FILE_NAME)
        if settings.policy is not None:
            from specctl.runtime.words import resolve_policy

            return as_chain(resolve_policy(settings.policy).policy)
    if CONFIG_FILE not in files:
        raise refused(FILE_NAME, f"it logs rounds, but no {CONFIG_FILE} is beside it")
    what, text = "vLLM's --speculative-config", files[CONFIG_FILE]
    with suppress(ValueError):  # text that is no JSON is refused as such
        given = json.loads(text)
        if isinstance(given, dict):
            if unread := sorted(NOT_READ & given.keys()):
                raise EngineError(
                    f"{what}: {listed(unread)} of vLLM changes what is drafted or accepted, and is "
                    "not read here",
                    hint="remove it, to see the policy without it",
                )
            if passed := sorted(PASSED_OVER & given.keys()):
                log.warning(
                    "%s: %s passed over, which leave the policy as it is", what, listed(passed)
                )
            text = json.dumps({k: v for k, v in given.items() if k not in PASSED_OVER})
    config = parsed(VllmConfig, text, what)
    if config.rejection_sample_method == "synthetic":
        raise refused(what, "rejection_sample_method synthetic makes acceptances up")
    triples = config.num_speculative_tokens_per_batch_size
    shape: Shape = Chain(num_draft_tokens=config.num_speculative_tokens)
    if triples is not None:
        starts, _, lengths = zip(*sorted(triples), strict=True)
        if not any(lengths):
            return Policy(shape=RootOnly())
        shape = ChainSchedule(from_batch=starts, num_draft_tokens=lengths)
    samples = config.draft_sample_method == "probabilistic"
    return Policy(shape=shape, acceptance=Ratio() if samples else Strict())


VLLM = Engine(
    name="vllm",
    title="vLLM",
    command="vllm serve TARGET",
    checked="0.32.0 and 0.33.0: the parser of the first takes it "
    "(tests/engines/test_vllm_parser.py), the second has the same keys; lengths by batch size "
    "exist since 0.24",
    files=(CONFIG_FILE, FILE_NAME),
    budgets=("per_request", "survival", "marginal"),
    loss=loss,
    draws=draws,
    nearest=lambda shape, mean: as_chain(Policy(shape=shape)).shape,
    write=write,
    read=read,
    batching="vllm",
    has_plugin=True,
    has_synthetic=True,
)
