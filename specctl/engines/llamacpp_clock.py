"""llama.cpp's clock: `specctl profile --engine llamacpp`.

Steps are timed in waves: all slots but one decode already when a request joins, and its own counter
of decoding time, over its rounds, is the time of a step with all of them. In servers of this
process no draft token is accepted (`spec_synth_rates` of 0), so that each round emits one token.
Some of them draft and verify nothing (`n_min` above `n_max`), which tells the time of a level from
that of a token. Servers take turns, pass after pass. Every fifth wave is held out of the fit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specctl.artifacts.manifest import PairFingerprint
from specctl.engines.gguf_files import check_pair
from specctl.engines.llamacpp_flags import CHECKED_BUILD, LlamaServer
from specctl.engines.llamacpp_server import Client, OwnServer
from specctl.errors import EngineError, UsageError
from specctl.progress import advance, progress
from specctl.records import canonical_json, json_digest
from specctl.replay.config import ProfileGrid
from specctl.replay.cost.engine import fit_rates, rate_counts
from specctl.replay.cost.rates import EngineCost
from specctl.runtime.gguf import package, read_fields
from specctl.runtime.identity import processor_name, weights_digest
from specctl.runtime.load import NO_DIGEST

logger = logging.getLogger(__name__)
ROUNDS, TOKENS, SLACK = 16, 48, 16
"""Timed rounds of a wave, at least; verified tokens of a request in them, at least; and spare
rounds of the other requests."""
LONGEST = 16
"""Longest timed draft."""
NUM_PASSES = 3
HELD_OUT_EVERY = 5
MIN_POINTS = 12


@dataclass(frozen=True)
class Wave:
    """A step with `batch_size` requests, on average over a request's rounds; or a prompt."""

    batch_size: int
    verified: float  # over the batch, roots counted
    prompt_tokens: int
    cached: float  # over the batch
    levels: float
    drafts: bool  # a drafter is loaded
    total_us: float


class Setup(NamedTuple):
    """One kind of a server."""

    start: Callable[[], Client]  # or opens a running one
    length: int | None  # draft tokens of a round; None: of its answers


def own_setups(
    target: Path, drafter: Path | None, grid: ProfileGrid, num_threads: int | None
) -> list[Setup]:
    """Servers of this process: plain, of every draft length, and of the least and the most without
    verification."""
    room = max(grid.context_tokens) + 8 * (TOKENS + LONGEST)
    sizes: dict[str, Any] = {"context_tokens": room, "num_threads": num_threads}
    start = partial(OwnServer, target, slots=max(grid.batch_sizes), **sizes)
    setups = [Setup(partial(start, None), 0)]
    if drafter is None:
        return setups
    is_head = read_fields(drafter).get("general.architecture") == "eagle3"
    lengths = [size - 1 for size in grid.tokens if 1 < size <= LONGEST + 1]
    for length in lengths:
        settings = LlamaServer(
            spec_type="draft-eagle3" if is_head else "draft-simple",
            spec_draft_model=str(drafter),
            spec_draft_n_max=length,
            spec_synth_rates=(0.0,) * length,
            spec_draft_backend_sampling=False if is_head else None,
        )
        setups.append(Setup(partial(start, settings), length))
        if length in (lengths[0], lengths[-1]):  # llama.cpp takes it, and no policy means it
            unverified = settings.model_copy(update={"spec_draft_n_min": length + 1})
            setups.append(Setup(partial(start, unverified), length))
    return setups


def running(url: str, target: Path) -> Client:
    """A running server; `EngineError` if it serves another file."""
    client = Client(url)
    if client.model not in ("", target.name):
        raise EngineError(
            f"{url} serves {client.model}, and --target is {target.name}",
            hint="give the files of the running servers",
        )
    return client


def measure(
    setups: Sequence[Setup], grid: ProfileGrid, vocab_size: int, *, drafts: bool
) -> tuple[list[Wave], str, bool]:
    """The waves of every server, the builds of llama.cpp in words, and whether a server failed.

    A server that does not start or dies loses its own later waves alone, with a warning.

    Raises:
        EngineError: too few waves are left, or none with drafts.
    """
    num_passes = 1 if grid.quick else NUM_PASSES
    is_given = "batch_sizes" in grid.model_fields_set or not grid.quick
    batch_sizes = grid.batch_sizes if is_given else (1, 4)
    waves, builds, short = list[Wave](), set[int](), set[int]()
    failures = dict[Setup, EngineError]()  # the first of each server
    total = num_passes * len(setups) * len(grid.context_tokens) * len(batch_sizes)
    with progress("timings", total):
        for number in range(num_passes):
            for setup in setups if number % 2 == 0 else setups[::-1]:
                try:
                    with closing(setup.start()) as client:
                        for context in grid.context_tokens:
                            prompt = [3 + 7 * i % (vocab_size - 3) for i in range(context)]
                            for size in batch_sizes:
                                found = [*wave(client, setup, prompt, size)]
                                builds.add(client.build)
                                short |= set() if found else {size}
                                waves += found
                                advance("timings")
                except EngineError as error:
                    failures.setdefault(setup, error)
    reasons = dict.fromkeys(one.line for one in failures.values())
    if not waves and len(reasons) == 1:
        raise failures.popitem()[1]
    for failure in reasons:
        logger.warning("timings are lost: %s", failure)
    for size in sorted(short):
        logger.warning("timings are lost: %d requests did not run together", size)
    hint = "the warnings name lost ones; time more lengths, batch sizes or contexts"
    if len(waves) < MIN_POINTS:
        raise EngineError(
            f"{len(waves)} timings of llama.cpp succeeded, and a clock needs {MIN_POINTS}",
            hint=hint,
        )
    if drafts and not any(one.levels for one in waves):
        raise EngineError("no timing of llama.cpp has drafts", hint=hint)
    build = f"build {' and '.join(str(one or 'unknown') for one in sorted(builds))}"
    if builds != {CHECKED_BUILD}:
        logger.warning("llama.cpp of %s; specctl was checked with %d", build, CHECKED_BUILD)
    return waves, build, bool(failures)


