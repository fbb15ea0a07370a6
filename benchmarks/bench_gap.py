"""The gap to the best tree: the marginal rule and what can feed it, beside the tuned static tree.

Replayed: each family's setting is chosen on training prompts under a cost model and measured on the
others, beside the ladder's R_feat and R_prob. A policy's own time is not in these figures. Live
(`--live N`): the chosen settings decode N held-out prompts in one run, prompt by prompt in rotating
order, so that drift of the machine hits all alike; there it is. Ratios are paired by prompt.

    specctl collect PROMPTS -o DENSE --dense --max-new-tokens 64
    specctl profile -o cost_model.json --batch-sizes 1 --threads 1
    python benchmarks/bench_gap.py --traces DENSE --prompts PROMPTS --cost-model cost_model.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, report

from specctl.collect.prompts import load_prompt_files
from specctl.logs.node_sample import logged_nodes, sample_nodes
from specctl.logs.positions import Floats
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.policy import (
    AcceptanceTable,
    Chain,
    JointThreshold,
    Policy,
    RootOnly,
    ScoredTree,
    Scorer,
    StaticTree,
)
from specctl.replay.config import LadderConfig
from specctl.replay.cost.files import load_cost_model
from specctl.replay.ladder.build import build_ladder
from specctl.replay.ladder.tally import LoadClock, column, tally_rounds, tokens_per_us
from specctl.replay.rounds import replay
from specctl.runtime.api import Decoder
from specctl.runtime.conversations import Conversation, DecodeSettings, next_request
from specctl.runtime.load import load_pair
from specctl.runtime.policy_spec import words_of
from specctl.stats import Interval, Resamples, Split, ratio_of_ratios, split_prompts
from specctl.train.c2t import train_ffn
from specctl.train.configs import FfnConfig
from specctl.train.survival import fit_table

SHARE, SEED = 0.5, 0
NARROWED = 6
"""Settings of a family that are replayed on all training prompts, after a quarter of them."""
TABLE = ("draft_logp", "copy_length")
ALL = ("joint_logp", "parent_entropy", "depth", "sibling_rank", *TABLE)
Row = dict[str, Any]


@dataclass(frozen=True)
class Replayer:
    """The log, its sides and a clock at one request."""

    log: DenseLog
    sides: Split
    clock: LoadClock

    def sums(self, policies: Sequence[Policy], prompts: Sequence[str]) -> Floats:
        """`[policies, P, S]` sums by prompt, in the order of the names."""
        place = {name: number for number, name in enumerate(prompts)}
        found = []
        for run in replay(self.log.only(prompts), policies, with_bounds=False):
            by_request = tally_rounds(run, self.clock)
            codes = np.array([place.get(name, -1) for name in run.positions.prompt_ids])
            total = np.zeros((len(prompts), by_request.shape[1]))
            np.add.at(total, codes[run.positions.prompt], by_request)
            found.append(total)
        return np.stack(found)

    def fastest(self, policies: Sequence[Policy]) -> Policy:
        """The setting with the most tokens a second on the training prompts."""
        some, left = self.sides.train[::4], list(policies)
        if len(left) > NARROWED:
            rates = tokens_per_us(self.sums(left, some).sum(1))
            left = [left[number] for number in np.argsort(-rates)[:NARROWED]]
        rates = tokens_per_us(self.sums(left, self.sides.train).sum(1))
        return left[int(np.argmax(rates))]


# --------------------------------------------------------------------------- families


def static_grid(deepest: int) -> Iterator[Policy]:
    yield from (Policy(shape=Chain(num_draft_tokens=length)) for length in range(1, deepest + 1))
    for depth in range(1, deepest + 1):
        for top_k in (2, 4, 8, 10):
            for size in (2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64):
                if depth < size <= 1 + top_k + (depth - 1) * top_k**2:
                    yield Policy(shape=StaticTree(depth=depth, top_k=top_k, num_tokens=size))


def threshold_grid(depth: int, levels: Sequence[float]) -> Iterator[Policy]:
    for top_k in (4, 10):
        for prob in (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.13, 0.17):
            for level in levels:
                sizes = {"depth": depth, "top_k": top_k, "min_prob": prob}
                yield Policy(shape=JointThreshold(**sizes, min_level_prob=level))


def scored_grid(scorer: Scorer, depth: int, levels: Sequence[float]) -> Iterator[Policy]:
    for beta in (0.01, 0.03, 0.05, 0.08, 0.12):
        for level in levels:
            yield Policy(
                shape=ScoredTree(
                    scorer=scorer,
                    predicts="conditional",
                    beta=beta,
                    depth=depth,
                    min_level_prob=level,
                )
            )


STOPS = (0.1, 0.2, 0.4, 0.5, 0.6, 0.7)


def families(
    traces: TraceSet, train: Sequence[str], depth: int
) -> Iterator[tuple[str, list[Policy]]]:
    """What competes, and the settings of each; scorers are fitted to the training prompts."""
    yield "tuned static", list(static_grid(depth))
    yield "threshold", list(threshold_grid(depth, (0.0,)))
    yield "threshold, levels by the marginal rule", list(threshold_grid(depth, STOPS))
    sizes: dict[str, Any] = {"depth": depth, "first_top_k": 10, "second_top_k": 10}
    draw: dict[str, Any] = {"predicts": "conditional", "negatives": 0.0, "max_rows": 10**7}
    source = logged_nodes(traces)
    rows = sample_nodes(source, train, features=TABLE, **sizes, **draw, seed=SEED)
    table, _ = fit_table(rows, num_bins=32, weight=20.0)
    middle = table.log_odds[len(table.log_odds) // 2]
    alone = AcceptanceTable(edges=table.edges, log_odds=(middle,) * len(table.log_odds))
    yield "table of draft probability", list(scored_grid(alone, depth, STOPS))
    yield "table, copies too (fit survival)", list(scored_grid(table, depth, STOPS))
    rows = sample_nodes(source, train, features=ALL, **sizes, **draw, seed=SEED)
    network = train_ffn(rows.features, rows.accepted, ALL, FfnConfig(hidden=24))
    yield "network, draft and text, no rule of levels", list(scored_grid(network, depth, (0.0,)))
    yield "network, draft and text", list(scored_grid(network, depth, (0.1, 0.3, 0.6)))


# --------------------------------------------------------------------------- live


def live_rows(chosen: dict[str, Policy], wanted: set[str], given: argparse.Namespace) -> list[Row]:
    """Every chosen setting on the same held-out prompts, in turns."""
    prompts = [p for p in load_prompt_files(given.prompts) if p.prompt_id in wanted]
    prompts = prompts[:: max(1, len(prompts) // given.live)][: given.live]
    systems = {"plain decoding": Policy(shape=RootOnly()), **chosen}
    pairs = {name: load_pair("embedded", "embedded", device="cpu") for name in systems}
    tokenizer, settings = pairs["plain decoding"].target.tokenizer, DecodeSettings(given.tokens)
    requests = [next_request(tokenizer, Conversation(prompt), settings) for prompt in prompts]
    room = max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
    loops = {name: Decoder(pairs[name], systems[name]).loop_for(room) for name in systems}
    names, sums = list(systems), {name: np.zeros((len(requests), 6)) for name in systems}
    for name in names:
        list(loops[name].run(requests[:1]))  # warm-up
    for number, request in enumerate(requests):
        texts, first = set(), number % len(names)
        for name in names[first:] + names[:first]:
            began = time.perf_counter()
            [done] = loops[name].run([request])
            wall, metrics = time.perf_counter() - began, done.metrics
            times = (metrics.draft_us, metrics.policy_us, metrics.verify_us)
            sums[name][number] = (len(done.token_ids), wall, metrics.calls, *times)
            texts.add(tuple(done.token_ids))
        assert len(texts) == 1, f"{request.prompt_id}: texts differ"
    static = sums["tuned static"]
    rows = []
    for name in names:
        tokens, wall, calls, draft, policy, verify = sums[name].T
        ratio = ratio_of_ratios((tokens, wall), (static[:, 0], static[:, 1]))
        rows.append(
            {
                "system": f"live: {name}",
                "setting": words_of(systems[name]) or "",
                "tokens_per_s": tokens.sum() / wall.sum(),
                "over_static": said(ratio),
                "tau": tokens.sum() / calls.sum(),
                "draft_us": draft.sum() / calls.sum(),
                "policy_us": policy.sum() / calls.sum(),
                "verify_us": verify.sum() / calls.sum(),
                "num_prompts": len(requests),
            }
        )
    return rows


def best_trees(
    log: DenseLog, traces: TraceSet, clock: LoadClock, chosen: dict[str, Policy]
) -> dict[str, float]:
    """Tokens a second of the ladder's limits."""
    ladder = build_ladder(
        log,
        split_prompts(traces.prompt_ids, held_out_frac=SHARE, seed=SEED),
        clock,
        [(name, policy) for name, policy in chosen.items() if name != "tuned static"],
        config=LadderConfig(held_out_frac=SHARE, seed=SEED),
    )
    rates = {rung.label: rung.tokens_per_s.value for rung in ladder.rungs}
    return {label: rates[label] for label in ("R_feat", "R_prob", "R_clair")}


