"""Decisions by onnxruntime: every backend decides alike, in the loop too, and nothing in silence.

Scores of 100,000 rows on a CPU and, where there is one, on CUDA, by the torch rule and onnxruntime.
Rows are random, and on thresholds, one float32 beside them, infinite, NaN, zero,
denormal and huge.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from specctl.artifacts.onnx_twin import twin_bytes
from specctl.errors import InvariantError, UsageError
from specctl.policy import FfnScorer, Policy, RootOnly, ScoredTree, StaticTree, build_shape
from specctl.policy.scorers import build_log_odds, folded_layer
from specctl.runtime import twins
from specctl.runtime.api import Decoder
from specctl.runtime.config import Decisions
from specctl.runtime.load import Pair
from specctl.runtime.requests import Request
from specctl.runtime.twins import SCORER, TwinSession, by_twin
from specctl.tree import DraftPool
from tests.artifacts.examples import HETERO, POLICIES
from tests.kernels.drawn import edge_rows, level_pool
from tests.policy.scorers import SCORED
from tests.runtime.captured import BASE, spread_requests, tape
from tests.runtime.toy import Kept

pytestmark = pytest.mark.skipif(find_spec("onnxruntime") is None, reason="no onnxruntime")
CPU = torch.device("cpu")
SHAPES = {"network": SCORED["c2t joint"], "table": SCORED["c2t conditional"]}
"""With a learned scorer, whose trees differ in size between rounds of the embedded pair."""
NETWORK = SHAPES["network"]
ROWS, SIZE = 98, 1024
"""Nodes of a pool of one level: 100,352 of them."""
ROUNDING = 2.0**-24
"""Of a float32 operation, relative."""


def open_session(device: torch.device) -> TwinSession:
    """Of the network's twin: `[n, 3]` features to `[n]` log-odds."""
    model = twin_bytes(Policy(shape=NETWORK))
    assert model is not None
    return TwinSession(model, SCORER, device)


def open_device(name: str) -> torch.device:
    """A device; a test is skipped where onnxruntime cannot use it."""
    if name == "cpu":
        return CPU
    found = torch.device("cuda", torch.cuda.current_device())
    try:
        open_session(found)
    except UsageError as error:
        pytest.skip(f"onnxruntime without CUDA: {error}")
    return found


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return open_device(request.param)


@pytest.fixture
def cuda() -> torch.device:
    return open_device("cuda")


# --------------------------------------------------------------------------- scores


def scores_of(
    scorer: FfnScorer, beta: float, pool: DraftPool, device: torch.device
) -> tuple[Tensor, Tensor, float]:
    """Scores of the nodes of a level by torch and by onnxruntime, `[B, C]`, and the least kept."""
    shape = ScoredTree(scorer=scorer, beta=beta, depth=3, first_top_k=4, second_top_k=4)
    rule: Any = build_shape(shape, device)
    asking: Any = by_twin(shape, rule, device)
    assert asking is not rule
    there = pool.each(lambda one: one.to(device))
    return rule.score(there, 1).cpu(), asking.score(there, 1).cpu(), rule.min_score


def wide_network(hidden: int) -> FfnScorer:
    """Reads probabilities, log-probabilities, entropies and ranks."""
    draw = np.random.default_rng(hidden)
    return FfnScorer(
        features=("joint_prob", "joint_logp", "parent_entropy", "parent_topk_entropy"),
        mean=(0.5, -2.0, 1.0, 1.0),
        scale=(0.3, 1.5, 0.8, 0.8),
        w1=tuple(map(tuple, draw.normal(size=(hidden, 4)).tolist())),
        b1=tuple(draw.normal(size=hidden).tolist()),
        w2=tuple((draw.normal(size=hidden) / math.sqrt(hidden)).tolist()),
        b2=(float(draw.normal()),),
    )


def node_rows(seed: int) -> DraftPool:
    """A level whose columns all hold odd numbers, in rows of their own; none is positive nats."""
    joint = edge_rows(torch.tensor([-1.0, -2.0]), seed, ROWS * SIZE).clamp(max=0.0)
    joint = joint.nan_to_num(-0.5, neginf=-math.inf)
    pool = level_pool(joint.where(joint == -math.inf, joint.clamp(min=-1e4)).view(ROWS, SIZE), seed)
    odd = torch.tensor([0.0, 1e-45, 1e-38, 1e30, -1e30, 3.4e38, math.inf, math.nan])
    pool.entropy[: len(odd), 1] = odd
    pool.topk_entropy[: len(odd), 2] = odd
    return pool


