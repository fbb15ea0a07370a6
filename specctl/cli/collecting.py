"""`specctl collect`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from specctl.cli.app import app
from specctl.cli.config_options import Given, takes
from specctl.cli.options import JsonOption
from specctl.collect.config import LIVE_POLICY, CollectConfig, Shard
from specctl.runtime.config import DecodingConfig


@app.command()
@takes(config=CollectConfig, decoding=DecodingConfig, without=("decoding.top_k",))
def collect(
    prompts: Annotated[str, typer.Argument(help="Prompt file, or 'embedded'.")],
    out: Annotated[
        str,
        typer.Option("--out", "-o", help="Trace set to write: a folder, or s3://bucket/prefix."),
    ],
    config: Given,
    decoding: Given,
    as_json: JsonOption = False,
) -> None:
    """Write traces (Parquet) of rounds decoded live, or of full trees at every position."""
    from specctl import console
    from specctl.collect.dense import collect_dense
    from specctl.collect.live import collect_live
    from specctl.collect.prompts import load_prompts
    from specctl.collect.responses import load_responses
    from specctl.collect.tokens import (
        check_key_file,
        check_tokens,
        prompt_naming,
        token_treatment,
    )
    from specctl.collect.trace_writer import check_place
    from specctl.logs.trace_files import open_place
    from specctl.runtime.policy_spec import check_policies, resolve_policy

    settings: CollectConfig = config.build()
    settings.check()
    models: DecodingConfig = decoding.build(top_k=settings.sampling_top_k)
    named = None if settings.dense else resolve_policy(settings.policy or LIVE_POLICY)
    check_tokens(settings.tokens, settings.token_key)
    part = Shard.parse(settings.shard)
    place = open_place(out)
    check_place(place, resume=settings.resume or part.count > 1)
    check_key_file(place, settings.token_key)
    naming = prompt_naming(settings.tokens, settings.token_key)
    loaded = load_prompts(prompts, format=models.format, limit=models.limit, naming=naming)
    texts = None if settings.responses is None else load_responses(settings.responses, naming)
    sampling = models.settings
    pair = models.load_pair()
    summary: Any
    with console.progress(
        "finished prompts", sum(part.holds(prompt.prompt_id) for prompt in loaded)
    ) as tick:
        shared: Any = {
            "batch_size": models.batch_size,
            "resume": settings.resume,
            "shard": part,
            "tokens": token_treatment(
                settings.tokens, settings.token_key, pair.target.model.vocab_size
            ),
            "workload": settings.workload,
            "on_commit": lambda segment: tick(len(segment.prompt_ids)),
        }
        if named is None:
            shape = settings.dense_shape()
            summary = collect_dense(pair, loaded, sampling, out, shape, responses=texts, **shared)
        else:
            check_policies([named], pair.fingerprint)
            shared["when_full"] = settings.when_full or "block"
            summary = collect_live(pair, loaded, named.policy, sampling, out, **shared)
    if as_json:
        console.show_json(summary.to_json())
    else:
        console.show(summary.render() if settings.dense else console.collect_lines(summary))