def said(found: Interval) -> str:
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


# --------------------------------------------------------------------------- the run


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--traces", nargs="+", type=Path, required=True, help="dense sets")
    options.add_argument("--prompts", nargs="+", required=True, help="their prompts, for --live")
    options.add_argument("--cost-model", type=Path, required=True, help="file or name")
    options.add_argument("--depth", type=int, default=8, help="levels at most")
    options.add_argument("--live", type=int, default=200, help="prompts; 0 for none")
    options.add_argument("--tokens", type=int, default=64, help="per live prompt")
    options.add_argument("--name", default="gap", help="of the JSON")
    options.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    given = options.parse_args()
    given.device = "cpu"
    torch.set_num_threads(1)
    traces = TraceSet.open(*given.traces, verify=False)
    sides = split_prompts(traces.prompt_ids, held_out_frac=SHARE, seed=SEED)
    log, clock = DenseLog.open(traces), LoadClock(load_cost_model(given.cost_model))
    replayer, chosen, rows = Replayer(log, sides, clock), {}, []
    for name, policies in families(traces, sides.train, given.depth):
        chosen[name] = replayer.fastest(policies)
        print(f"{name}: {len(policies)} settings", flush=True)
    limits = best_trees(log, traces, clock, chosen)
    found = replayer.sums(list(chosen.values()), sides.held_out)
    resamples = Resamples.draw(len(sides.held_out), seed=SEED)
    static = found[0]
    at_static = 1e6 * float(tokens_per_us(static.sum(0)))
    gap = limits["R_feat"] - at_static
    for (name, policy), sums in zip(chosen.items(), found, strict=True):
        total, rate = sums.sum(0), 1e6 * float(tokens_per_us(sums.sum(0)))
        calls = column(total, "calls")
        rows.append(
            {
                "system": name,
                "setting": words_of(policy) or described(policy),
                "tokens_per_s": rate,
                "over_static": said(resamples.ratio(sums, static, tokens_per_us)),
                "of_gap_to_R_feat": (rate - at_static) / gap,
                "tau": column(total, "tokens") / calls,
                "verified": column(total, "verified") / calls,
                "levels": column(total, "levels") / calls,
            }
        )
    for label, rate in limits.items():
        rows.append(
            {"system": label, "tokens_per_s": rate, "over_static": f"{rate / at_static:.3f}"}
        )
    if given.live:
        rows += live_rows(chosen, set(sides.held_out), given)
    note = (
        f"embedded pair, float32, one thread, one request; replayed on {len(sides.held_out)} "
        f"held-out prompts, settings chosen on {len(sides.train)}"
    )
    columns = dict.fromkeys(key for row in rows for key in row)
    report(given.name, [{key: row.get(key, "") for key in columns} for row in rows], given, note)


def described(policy: Policy) -> str:
    shape = policy.shape
    assert isinstance(shape, ScoredTree)
    return f"beta={shape.beta:g}:depth={shape.depth}:min_level_prob={shape.min_level_prob:g}"


if __name__ == "__main__":
    main()
