"""The keyed noise: its bits against SplitMix64 in plain integers, its statistics along every word,
its streams.

Statistics take 200,000 numbers and 256 cells. Each of them raises a false alarm once in a thousand
generators; cells that are off by 3 % of their mass (root mean square) are found with power 0.99.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import specctl
from specctl import noise
from specctl.noise import gumbels, midpoints, noise_keys, signed_seed, uniforms

NUM, CELLS = 200_000, 256
MASK = 2**64 - 1


def splitmix64(state: int, number: int) -> int:
    """Output `number` of the generator in this state, as published (Steele et al., 2014)."""
    x = (state + (number + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_published_outputs() -> None:
    """Vectors that ports of the generator are checked with, for the state 1234567."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [splitmix64(1234567, number) for number in range(5)] == published
    found = noise._step(torch.tensor(1234567), torch.arange(5))
    assert [value & MASK for value in found.tolist()] == published


@settings(max_examples=100)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.integers(0, 200_000), st.integers(0, 9))
def test_bits_equal_plain_integers(seed: int, position: int, token: int, stream: int) -> None:
    state = 0
    for word in (stream, seed, position, token):
        state = splitmix64(state, word)
    keys = noise_keys(torch.tensor(signed_seed(seed)), torch.tensor(position), stream)
    bits = noise._step(keys, torch.tensor(token))
    assert int(bits) & MASK == state
    if token < 100:
        assert float(uniforms(keys, token + 1)[token]) == ((state >> 12) + 0.5) / 2**52


def test_numbers_stay_inside() -> None:
    """The first and the last cell."""
    assert midpoints(torch.tensor([0, -1])).tolist() == [2.0**-53, 1 - 2.0**-53]
    assert bool(torch.isfinite(gumbels(noise_keys(torch.arange(50), torch.tensor(0)), 100)).all())


def test_a_number_depends_on_its_words_alone() -> None:
    seeds, positions = torch.arange(5)[:, None], torch.arange(3, 10)
    whole = uniforms(noise_keys(seeds, positions), 40)
    for seed in (0, 4):
        for place, position in ((0, 3), (6, 9)):
            key = noise_keys(torch.tensor(seed), torch.tensor(position))
            assert torch.equal(uniforms(key, 17), whole[seed, place, :17])


def words(**changes: int) -> Tensor:
    """`[NUM]` uniforms along one word, the others fixed but for what `changes` adds to them."""
    axis = changes.pop("axis")
    offset = {name: changes.get(name, 0) for name in ("stream", "seed", "position", "token")}
    run = torch.arange(NUM)
    seed = 11 + offset["seed"] + (run if axis == 1 else 0)
    position = 5 + offset["position"] + (run if axis == 2 else 0)
    token = 7 + offset["token"] + (run if axis == 3 else 0)
    keys = noise_keys(torch.as_tensor(seed), torch.as_tensor(position), offset["stream"])
    bits = noise._step(keys, torch.as_tensor(token))
    return midpoints(bits)


def p_value(cells: Tensor, num_cells: int = CELLS) -> float:
    """Chi-square against equal cells, two-sided: counts that are too even are wrong too."""
    counts = np.bincount(cells.numpy(), minlength=num_cells)
    expected = len(cells) / num_cells
    statistic = float(((counts - expected) ** 2 / expected).sum())
    half = torch.tensor([num_cells - 1, statistic], dtype=torch.float64) / 2
    upper = float(torch.special.gammaincc(*half))
    return 2 * min(upper, 1 - upper)


def high(values: Tensor) -> Tensor:
    """Cell of each uniform by its highest bits."""
    return (values * CELLS).long()


def pairs(first: Tensor, second: Tensor) -> Tensor:
    """One of 16 x 16 cells for each pair."""
    return (first * 16).long() * 16 + (second * 16).long()


AXES = {"seed": 1, "position": 2, "token": 3}


@pytest.mark.parametrize("axis", AXES)
def test_uniform_along_each_word_and_independent_of_the_number_next_to_it(axis: str) -> None:
    """Along a word: by its own cells, and against the same numbers with one word 1 further."""
    here = words(axis=AXES[axis])
    assert p_value(high(here)) > 1e-3
    for other in ("stream", "seed", "position", "token"):
        assert p_value(pairs(here, words(axis=AXES[axis], **{other: 1}))) > 1e-3


def test_the_tests_see_a_weak_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its multiplications a step is close to counting; the statistics must say so."""
    monkeypatch.setattr(noise, "FIRST", 1)
    monkeypatch.setattr(noise, "SECOND", 1)
    # Golden steps are themselves even, more than chance would have it.
    assert p_value(high(words(axis=AXES["token"]))) < 1e-9
    here, there = words(axis=AXES["token"]), words(axis=AXES["token"], position=1)
    assert p_value(pairs(here, there)) < 1e-9


def test_gumbels_have_their_law() -> None:
    values = gumbels(noise_keys(torch.tensor(3), torch.arange(100)), NUM // 100).flatten()
    assert p_value(((-(-values).exp()).exp() * CELLS).long()) > 1e-3
    assert abs(float(values.mean()) - 0.5772) < 5 * 1.2825 / NUM**0.5


# --------------------------------------------------------------------------- streams

PACKAGE = Path(specctl.__file__).parent


def streams() -> dict[str, int]:
    """Every constant `*_STREAM` of the package, by module and name."""
    found: dict[str, int] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for line in re.findall(r"^\w+_STREAM\b.*=.*$", path.read_text("utf-8"), re.M):
            names, values = re.findall(r"\w+_STREAM", line), line.partition("=")[2].split(",")
            for name, value in zip(names, values, strict=True):
                found[f"{path.relative_to(PACKAGE)}: {name}"] = int(value)
    return found


def test_all_streams_of_noise_differ() -> None:
    """With two equal ones, e.g. of a draft token and its coin, no text is lossless any more."""
    found = streams()
    assert {"noise.py: TOKEN_STREAM", "policy/ratio.py: COIN_STREAM"} <= found.keys()
    assert len(found) >= 4
    assert len(set(found.values())) == len(found), found


def test_noise_is_drawn_from_a_named_stream() -> None:
    """A number in the call would be a stream that the test above does not see."""
    texts = [path.read_text("utf-8") for path in PACKAGE.rglob("*.py")]
    calls = [
        node
        for text in texts
        if "noise_keys(" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "noise_keys"
    ]
    given = [call.args[2] for call in calls if call.args[2:]]
    given += [one.value for call in calls for one in call.keywords if one.arg == "stream"]
    assert len(calls) >= 3
    for one in given:
        assert isinstance(one, ast.Name)
        assert one.id == "stream" or one.id.endswith("_STREAM"), one.id
