"""Clocks of the package: each is what its page says, goes by its name wherever a file does, and
never without its caveat."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.gpu import publish
from specctl.errors import InputError, UsageError
from specctl.replay.cost.files import clock_names, clock_of, load_cost_model, warn_outside
from specctl.replay.cost.model import CostModel, Steps, TableCost
from specctl.replay.cost.rates import LinearCost
from tests.replay.costs import DRAFT, FINGERPRINT, grid, table_model

ROOT = Path(__file__).parents[2]
H100 = "h100-llama-3.1-8b-eagle"
COST = r"([\d.]+)\s+(m|u)s\s+a\s+"
SENTENCE = rf"\(?{COST}verification,\s+{COST}token,\s+{COST}level"


def named(name: str) -> LinearCost:
    model = load_cost_model(Path(name))
    assert isinstance(model, LinearCost)
    return model


def stated(text: str) -> tuple[float, ...]:
    """us of a verification, a token and a level, as a sentence gives them."""
    found = re.search(SENTENCE, text)
    assert found is not None, text
    numbers, units = found.groups()[::2], found.groups()[1::2]
    us = {"m": 1e3, "u": 1.0}
    return tuple(float(n) * us[unit] for n, unit in zip(numbers, units, strict=True))


@pytest.mark.parametrize("page", ["docs/systems.md", "docs/cost-model.md", "source"])
def test_the_line_clock_charges_what_pages_say(page: str) -> None:
    """Rounds priced by hand with the numbers of the page, nothing else in them: 11 levels cost 11
    passes of the drafter, whatever their width."""
    line = named("line")
    text = line.source if page == "source" else (ROOT / page).read_text("utf-8")
    verification, token, level = stated(text)
    random = np.random.default_rng(3)
    for _ in range(50):
        batch, levels = int(random.integers(1, 33)), int(random.integers(0, 17))
        tokens = int(random.integers(batch, 64 * batch + 1))
        width, context, read = random.integers(1, 11), random.integers(1, 4000), levels > 0
        found = float(line.round_us(Steps(batch, tokens, context, levels, width, read)))
        assert found == pytest.approx(verification + tokens * token + levels * level)
    assert said(line, Steps(1000, 9000, 1, 16, 64, 1)) == [], "it is stated for any shape"


def test_the_h100_is_the_simulators() -> None:
    """`predictor.py` of SpecDecode-Bench's simulator, class `Llama8BH100`, in seconds."""
    model = named(H100)
    for batch, length, context in ((1, 3, 700), (32, 5, 90), (8, 0, 1500)):
        cached = batch * context
        forward = cached * 3.92645679e-08 + batch * (length + 1) * 2.10103129e-05 + 5.88590713e-03
        draft = cached * 2.37768493e-09 + (length + 1) * 8.41429603e-07 + 2.13526175e-03
        seconds = forward + (draft if length else 0.0) + 1.20683946e-03
        steps = Steps(batch, batch * (length + 1), context, length, 1, 1)
        assert float(model.round_us(steps)) == pytest.approx(1e6 * seconds, rel=1e-9)


def test_every_clock_is_on_the_page_with_its_source() -> None:
    page = (ROOT / "docs/cost-model.md").read_text("utf-8")
    for name in clock_names():
        [row] = re.findall(rf"^\| `{re.escape(name)}` \|.*$", page, re.MULTILINE)
        model = load_cost_model(Path(name))
        assert (model.source if isinstance(model, LinearCost) else model.device) in row
    assert {H100, "line"} <= set(clock_names())


def test_a_measured_card_goes_by_its_name_with_what_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place of the table that a GPU call returns (docs/gpu.md): the file is all it takes."""
    model = table_model()
    assert isinstance(model, TableCost)
    card = model.machine.model_copy(update={"device": "NVIDIA H100 80GB HBM3"})
    model = model.model_copy(update={"machine": card})
    name = publish.clock_name(json.loads(model.to_bytes()))
    assert name == "h100-8b-eagle3"
    monkeypatch.setattr("specctl.replay.cost.files.CLOCKS", tmp_path)
    (tmp_path / f"{name}.json").write_bytes(model.to_bytes())
    assert clock_names() == [name]
    found = load_cost_model(Path(name))
    assert found == model
    other = FINGERPRINT.model_copy(update={"target_digest": "sha256:" + 64 * "c"})
    assert clock_of(found, other) == (
        "the clock of NVIDIA H100 80GB HBM3 (error not known; of toy + small, not of this pair)"
    )


def test_a_wrong_name_is_told_the_right_ones(tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(InputError, match=f"did you mean {H100}") as refusal:
        load_cost_model(Path("h100-llama-8b-eagle"))
    assert "none of the named clocks (h100-llama-3.1-8b-eagle, line)" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    monkeypatch.chdir(tmp_path)
    own = table_model()
    Path("line").write_bytes(own.to_bytes())
    assert load_cost_model(Path("line")) == own, "a file of that name stands for itself"
    Path("other").write_bytes(b'{"trace_version": 1}')
    with pytest.raises(InputError, match="it has no kind"):
        load_cost_model(Path("other"))


def said(model: CostModel, steps: Steps) -> list[str]:
    return [str(one) for one in model.outside(steps) if one.num_outside]


def test_shapes_that_a_clock_does_not_know(caplog: pytest.LogCaptureFixture) -> None:
    h100, known = named(H100), "and its times are of at most"
    trees, crowd = Steps(8, 80, 100, 3, 4, 1), Steps(128, 256, 9, 1, 1, 1)
    assert said(h100, trees) == [f"100% of the steps have 4 nodes a level, {known} 1"]
    assert said(h100, crowd) == [f"100% of the steps have 128 requests a step, {known} 64"]
    assert said(h100, Steps(64, 640, 100, 9, 1, 1)) == []
    widths = 4, 1, 1, 7
    warn_outside("it", [h100.outside(Steps(8, 80, 100, 3, width, 1)) for width in widths])
    [whole] = said(h100, Steps(8, 80, 100, 3, np.array(widths), 1))
    assert caplog.messages == [f"cost model, it: {whole}"]
    assert whole == f"50% of the steps have 4 to 7 nodes a level, {known} 1"
    assert said(table_model(), Steps(1, 20, 64, 3, 9, 2)) == [
        f"100% of the steps have 20 tokens verified a request, {known} 8",
        f"100% of the steps have 9 nodes a level, {known} 5",
    ]
    level = grid([[[2]], [[4]]], batch=(1, 3))
    chains = table_model(draft=DRAFT.model_copy(update={"level": level}))
    with pytest.raises(UsageError, match=r"with chains alone, and this tree has 4 [^\n]*\Z"):
        chains.round_us(Steps(1, 6, 64, 3, 4, 2))
    assert float(chains.round_us(Steps(1, 6, 64, 3, 1, 2))) > 0
