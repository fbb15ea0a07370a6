"""`specctl collect`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from specctl.cli.app import app
from specctl.cli.options import check_drafter
from specctl.cli.verbs import Given, verb
from specctl.collect.config import FINISHED, LIVE_POLICY, CollectConfig, Shard
from specctl.console import Answer
from specctl.errors import UsageError
from specctl.progress import progress
from specctl.records import option
from specctl.runtime.config import DecodingConfig


@verb(
    app,
    config=CollectConfig,
    decoding=DecodingConfig,
    examples="""specctl collect embedded -o traces --dense --depth 5 --children 4 --limit 24
specctl collect prompts.jsonl -o traces --target TARGET --drafter HEAD --dense
specctl collect prompts.jsonl -o traces --target TARGET --drafter HEAD \\
    --dense --resume
specctl collect prompts.jsonl -o traces --target TARGET --drafter HEAD \\
    --workers 8""",
)
def collect(
    prompts: Annotated[str, typer.Argument(help="Prompt file, or 'embedded'.")],
    *,
    out: str = option(..., "Trace set to write: a folder, or s3://bucket/prefix", name="--out -o"),
    config: Given,
    decoding: Given,
) -> Answer:
    """Log the draft trees of your prompts as traces.

    Of decoded rounds, or of full trees at every position (--dense), which score and fit any policy.
    """
    from specctl.collect.prompts import load_prompts, with_room
    from specctl.collect.responses import load_responses
    from specctl.collect.trace_writer import check_place
    from specctl.logs.trace_files import open_place, sample_place
    from specctl.runtime.words import resolve_policy

    settings: CollectConfig = config.build()
    settings.check()
    models: DecodingConfig = decoding.build()
    if settings.dense and models.top_k and not models.temperature:
        raise UsageError(
            "--top-k needs --temperature above 0: it limits the tokens that are sampled",
            hint="for the children of a drafted node give --children",
        )
    named = None if settings.dense else resolve_policy(settings.policy or LIVE_POLICY)
    shape = settings.dense_shape() if named is None else named.policy.shape
    check_drafter(models.drafter, [shape])
    part = Shard.parse(settings.shard)
    place = open_place(out)
    check_place(place, resume=settings.resume or part.count > 1)
    if settings.dense_every is not None:
        check_place(open_place(sample_place(out)), resume=settings.resume or part.count > 1)
    hide_text = settings.tokens == "drop"
    loaded = load_prompts(prompts, hide_text=hide_text, **models.prompt_options)
    texts = None
    if settings.responses is not None:
        texts = load_responses(settings.responses, hide_text=hide_text, strict=models.strict)
        loaded = texts.answered(loaded, strict=models.strict)
    there = {"device": "cpu"} if settings.is_spread else {}  # checked on the workers' machines
    models.model_copy(update=there).check()

    from specctl.collect.workers import Work, collect_on_ray

    work = Work(settings, models, out, named)
    before = work.finished(loaded, texts, part)
    if before is not None and settings.dense_every is None:
        return Answer(before.to_json(), [before.render()])
    if settings.is_spread:
        loaded = [prompt for prompt in loaded if part.holds(prompt.prompt_id)]
        with progress(FINISHED, len(loaded)):
            found = collect_on_ray(work, loaded, texts)
        return Answer(found.to_json(), [found.render()])
    with progress("loading models", None):
        decoder = work.decoder(models.load_pair())
    loaded = with_room(loaded, decoder.pair, models)
    sampled = loaded[:: settings.dense_every] if settings.dense_every else []
    num_prompts = sum(part.holds(prompt.prompt_id) for prompt in [*loaded, *sampled])
    shared: Any = {"resume": settings.resume, "shard": part}
    with progress(FINISHED, num_prompts):
        summary = work.collect(decoder, loaded, texts, **shared)
        data, parts = summary.to_json(), [summary.render()]
        if sampled:
            beside = replace(work, policy=None, out=sample_place(out))
            dense = beside.collect(beside.decoder(decoder.pair), sampled, **shared)
            data, parts = {**data, "dense_sample": dense.to_json()}, [*parts, dense.render()]
    return Answer(data, parts)
