"""`fit_rounds`: which rounds count, how the Φ axis is cut, what is reported and refused."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from sklearn.tree import DecisionTreeRegressor

from specctl.errors import SpecctlError, TraceEmptyError, UsageError
from specctl.policy import StaticTree, build_shape
from specctl.records import floor_float32
from specctl.stats import split_prompts
from specctl.train import cart
from specctl.train.configs import CartConfig
from specctl.train.report import Fit
from tests.train.cases import SCHEMA, noisy_rounds, rounds_frame

Fitted = Fit[cart.CartReport]


@pytest.fixture(scope="module")
def fit() -> Fitted:
    return cart.fit_rounds(noisy_rounds(), CartConfig())


def test_paper_settings_give_eight_bins_and_the_settled_plans(fit: Fitted) -> None:
    assert len(fit.data.bins) == 8
    assert [row.depth for row in fit.data.bins] == [9, 8, 7, 6, 6, 6, 6, 6]
    assert [row.num_tokens for row in fit.data.bins] == [18, 31, 49, 48, 48, 48, 48, 48]
    assert fit.policy.lossless
    assert build_shape(fit.policy.shape).max_depth == 9


@pytest.mark.parametrize("method", ["cart", "printed"])
@pytest.mark.parametrize(("label", "keep"), [("tcr", "fully_accepted"), ("accepted", "all")])
def test_bins_beat_a_constant_where_phi_tells(method: str, label: str, keep: str) -> None:
    config = CartConfig.model_validate({"algorithm": method, "label": label, "filter": keep})
    held_out = cart.fit_rounds(noisy_rounds(), config).data.held_out
    assert held_out.r_squared is not None
    assert held_out.r_squared > 0.2
    assert held_out.r_squared == pytest.approx(1 - held_out.mse / held_out.constant_mse)


def test_figures_of_bins_by_hand() -> None:
    # one training and one held-out prompt; two plateaus of the label, cut at Φ 2.5
    split = split_prompts(["a", "b"], held_out_frac=0.5, seed=0)
    train, test = split.train[0], split.held_out[0]
    frame = rounds_frame(
        [1.0, 2.0, 3.0, 4.0, 1.5, 3.5, 3.6],
        [6, 4, 1, 0, 4, 1, 0],
        [7, 5, 2, None, 6, 4, None],
        [train] * 4 + [test] * 3,
    )
    half = {"held_out_frac": 0.5, "min_rows": 2, "gammas": (0.5,), "max_leaf_depth": 1}
    config = CartConfig(label="accepted", filter="all", **half)
    report = cart.fit_rounds(frame, config).data
    low, high = report.bins
    assert (low.high, high.low) == (2.5, 2.5)
    assert (low.train.num_rounds, low.train.share_frac) == (2, 0.5)
    assert (low.train.mean_label, low.train.mean_acceptance_length) == (5.0, 6.0)
    assert (low.train.mean_tcr, high.train.mean_tcr) == (6.0, 2.0)
    assert (high.held_out.num_rounds, high.held_out.mean_acceptance_length) == (2, 1.5)
    # errors: (4-5)², (1-.5)², (0-.5)²; the constant is the training mean 2.75
    assert report.held_out.mse == pytest.approx(1.5 / 3)
    assert report.held_out.constant_mse == pytest.approx((1.25**2 + 1.75**2 + 2.75**2) / 3)


def test_rounds_of_another_tree_or_depth_are_left_out_and_counted(fit: Fitted) -> None:
    other = noisy_rounds(400, seed=5).with_columns(tcr=pl.lit(1, pl.Int32))
    strange = [("offered_depth", 9), ("top_k", 4), ("phi_depth", 5), ("phi_depth", None)]
    parts = [
        other.with_columns(pl.lit(value).cast(SCHEMA[name]).alias(name))
        for name, value in (*strange, ("phi", None), ("phi", float("nan")))
    ]
    found = cart.fit_rounds(pl.concat([noisy_rounds(), *parts]), CartConfig())
    assert found.policy == fit.policy
    fates = {**fit.data.rounds_by_fate, "other_tree": 800, "no_phi": 1600}
    assert found.data.rounds_by_fate == fates


def test_the_verdict_says_whether_bins_are_worth_anything(fit: Fitted) -> None:
    held_out = fit.data.held_out.model_copy(update={"r_squared": -0.1})
    worthless = fit.data.model_copy(update={"held_out": held_out})
    assert "no gain over a constant" in cart.report_of(worthless).verdict
    assert " held-out rounds, those accepted whole (" in fit.report.verdict
    few = fit.data.held_out.model_copy(update={"num_used": 15, "mse_interval": None})
    unsure = cart.report_of(fit.data.model_copy(update={"held_out": few})).verdict
    assert " held-out rounds, those accepted whole, are of fewer than 8 prompts." in unsure


NOISY = noisy_rounds(300)
EMPTY, DEFAULT = TraceEmptyError, CartConfig()
NONE_ACCEPTED = {"num_accepted": pl.lit(0), "fully_accepted": False, "tcr": pl.lit(None, pl.Int32)}
ONE_SIDE = {"fully_accepted": pl.col("prompt_id") == "prompt-1"}
HINT = "--filter all --label accepted"
REFUSED: dict[str, tuple[pl.DataFrame, CartConfig, type[SpecctlError], str]] = {
    "nothing accepted": (
        NOISY.with_columns(**NONE_ACCEPTED), CartConfig(filter="all"), EMPTY,
        f"none of 300 .*nothing_accepted 300.*{HINT}",
    ),
    "nothing fully accepted": (
        NOISY.with_columns(fully_accepted=False), DEFAULT, EMPTY,
        f"none of 300 .*not_fully_accepted 300.*{HINT}",
    ),
    "no rounds": (NOISY.clear(), DEFAULT, EMPTY, "no rounds"),
    "another depth": (
        NOISY, CartConfig(base=StaticTree(depth=4)), EMPTY, r"other_tree 300.*\(6, 8\)"
    ),
    "one side without labels": (NOISY.with_columns(**ONE_SIDE), DEFAULT, EMPTY, "both sides need"),
    "constant phi": (
        NOISY.with_columns(phi=pl.lit(2.0, pl.Float32)), DEFAULT, EMPTY, "need at least 3 bins"
    ),
    "constant label": (NOISY, CartConfig(label="accepted"), UsageError, "use --filter all"),
    "too deep": (NOISY, CartConfig(alpha=60), UsageError, "lower --alpha"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("frame", "config", "error", "words"), REFUSED.values(), ids=REFUSED.keys()
)
def test_refusal_is_one_line_that_says_what_to_do(
    frame: pl.DataFrame, config: CartConfig, error: type[SpecctlError], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        cart.fit_rounds(frame, config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [0.1, 0.2, 1 / 3, 5.0, 7.000000001, -0.1, 0.0])
def test_floor_is_the_largest_float32_not_above(value: float) -> None:
    floored = floor_float32(value)
    assert float(np.float32(floored)) == floored <= value
    assert float(np.nextafter(np.float32(floored), np.float32(np.inf))) > value
    assert floor_float32(floored) == floored


@pytest.mark.parametrize("spread", [10.0, 1e-3], ids=["apart", "neighbouring float32"])
def test_floored_edges_keep_every_decision_of_scikit_learn(spread: float) -> None:
    rng = np.random.default_rng(3)
    phi = (20.0 + spread * rng.random(5000)).astype(np.float32)
    label = np.sin(phi * 40 / spread) + rng.normal(0, 0.1, 5000)
    edges = cart.find_edges(phi, label, CartConfig(max_leaf_depth=5, min_rows=2))
    tree = DecisionTreeRegressor(max_depth=5, min_samples_leaf=2, random_state=0)
    leaves = tree.fit(phi[:, None], label).apply(phi[:, None])
    pairs = set(zip(leaves.tolist(), cart.bins_of(phi, edges).tolist(), strict=True))
    assert len(edges) == 31
    assert len(pairs) == len(set(leaves)) == 32
    assert edges == [floor_float32(edge) for edge in edges] == sorted(set(edges))


@pytest.mark.parametrize("steps", [0, 1], ids=["even mantissa", "odd mantissa"])
def test_neighbouring_float32_are_cut_between(steps: int) -> None:
    # rounding the midpoint to nearest would go up for an odd mantissa, and part nothing
    low = np.float32(5.0 + steps * 2.0**-21)
    high = np.nextafter(low, np.float32(np.inf))
    phi, label = np.array([low, high]), np.array([0.0, 1.0])
    edges = cart.printed_edges(phi, label, depth=1, min_rows=1)
    assert edges == [float(low)]
    assert cart.bins_of(phi, edges).tolist() == [0, 1]


def test_eq_2_as_printed_weighs_a_side_by_its_rows() -> None:
    """Losses of the five cuts: 12.67 8.5 4.33 7.17 6.0; of a regression tree 15.2 12.75 8.67 14.75
    7.2."""
    phi, label = np.arange(6, dtype=np.float32), np.array([0.0, 0, 0, 3, 0, 4])
    for algorithm, edge in (("printed", 2.5), ("cart", 4.5)):
        config = CartConfig(algorithm=algorithm, max_leaf_depth=1, min_rows=1)
        assert cart.find_edges(phi, label, config) == [edge]
