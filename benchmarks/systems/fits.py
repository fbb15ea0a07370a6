"""Fits on the training half, five times each: to a bootstrap resample of its prompts, and with a
seed of their own."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl

from specctl.logs.node_sample import LoggedNodes, NodeRows, sample_nodes
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.policy import AcceptanceTable, Policy, ScoredTree
from specctl.replay.fit_inputs import Replayer, gate_rows, rounds_to_fit
from specctl.runtime.policy_spec import resolve_policy
from specctl.train.c2t import train_ffn
from specctl.train.cart import fit_cart
from specctl.train.configs import DEFAULT_FEATURES, CartConfig, EchoConfig, FfnConfig
from specctl.train.echo import fit_echo
from specctl.train.presets import PRESETS
from specctl.train.survival import fit_table
from systems.families import TOP_K

SEEDS = (0, 1, 2, 3, 4)
HELD_BACK = 0.01
"""Of a resample, for the figures of a fit's own report, which nobody reads here."""
TEXT = ("draft_logp", "parent_entropy", "depth", "copy_length")
"""The drafter's word and what the text repeats (docs/features.md)."""
Label = Literal["joint", "conditional"]


@dataclass
class TrainingHalf:
    """The half of the log that fits see; what they read of it is read once."""

    traces: TraceSet
    log: DenseLog
    prompts: tuple[str, ...]
    known: dict[str, Any] = field(default_factory=dict)

    def counts(self, seed: int) -> dict[str, int]:
        """How often each prompt is drawn in a resample."""
        shares = np.full(len(self.prompts), 1 / len(self.prompts))
        drawn = np.random.default_rng((seed, 17)).multinomial(len(self.prompts), shares)
        return dict(zip(self.prompts, drawn.tolist(), strict=True))

    def drawn(self, seed: int, key: str, read: Callable[[], pl.DataFrame]) -> pl.DataFrame:
        """Rows of a table with a column `prompt_id`, each as often as its prompt is drawn."""
        table: pl.DataFrame = self._once(key, read)
        names = table["prompt_id"].cast(pl.String)
        counts = self.counts(seed)
        times = np.array([counts.get(name, 0) for name in names])
        return table[np.repeat(np.arange(len(times)), times)]

    def nodes(
        self,
        seed: int,
        features: tuple[str, ...],
        predicts: Label,
        negatives: float,
        top_k: int = TOP_K,
    ) -> NodeRows:
        """Labelled nodes of the resample, of trees of 11 levels."""

        def read() -> NodeRows:
            return sample_nodes(
                LoggedNodes(self.log, self.traces.num_rows("rounds")),
                self.prompts,
                features=features,
                predicts=predicts,
                depth=11,
                first_top_k=top_k,
                second_top_k=top_k,
                negatives=negatives,
                max_rows=10**7,
                seed=0,
            )

        rows: NodeRows = self._once(f"{features} {predicts} {negatives} {top_k}", read)
        counts = self.counts(seed)
        times = np.array([counts[name] for name in rows.prompt_ids])[rows.prompt]
        return rows.take(np.repeat(np.arange(len(times)), times))

    def _once(self, key: str, read: Callable[[], Any]) -> Any:
        if key not in self.known:
            self.known[key] = read()
        return self.known[key]


# --------------------------------------------------------------------------- systems


def hetero(half: TrainingHalf, seed: int, *, depth: int, paper: bool = False) -> Policy:
    """HeteroSpec over a tree of so many levels: 60 nodes, top-k 10, alpha half its levels.

    Args:
        paper: its Eq. 2 as printed and P* by the last token's own probability.
    """
    base = f"eagle2:depth={depth}:top_k=10:num_tokens=60"
    settings: dict[str, Any] = {"algorithm": "printed", "path": "conditional"} if paper else {}
    config = CartConfig(
        base=resolve_policy(base).policy.shape, seed=seed, held_out_frac=HELD_BACK, **settings
    )

    def read() -> pl.DataFrame:
        rounds = rounds_to_fit(half.traces, base, conditional=paper).rounds
        return rounds.filter(pl.col("prompt_id").cast(pl.String).is_in(half.prompts)).collect()

    rounds = half.drawn(seed, f"{base} {config.path}", read)
    return fit_cart(rounds.lazy(), config).policy