def wave(client: Client, setup: Setup, prompt: Sequence[int], size: int) -> Iterator[Wave]:
    """The rounds of a request that joins `size - 1` others, and the reading of its prompt if it is
    alone.

    The request runs twice, the second time for more rounds: their difference has neither
    its first round nor its last ones, whose drafts the end of the text cuts.
    """
    tail = 2 + (setup.length or 0)
    num_rounds = ROUNDS if setup.length is None else max(ROUNDS, TOKENS // (1 + setup.length))
    spare = 6 if setup.length is None else 1  # tokens of a round that the others may accept
    with ThreadPoolExecutor(size) as pool:
        num_tokens = spare * (2 * tail + num_rounds + SLACK)
        others = [
            pool.submit(client.complete, prompt, num_tokens, ignore_eos=True, reuses=True)
            for _ in range(size - 1)
        ]
        if others:  # returns when the prompts of the others have been read
            client.complete(prompt, 1, ignore_eos=True, reuses=True)
        short, long = (
            client.complete(prompt, tail + more, ignore_eos=True, reuses=True).timings
            for more in (0, num_rounds)
        )
        is_full = not any(other.done() for other in others)
        for other in others:
            other.result()
    rounds = long.predicted_n - short.predicted_n - long.draft_n_accepted + short.draft_n_accepted
    if not is_full or rounds < 1 or long.predicted_ms <= short.predicted_ms:
        return
    drafted = (long.draft_n - short.draft_n) / rounds
    levels = drafted if setup.length is None else setup.length
    yield Wave(
        batch_size=size,
        verified=size * (1 + drafted),
        prompt_tokens=0,
        cached=size * (len(prompt) + (short.predicted_n + long.predicted_n) / 2),
        levels=levels,
        drafts=levels > 0,
        total_us=1e3 * (long.predicted_ms - short.predicted_ms) / rounds,
    )
    if size == 1 and short.prompt_n > 1:
        yield Wave(1, 0.0, short.prompt_n, 0.0, 0.0, levels > 0, 1e3 * short.prompt_ms)


def measure_clock(
    target: str, drafter: str, urls: Sequence[str], grid: ProfileGrid, num_threads: int | None
) -> tuple[EngineCost, bool]:
    """The cost model of llama.cpp with a pair of GGUF files, and whether a server failed.

    Args:
        drafter: `none` times plain decoding alone. urls: running servers; none starts own ones.

    Raises:
        UsageError: names that are no GGUF files. EngineError: see `measure`.
    """
    files = [Path(name) for name in (target, drafter) if name != "none"]
    for file in files:
        if file.suffix != ".gguf" or not file.is_file():
            raise UsageError(
                f"--engine llamacpp times GGUF files, and {file} is none",
                hint="write them with specctl export --to llamacpp -o DIR, and give --target and "
                "--drafter (or --drafter none)",
            )
    head = files[1] if len(files) > 1 else None
    vocab_size = check_pair(files[0], head).vocab_size
    setups = [Setup(partial(running, url, files[0]), None) for url in urls]
    setups = setups or own_setups(files[0], head, grid, num_threads)
    waves, build, has_failed = measure(setups, grid, vocab_size, drafts=head is not None)
    return fit(waves, build, files[0], head), has_failed


def fit(waves: Sequence[Wave], build: str, target: Path, drafter: Path | None) -> EngineCost:
    """The cost model of waves, with its error at every fifth of those with rounds, held out."""
    columns = {n: np.array([getattr(w, n) for w in waves]) * 1.0 for n in vars(waves[0])}
    # in order of size, so that a size that was timed twice is held out once at most
    by_size = np.lexsort([columns[name] for name in ("levels", "verified", "batch_size")])
    rounds = by_size[columns["prompt_tokens"][by_size] == 0]
    is_held = np.isin(np.arange(len(waves)), rounds[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
    used, held = ({n: of[rows] for n, of in columns.items()} for rows in (~is_held, is_held))
    sizes = np.unique(used["verified"][used["prompt_tokens"] == 0].round())
    sizes = sizes[: len(sizes) * (len(sizes) > 1)]
    reads = used["drafts"] > 0
    if reads[used["prompt_tokens"] > 0].all():  # nothing tells the drafter's part
        reads[:] = False
    counts = rate_counts(used, reads, sizes=sizes if sizes.size else None)
    facts = {
        "engine": "llama.cpp",
        "engine_version": build,
        "device": processor_name(),
        "dtype": package()
        .LlamaFileType(read_fields(target).get("general.file_type", 0))
        .name.lower(),
        "pair": fingerprint(target, drafter),
        "traces_digest": json_digest(canonical_json([vars(one) for one in waves])),
        "host_us": 0.0,
        "host_request_us": 0.0,
        "verify_sizes": tuple(sizes.astype(int).tolist()),
    }
    return fit_rates({"total_us": counts["verify_us"] | counts["draft_us"]}, used, held, facts)


def fingerprint(target: Path, drafter: Path | None) -> PairFingerprint:
    """The files of a pair."""
    names = [one for one in read_fields(target).items() if one[0].startswith("tokenizer.")]
    return PairFingerprint(
        target_digest=weights_digest(target),
        drafter_digest=NO_DIGEST if drafter is None else weights_digest(drafter),
        tokenizer_digest=json_digest(canonical_json(dict(names))),
        target=target.name,
        drafter="none" if drafter is None else drafter.name,
    )
