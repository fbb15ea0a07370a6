"""Each system as its paper runs it, against the baseline that its paper uses, on this pair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specctl.policy import Policy
from specctl.runtime.policy_spec import resolve_policy
from systems.choosing import Found, levels_of
from systems.curves import Curve, Paired
from systems.roster import Roster
from systems.shapes import DEPTH

EAGLE3 = "eagle3-paper"
"""8 levels, top-k 10, 60 nodes."""
LOW = "echo-paper:thresholds=0.1/0.05/0.02"
"""Gates of the paper's levels that close a quarter as often: nobody else can use what they save."""
ABLATIONS = (LOW, "echo-paper", "echo-fixed", "echo-dense")
"""ECHO with low bars; with those that its paper prints; with one for all gates; with a gate at
every level."""
C2T_DEPTH = 11
"""Levels of C2T and of its EAGLE-2 (appendix B.1)."""
C2T_BETAS = (0.002, 0.006, 0.015, 0.03, 0.06, 0.12)
C2T_SIZES = (32, 60)
Row = dict[str, Any]


def paper_rows(found: Found, who: Roster, paired: Paired) -> Iterator[Row]:
    """One row a setting: beside its paper's baseline, and beside static trees of its own depth."""
    yield _row(found, "HeteroSpec", who.fitted["HeteroSpec, paper"], EAGLE3, paired)
    base = f"eagle2:depth={DEPTH}:top_k=10:num_tokens=60"
    yield _row(found, "HeteroSpec, base 6", who.fitted["HeteroSpec"], base, paired)
    yield _row(found, "ECHO", who.fitted["ECHO gates"], EAGLE3, paired)
    for word in ABLATIONS:
        yield _row(found, word, [policy_of(word)], EAGLE3, paired)
    yield _row(found, "ECHO, dense gates", who.fitted["ECHO, dense gates"], EAGLE3, paired)
    ours = [c2t_curve(found, who, seed) for seed in range(who.num_seeds)]
    for size in C2T_SIZES:
        yield c2t_row(found, ours, size, paired)


def policy_of(words: str) -> Policy:
    """A policy in words, presets among them."""
    return resolve_policy(words).policy


def _row(found: Found, name: str, fits: list[Policy], baseline: str, paired: Paired) -> Row:
    depth = max(map(levels_of, fits))
    ours: list[Curve] = [found.one(name, policy) for policy in fits]
    theirs, static = found.one(baseline, policy_of(baseline)), found.static(depth)
    return {
        "system": name,
        "baseline": baseline,
        "levels": depth,
        "tau": paired.tau(ours),
        "tau_of_baseline": paired.tau(theirs),
        "tau_over_baseline": paired.tau_change(ours, theirs),
        "calls_over_baseline": paired.change(ours, theirs, "calls"),
        "verified_over_baseline": paired.change(ours, theirs, "verified"),
        "levels_over_baseline": paired.change(ours, theirs, "levels"),
        "utilisation": paired.ratio(ours, "accepted", "levels"),
        "utilisation_of_baseline": paired.ratio(theirs, "accepted", "levels"),
        "tokens_at_equal_tau_static": paired.tokens_against(ours, static),
        "tau_at_equal_tokens_static": paired.tau_against(ours, static),
        "support": min(curve.support for curve in ours),
    }


def c2t_curve(found: Found, who: Roster, seed: int) -> Curve:
    """C2T as its paper has it, over beta: how its paper compares it with EAGLE-2."""
    shape = who.scored("C2T, paper", seed).model_copy(update={"depth": C2T_DEPTH})
    settings = {f"{b:g}": Policy(shape=shape.model_copy(update={"beta": b})) for b in C2T_BETAS}
    return found.bench.curve(f"C2T, paper {seed}", settings, "held_out")


def c2t_row(found: Found, ours: list[Curve], size: int, paired: Paired) -> Row:
    """Tokens at the τ of EAGLE-2's tree of so many nodes, as deep as C2T."""
    baseline = f"eagle2:depth={C2T_DEPTH}:top_k=10:num_tokens={size}"
    theirs = found.one(baseline, policy_of(baseline))
    return {
        "system": f"C2T, {size} nodes",
        "baseline": baseline,
        "levels": C2T_DEPTH,
        "tau_of_baseline": paired.tau(theirs),
        "tokens_at_equal_tau_baseline": paired.tokens_of(ours, theirs),
        "threshold_at_equal_tau_baseline": paired.tokens_of(found.threshold(C2T_DEPTH), theirs),
        "support": min(curve.support for curve in ours),
    }