def c2t(
    half: TrainingHalf, seed: int, *, features: tuple[str, ...], predicts: Label, paper: bool
) -> Policy:
    """C2T's network; the paper's has Top-K 15, trains for 10 passes and prunes leaves too."""
    top_k = PRESETS["c2t-paper"].options["first_top_k"] if paper else TOP_K
    rows = half.nodes(seed, features, predicts, 10.0, top_k)
    size = {"hidden": 48, "min_steps": 1} if paper else {"hidden": 24}
    network = train_ffn(
        rows.features,
        rows.accepted,
        features,
        FfnConfig(seed=seed, **size),
        log_kept=rows.log_kept,
    )
    shape = ScoredTree(
        scorer=network,
        predicts=predicts,
        beta=0.5,
        first_top_k=top_k,
        second_top_k=top_k,
        keep_leaves=not paper,
    )
    return Policy(shape=shape)


def survival(half: TrainingHalf, seed: int) -> Policy:
    """The marginal rule on a table of acceptance (`specctl fit survival`)."""
    features = AcceptanceTable.model_fields["features"].default
    table, _ = fit_table(half.nodes(seed, features, "conditional", 0.0), num_bins=32, weight=20.0)
    return Policy(shape=ScoredTree(scorer=table, predicts="conditional", beta=0.05))


def echo(half: TrainingHalf, seed: int, *, preset: str) -> Policy:
    """ECHO's gates, calibrated as its section 3.2 says, on the tree of a preset."""
    config = EchoConfig.model_validate(
        {**PRESETS[preset].options, "seed": seed, "held_out_frac": HELD_BACK}
    )
    rows = half.drawn(seed, "gates", lambda: gate_rows(half.log, config.open_shape).rows)
    return fit_echo(rows, config, Replayer(half.log, None, 1)).policy


FITS: dict[str, Callable[[TrainingHalf, int], Policy]] = {
    "HeteroSpec": lambda half, seed: hetero(half, seed, depth=6),
    "HeteroSpec, paper": lambda half, seed: hetero(half, seed, depth=8, paper=True),
    "HeteroSpec, base 2": lambda half, seed: hetero(half, seed, depth=2),
    "C2T, paper": lambda half, seed: c2t(
        half, seed, features=DEFAULT_FEATURES["joint"], predicts="joint", paper=True
    ),
    "C2T, path and text": lambda half, seed: c2t(
        half, seed, features=TEXT, predicts="conditional", paper=False
    ),
    "survival table": survival,
    "ECHO gates": lambda half, seed: echo(half, seed, preset="echo-paper"),
    "ECHO, dense gates": lambda half, seed: echo(half, seed, preset="echo-dense"),
}
"""A line a fitted family."""


def fitted(half: TrainingHalf, work: Path, *, may_fit: bool = True) -> dict[str, list[Policy]]:
    """Every family's policies, one a seed, found again in `work` where they were fitted before.

    Raises:
        FileNotFoundError: one is not there, and none may be fitted.
    """
    named = "\n".join([half.log.digest, *half.prompts])
    folder = work / "fits" / hashlib.sha256(named.encode()).hexdigest()[:8]
    folder.mkdir(parents=True, exist_ok=True)
    return {
        name: [_of(name, seed, half, folder, may_fit=may_fit) for seed in SEEDS] for name in FITS
    }


def _of(name: str, seed: int, half: TrainingHalf, folder: Path, *, may_fit: bool) -> Policy:
    path = folder / f"{name} {seed}.json"
    if not path.exists():
        if not may_fit:
            raise FileNotFoundError(path)
        start = time.perf_counter()
        policy = FITS[name](half, seed)
        path.write_text(json.dumps(policy.model_dump(mode="json")), "utf-8")
        print(f"fit {name}, seed {seed}: {time.perf_counter() - start:.0f} s", flush=True)
    return Policy.model_validate_json(path.read_text("utf-8"))