@pytest.mark.parametrize("hidden", [2, 16, 48, 64])
def test_networks(hidden: int, device: torch.device) -> None:
    """Equal decisions wherever the score is further from the bar than float32 may compute it.

    By the worst case 2 to 37 rows of 100,352 are nearer; a typical error is far smaller, and on the
    machine of docs/LOG.md those rows were decided alike too. The kernel's scores:
    tests/kernels/test_policy_eval.py.
    """
    scorer, pool = wide_network(hidden), node_rows(hidden)
    exact, error, overflows = exact_scores(scorer, pool)
    beta = round(float(exact.nanmedian().exp()), 3)
    *both, bar = scores_of(scorer, beta, pool, device)
    empty, plain = pool.joint_logp[:, 1:] == -math.inf, ~(overflows | exact.isnan())
    for found in both:
        assert bool((found[empty] == -math.inf).all())
        assert bool(found[exact.isnan() & ~empty].isnan().all())
        assert bool(((found.double() - exact).abs() <= error)[plain & ~empty].all())
    assert int((overflows & ~exact.isnan()).sum()) <= 4
    border = plain & ((exact - bar).abs() <= error)
    by_torch, by_onnx = (found >= bar for found in both)
    assert 0.05 < float(by_torch.float().mean()) < 0.95
    assert int(border.sum()) < 1e-3 * border.numel()
    assert torch.equal(by_onnx[plain & ~border], by_torch[plain & ~border])


def exact_scores(scorer: FfnScorer, pool: DraftPool) -> tuple[Tensor, Tensor, Tensor]:
    """`[B, C]` scores in float64, how far float32 may be from them, and where it overflows.

    A sum of n float32 products in any order is off by n + 1 roundings of the sum of their sizes
    at most (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1, to first order;
    the factor 1.01 covers the rest). The sigmoid's logarithm adds a few units in the last place.
    """
    joint = pool.joint_logp[:, 1:]
    columns = (joint.exp(), joint, pool.entropy[:, 1:], pool.topk_entropy[:, 1:])
    x = torch.stack(columns, -1).double()
    w1, b1 = (torch.from_numpy(part).double() for part in folded_layer(scorer))
    w2 = torch.tensor(scorer.w2, dtype=torch.float64)
    size = x.abs() @ w1.abs() + b1.abs()
    before, off = x @ w1 + b1, 1.01 * (len(w1) + 1) * ROUNDING * size
    hidden, off = before.relu(), off.where(before > -off, 0.0)  # far below zero a unit is silent
    whole = (hidden + off) @ w2.abs() + abs(scorer.b2[0])
    score = logsigmoid(hidden @ w2 + scorer.b2[0])
    error = off @ w2.abs() + 1.01 * (len(w2) + 1) * ROUNDING * whole + 8 * ROUNDING * score.abs()
    overflows = torch.maximum(size.amax(-1), size @ w2.abs()) > float(np.finfo(np.float32).max)
    return score, error, overflows


def test_the_border_of_the_sigmoid(device: torch.device) -> None:
    """Log-odds of exactly 0 against beta 0.5 are kept; others stand in steps of 1/16 around.

    Weights and features are small multiples of 1/4, so no backend rounds before the sigmoid.
    """
    scorer = FfnScorer(
        features=("sibling_rank", "joint_logp"),
        mean=(0.0, 0.0),
        scale=(1.0, 1.0),
        w1=((0.25, 0.0), (0.0, -0.5), (0.25, 0.25)),
        b1=(0.0, 0.0, -4.0),
        w2=(1.0, -0.5, 0.25),
        b2=(0.0,),
    )
    draw = torch.Generator().manual_seed(0)
    joint = -torch.randint(0, 64, (ROWS, SIZE), generator=draw) / 4
    by_torch, by_onnx, bar = scores_of(scorer, 0.5, level_pool(joint, 0), device)
    assert torch.equal(by_torch, by_onnx)
    on_it = by_torch == float(np.float32(math.log(0.5)))
    assert int(on_it.sum()) > 500
    assert bool((by_torch >= bar)[on_it].all())


# --------------------------------------------------------------------------- the session


def test_rows_may_lie_apart_and_their_number_may_change() -> None:
    session, wanted = open_session(CPU), build_log_odds(NETWORK.scorer)
    x = torch.randn(250, 3, generator=torch.Generator().manual_seed(0))
    apart = torch.stack([x, x + 1], 2)[..., 0]
    assert not apart.is_contiguous()
    for rows in (250, 1, 0, 7):
        torch.testing.assert_close(session(apart[:rows]), wanted(x[:rows]), atol=1e-5, rtol=1e-5)
    for given in (x.double(), x.to("meta")):
        with pytest.raises(InvariantError, match="not float32 on cpu"):
            session(given)


def test_nan_stays_nan_whatever_a_provider_makes_of_it() -> None:
    """One whose ReLU turns NaN into 0 gives some score; the guard must see that it is none."""
    session: Any = lambda features: torch.full((len(features),), 0.5)  # noqa: E731
    features = torch.tensor([[1.0, 2.0], [torch.nan, 2.0], [1.0, torch.inf]])
    assert twins.network_by(session)(features).isnan().tolist() == [False, True, False]


STREAM: Any = SimpleNamespace(device=torch.device("cuda", 1), cuda_stream=7)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stream is made up")
@pytest.mark.filterwarnings("ignore:Specified provider")
def test_devices_that_onnxruntime_cannot_use_are_refused() -> None:
    with pytest.raises(UsageError, match="device meta"):
        TwinSession(b"", SCORER, torch.device("meta"))
    model = twin_bytes(Policy(shape=NETWORK))
    with pytest.raises(UsageError, match=r"not run wholly on CUDA.*decisions torch"):
        twins._open(model, torch.device("cuda"), STREAM)


