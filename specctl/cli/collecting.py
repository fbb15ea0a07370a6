"""`specctl collect`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from specctl import console
from specctl.cli.app import app
from specctl.cli.verbs import Given, verb
from specctl.collect.config import LIVE_POLICY, CollectConfig, Shard
from specctl.console import Answer
from specctl.errors import UsageError
from specctl.runtime.config import DecodingConfig


@verb(
    app,
    config=CollectConfig,
    decoding=DecodingConfig,
    examples="""specctl collect embedded -o traces --dense --depth 5 --children 4 --limit 24
specctl collect prompts.jsonl -o traces --target TARGET --drafter HEAD --dense
specctl collect prompts.jsonl -o traces --target TARGET --drafter HEAD \\
    --dense --resume""",
)
def collect(
    prompts: Annotated[str, typer.Argument(help="Prompt file, or 'embedded'.")],
    out: Annotated[
        str,
        typer.Option("--out", "-o", help="Trace set to write: a folder, or s3://bucket/prefix."),
    ],
    config: Given,
    decoding: Given,
) -> Answer:
    """Log the draft trees of your prompts as traces.

    Of rounds decoded live, or of full trees at every position (--dense), from which any policy is
    fitted and scored.
    """
    from specctl.collect import tokens
    from specctl.collect.prompts import load_prompts
    from specctl.collect.responses import load_responses
    from specctl.collect.trace_writer import check_place
    from specctl.logs.trace_files import open_place, sample_place
    from specctl.runtime.policy_spec import check_policies, resolve_policy

    settings: CollectConfig = config.build()
    settings.check()
    models: DecodingConfig = decoding.build()
    if settings.dense and models.top_k and not models.temperature:
        raise UsageError(
            "--top-k",
            expected="--temperature above 0: it limits what is sampled",
            found="greedy texts",
            fix="for the children of a drafted node give --children",
        )
    named = None if settings.dense else resolve_policy(settings.policy or LIVE_POLICY)
    stored = (settings.tokens, settings.token_key)
    tokens.check_tokens(*stored)
    part = Shard.parse(settings.shard)
    place = open_place(out)
    check_place(place, resume=settings.resume or part.count > 1)
    if settings.dense_every is not None:
        check_place(open_place(sample_place(out)), resume=settings.resume or part.count > 1)
    tokens.check_key_file(place, settings.token_key)
    naming = tokens.prompt_naming(*stored)
    loaded = load_prompts(
        prompts,
        format=models.format,
        limit=models.limit,
        limit_seed=models.limit_seed,
        naming=naming,
        warn=console.warn,
    )
    texts = None if settings.responses is None else load_responses(settings.responses, naming)
    models.check()

    from specctl.collect.dense import collect_dense
    from specctl.collect.live import collect_live

    with console.progress("loading models", None):
        pair = models.load_pair()
    loaded = models.with_room(pair, loaded, console.warn)
    sampled = loaded[:: settings.dense_every] if settings.dense_every else []
    num_prompts = sum(part.holds(prompt.prompt_id) for prompt in [*loaded, *sampled])
    with console.progress("finished prompts", num_prompts) as tick:
        shared: Any = {
            "batch_size": models.batch_size,
            "resume": settings.resume,
            "shard": part,
            "tokens": tokens.token_treatment(*stored, pair.target.model.vocab_size),
            "workload": settings.workload,
            "on_commit": lambda segment: tick(len(segment.prompt_ids)),
        }
        if named is None:
            shared |= {"responses": texts}
            shape = settings.dense_shape()
            dense = collect_dense(pair, loaded, models.settings, out, shape, **shared)
            return Answer(dense.to_json(), [dense.render()])
        check_policies([named], pair.fingerprint)
        full = settings.when_full or "block"
        live = collect_live(
            pair, loaded, named.policy, models.settings, out, when_full=full, **shared
        )
        data, parts = live.to_json(), [live.render()]
        if sampled:
            shape, beside = settings.dense_shape(), sample_place(out)
            dense = collect_dense(pair, sampled, models.settings, beside, shape, **shared)
            data, parts = {**data, "dense_sample": dense.to_json()}, [*parts, dense.render()]
    return Answer(data, parts)
