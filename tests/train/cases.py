"""Small data of every fit, made up and seeded, and one quick fit of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from specctl.logs.node_sample import LoggedNodes, logged_nodes
from specctl.logs.trace_set import TraceSet
from specctl.policy import EntropyStop, Policy
from specctl.replay.metrics import Sums
from specctl.train import configs
from specctl.train.c2t import fit_c2t
from specctl.train.cart import fit_rounds
from specctl.train.certify import Sweep
from specctl.train.echo import EchoReport, fit_gates
from specctl.train.paired import Answer
from specctl.train.positions import PositionRows
from specctl.train.report import Fit
from tests.replay.logs import random_traces

SCHEMA = {
    "prompt_id": pl.String, "offered_depth": pl.Int16, "top_k": pl.Int16, "phi": pl.Float32,
    "phi_depth": pl.Int16, "num_accepted": pl.Int32, "fully_accepted": pl.Boolean, "tcr": pl.Int32,
}  # fmt: skip
BASE_DEPTH, BASE_TOP_K = 6, 8


def rounds_frame(
    phi: Sequence[float | None],
    accepted: Sequence[int],
    tcr: Sequence[int | None],
    prompts: Sequence[str],
) -> pl.DataFrame:
    """A table of the given rounds, drafted by the default base tree."""
    rows = zip(prompts, phi, accepted, tcr, strict=True)
    columns = [
        (prompt, BASE_DEPTH, BASE_TOP_K, value, BASE_DEPTH, count, count == BASE_DEPTH, rank)
        for prompt, value, count, rank in rows
    ]
    return pl.DataFrame(columns, schema=SCHEMA, orient="row")


def noisy_rounds(num_rounds: int = 3000, num_prompts: int = 20, seed: int = 0) -> pl.DataFrame:
    """Rounds where a low Φ means more acceptance and a lower rank, with noise."""
    rng = np.random.default_rng(seed)
    phi = rng.gamma(2.0, 2.5, num_rounds).astype(np.float32)
    accepted = np.minimum(BASE_DEPTH, rng.poisson(6.0 * np.exp(-phi / 8.0)))
    rank = 1 + accepted + rng.poisson(phi)
    tcr = [int(r) if a else None for r, a in zip(rank, accepted, strict=True)]
    prompts = [f"prompt-{i}" for i in rng.integers(0, num_prompts, num_rounds)]
    return rounds_frame(phi.tolist(), accepted.tolist(), tcr, prompts)


DEPTH, TOP_K = 4, 3
NODE_PROMPTS = tuple(f"p{number:06d}" for number in range(16))


def node_traces(folder: Path, num_prompts: int = 12, **options: Any) -> TraceSet:
    """Traces in which the target takes a child with the probability that the drafter gives it."""
    sizes: dict[str, Any] = {"depth": DEPTH, "top_k": TOP_K, "nested": False}
    return random_traces(folder, num_prompts=num_prompts, **{**sizes, **options})


def node_source(folder: Path, **options: Any) -> LoggedNodes:
    """The same as a fit reads them."""
    return logged_nodes(node_traces(folder, **options))


def c2t_config(nodes: dict[str, Any] | None = None, **changes: Any) -> configs.C2TConfig:
    """A fit of a second, of as much as such logs hold."""
    sizes = {"depth": DEPTH, "first_top_k": TOP_K, "second_top_k": TOP_K}
    ffn = configs.FfnConfig(hidden=8, epochs=6, min_steps=1, batch_size=256)
    fields = {"ffn": ffn, "recall": 0.7, "held_out_frac": 0.4, **changes}
    return configs.C2TConfig(nodes=configs.NodeConfig(**(sizes | (nodes or {}))), **fields)


ECHO = configs.EchoConfig(depth=4, width=2, max_width=4, min_rows=20)


COUNTS = {
    "calls": np.array([100.0]),
    "tokens": np.array([300.0]),
    "accepted": np.array([200.0]),
    "verified": np.array([900.0]),
    "levels": np.array([400.0]),
    "utilisation": np.array([50.0]),
}


class Replay:
    """`Replays` with given times, by the threshold of a gate; `asked` holds who asked."""

    def __init__(self, best: dict[int, float] | None = None) -> None:
        self.best = best
        self.asked: list[tuple[Policy, frozenset[str]]] = []

    def sums(self, policies: Sequence[Policy], prompts: Sequence[str]) -> list[Sums]:
        self.asked += [(policy, frozenset(prompts)) for policy in policies]
        return [
            Sums.of(["it"], [""], {"time_us": np.array([self._time(one.shape)], float), **COUNTS})
            for one in policies
        ]

    def _time(self, shape: Any) -> float:
        if self.best is None:
            return math.nan
        gates = zip(shape.gate_levels, shape.thresholds, strict=True)
        return 1000 + sum(abs(bar - self.best.get(level, 0.0)) for level, bar in gates)


def echo_fit(rows: pl.DataFrame, config: configs.EchoConfig, replay: Any = None) -> Fit[EchoReport]:
    """A fit to made-up positions, of which 7 are left out."""
    found = PositionRows(rows, 7)
    return fit_gates(found, config, replay or Replay())


def planted(num_prompts: int = 40, per_prompt: int = 60, seed: int = 0) -> pl.DataFrame:
    """Half of the rounds fail at level 1, where confidence is below .3; of the others half fail at
    level 4, where it is below .1; levels 2 and 3 say the same whatever happens."""
    rng = np.random.default_rng(seed)
    n = num_prompts * per_prompt
    fails, stops = rng.random(n) < 0.5, rng.random(n) < 0.5
    one = np.where(fails, rng.uniform(0.1, 0.4, n), rng.uniform(0.28, 0.9, n))
    four = np.where(stops, rng.uniform(0.01, 0.11, n), rng.uniform(0.095, 0.25, n))
    two, three = rng.uniform(0.2, 0.3, n), rng.uniform(0.2, 0.3, n)
    accepted = np.where(fails, 0, np.where(stops, 3, 4))
    levels = {f"level_{d}": np.log(v) for d, v in enumerate((one, two, three, four), 1)}
    columns = {name: values.astype(np.float32) for name, values in levels.items()}
    prompts = np.repeat([f"p{i}" for i in range(num_prompts)], per_prompt)
    return pl.DataFrame({"prompt_id": prompts, "accepted": accepted.astype(np.int32), **columns})


CLIPS = configs.AdasdConfig(clips=(0.1, 0.2, 0.3))


def answer(
    name: str, token_ids: tuple[int, ...] = (1, 2, 3), *, right: bool | None = None, **more: Any
) -> Answer:
    fields: dict[str, Any] = {
        "category": "c", "calls": 2, "verified_tokens": 10, "drafted_levels": 4,
        "opening": None, "is_copied": False, "wall_us": 1.0,
    }  # fmt: skip
    return Answer(prompt_id=name, token_ids=token_ids, is_right=right, **{**fields, **more})


def by_key(*answers: Answer) -> dict[str, Answer]:
    return {item.prompt_id: item for item in answers}


def graded(lost: int, calls: int, num_prompts: int = 200) -> dict[str, Answer]:
    """All right but the first `lost`."""
    given = {f"q{i:03}": i >= lost for i in range(num_prompts)}
    return by_key(
        *(answer(n, (1, 2, 3, 5 - right), right=right, calls=calls) for n, right in given.items())
    )


def swept(*lost: int) -> Sweep:
    """A sweep of `CLIPS` in which the n-th one loses so many of 200 answers."""
    relaxed = tuple(graded(n, 2) for n in lost)
    return Sweep(CLIPS, Policy(shape=EntropyStop()), graded(0, 3), relaxed)


FITS: dict[str, Callable[[LoggedNodes], Fit[Any]]] = {
    "hetero": lambda _: fit_rounds(noisy_rounds(), configs.CartConfig()),
    "c2t": lambda source: fit_c2t(source, NODE_PROMPTS, c2t_config()),
    "echo": lambda _: echo_fit(planted(), ECHO),
}