@pytest.mark.cuda
def test_cuda_is_used_on_a_stream_of_torchs(cuda: torch.device) -> None:
    session = open_session(cuda)
    assert session.session.get_providers()[0] == "CUDAExecutionProvider"
    assert session.stream is not None
    options = session.session.get_provider_options()["CUDAExecutionProvider"]
    assert options["user_compute_stream"] == str(session.stream.cuda_stream)
    assert options["use_tf32"] == "0"
    side = torch.cuda.Stream(cuda)
    with torch.cuda.stream(side):
        assert open_session(cuda).stream == side


@pytest.mark.cuda
def test_a_run_stands_in_the_order_of_any_stream(cuda: torch.device) -> None:
    """A session of one stream, called on another behind work that is still under way."""
    session, wanted = open_session(cuda), build_log_odds(NETWORK.scorer)
    for stream in (torch.cuda.default_stream(cuda), torch.cuda.Stream(cuda)):
        with torch.cuda.stream(stream):
            for number in range(50):
                x = torch.zeros(10_000, 3, device=cuda)
                torch.cuda._sleep(200_000)  # what follows must wait for it
                x += 0.2 * number
                found = session(x).clone().cpu()
                torch.testing.assert_close(found, wanted(x.cpu()), atol=1e-4, rtol=1e-4)


@pytest.mark.cuda
def test_the_host_waits_for_nothing(cuda: torch.device) -> None:
    session, x = open_session(cuda), torch.randn(1000, 3, device=cuda)
    session(x)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # about a second
    session(x)
    done.record()
    assert not done.query(), "the call came back before the device had begun it"


# --------------------------------------------------------------------------- in the loop


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return spread_requests()[::6]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every question to onnxruntime."""
    asked: list[int] = []
    ask = TwinSession.__call__

    def counted(session: TwinSession, given: Tensor) -> Tensor:
        asked.append(len(given))
        return ask(session, given)

    monkeypatch.setattr(TwinSession, "__call__", counted)
    return asked


@pytest.mark.parametrize("name", SHAPES)
def test_rounds_and_texts_are_those_of_torch(
    name: str, pair: Pair, requests: list[Request], asked: list[int]
) -> None:
    found = {}
    for decisions in ("torch", "onnx"):
        kept, policy = Kept(), Policy(shape=SHAPES[name])
        decoder = Decoder(pair, policy, batch_size=3, observer=kept, decisions=decisions)
        texts = {c.request.request_id: c.token_ids for c in decoder.loop(requests).run(requests)}
        seen = [(r.submitted.tolist(), r.tree.token_ids.tolist()) for r in kept.records]
        found[decisions] = (texts, seen)
        assert bool(asked) == (decisions == "onnx")
    assert found["onnx"] == found["torch"]
    assert len({len(row) for submitted, _ in found["torch"][1] for row in submitted}) > 1
    assert len(asked) >= len(found["onnx"][1])


def test_a_reloaded_policy_is_asked_in_the_same_way(
    pair: Pair, requests: list[Request], asked: list[int]
) -> None:
    loop = Decoder(pair, Policy(shape=NETWORK), decisions="onnx").loop(requests)
    loop.submit(requests[0])
    loop.step()
    with pytest.raises(UsageError, match="shape eagle2 has no learned scorer"):
        loop.reload(Policy(shape=BASE))
    assert loop.policy == Policy(shape=NETWORK)
    loop.reload(Policy(shape=NETWORK.model_copy(update={"beta": 0.3})))
    before = len(asked)
    while loop.busy:
        loop.step()
    assert len(asked) > before


@pytest.mark.parametrize("decisions", ["auto", "torch", "onnx"])
def test_kernels_decide_only_where_nothing_else_was_asked_for(
    decisions: Decisions, pair: Pair, requests: list[Request]
) -> None:
    loop = Decoder(pair, Policy(shape=NETWORK), decisions=decisions, graphs=tape()).loop(requests)
    assert (loop.round.kernels is None) == (decisions != "auto")


@pytest.mark.parametrize("absent", ["onnxruntime", "onnx"])
def test_what_cannot_be_had_is_refused_before_anything_runs(
    absent: str, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bins and gates are compared with a number: torch decides them. Plain decoding has nothing to
    ask."""
    assert Decoder(pair, Policy(shape=RootOnly()), decisions="onnx").generate("a", max_new_tokens=2)
    for shape in (HETERO, StaticTree(), POLICIES["echo"].shape):
        with pytest.raises(UsageError, match="no learned scorer"):
            Decoder(pair, Policy(shape=shape), decisions="onnx")
    with pytest.raises(UsageError, match="'triton' is none of auto, fused, torch, onnx"):
        Decoder(pair, Policy(shape=BASE), decisions="triton")  # type: ignore[arg-type]
    monkeypatch.setattr(twins, "find_spec", lambda name: None if name == absent else name)
    with pytest.raises(UsageError, match=f"{absent} is not installed"):
        Decoder(pair, Policy(shape=SCORED["c2t chain"]), decisions="onnx")
