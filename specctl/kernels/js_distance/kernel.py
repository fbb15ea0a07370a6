"""The three kernels of `js_distance`; `fused.py` says how they share the work."""

# ruff: noqa: ANN001, ANN201, ANN202, N803  (arguments are pointers and constants)

from __future__ import annotations

import triton
import triton.language as tl

from specctl.kernels.online import LOWEST, weights_of

LOWEST_LOGP = tl.constexpr(-1e4)
"""Stands for log 0, as in `specctl.divergence`: its exponential is 0, and 0 times it is 0."""
LEAST_PROB = tl.constexpr(1e-37)
"""Of a token that neither says: any number whose logarithm is finite."""
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["num_splits", "num_rows"])
def sums_kernel(logits, row_stride, vocab_size, parts, num_splits, num_rows, BLOCK: tl.constexpr):
    """Maximum and sum of exponentials of one split of one row."""
    program = tl.program_id(0)
    row, split = program // num_splits, program % num_splits
    place = split * BLOCK + tl.arange(0, BLOCK)
    here = logits + row.to(tl.int64) * row_stride
    x = tl.load(here + place, mask=place < vocab_size, other=float("-inf")).to(tl.float32)
    best = tl.maximum(tl.max(x, 0), LOWEST)
    tl.store(parts + program, best)
    tl.store(parts + num_rows * num_splits + program, tl.sum(tl.exp(x - best), 0))


@triton.jit(do_not_specialize=["num_splits", "num_rows", "draft_splits", "target_splits"])
def divergence_kernel(
    draft,
    draft_stride,
    draft_size,
    draft_sums,
    draft_splits,
    target,
    target_stride,
    target_sums,
    target_splits,
    target_ids,
    parts,
    num_splits,
    num_rows,
    BLOCK: tl.constexpr,
    DRAFT_PARTS: tl.constexpr,
    TARGET_PARTS: tl.constexpr,
):
    """Over one split of the draft vocabulary: the divergence in nats, twice, and the mass of p."""
    program = tl.program_id(0)
    row, split = program // num_splits, program % num_splits
    place = split * BLOCK + tl.arange(0, BLOCK)
    is_token = place < draft_size
    token = tl.load(target_ids + place, mask=is_token, other=0).to(tl.int32)
    lowest = float("-inf")
    z_draft = tl.load(draft + row.to(tl.int64) * draft_stride + place, is_token, other=lowest)
    z_target = tl.load(target + row.to(tl.int64) * target_stride + token, is_token, other=lowest)
    draft_logp, q = _law(z_draft, draft_sums, row, draft_splits, num_rows, DRAFT_PARTS)
    target_logp, p = _law(z_target, target_sums, row, target_splits, num_rows, TARGET_PARTS)
    middle = tl.log(tl.maximum((p + q) * 0.5, LEAST_PROB))
    terms = p * (target_logp - middle) + q * (draft_logp - middle)
    tl.store(parts + program, tl.sum(terms, 0))
    tl.store(parts + num_rows * num_splits + program, tl.sum(p, 0))


@triton.jit
def _law(z, sums, row, num_splits, num_rows, PARTS: tl.constexpr):
    """Log-probabilities, bounded below, and probabilities of logits of a row."""
    split = tl.arange(0, PARTS)
    here = sums + row * num_splits + split
    best = tl.load(here, mask=split < num_splits, other=LOWEST)
    total = tl.load(here + num_rows * num_splits, mask=split < num_splits, other=0.0)
    top, weights = weights_of(best)
    logp = z.to(tl.float32) - top - tl.log(tl.sum(total * weights, 0))
    return tl.maximum(logp, LOWEST_LOGP), tl.exp(logp)


@triton.jit(do_not_specialize=["num_splits", "num_rows"])
def distance_kernel(
    parts, distance, num_splits, num_rows, SAYS_ALL: tl.constexpr, PARTS: tl.constexpr
):
    """One row's distance. What the drafter cannot say has q = 0 and adds p · log 2."""
    row = tl.program_id(0)
    split = tl.arange(0, PARTS)
    here = parts + row * num_splits + split
    nats = tl.sum(tl.load(here, mask=split < num_splits, other=0.0), 0)
    if not SAYS_ALL:
        said = tl.load(here + num_rows * num_splits, mask=split < num_splits, other=0.0)
        nats += tl.maximum(1.0 - tl.sum(said, 0), 0.0) * LN2
    bits = nats / (2 * LN2)
    bits = tl.where(bits < 0.0, 0.0, tl.where(bits > 1.0, 1.0, bits))  # and NaN stays NaN
    tl.store(distance + row, tl.sqrt(bits))
