"""The first question to a GPU: is it right? Every op, whole texts, and traces, one line each.

    python scripts/gpu/smoke.py --seconds 80            on CUDA
    python scripts/gpu/smoke.py --small --device cpu    a few of each, to try the script

A line has PASS or FAIL, the name, seconds, and a remark. The checks run in a child process; where
one fails beyond repair (the CUDA context is lost, or a capture failed) the others go on in a new
child. `$OUT/smoke.json` has all lines, whenever the time is up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
Check = Callable[[], str]
Line = dict[str, Any]
MOST_CHILDREN = 6
LARGEST = 2_000_000
"""Numbers in the arguments of an op; larger calls are left to the tests and benchmarks."""
DECODING = ("text", "waits", "dense", "live")
"""First words of the checks that decode."""
LOST = (
    "illegal memory",
    "misaligned",
    "device-side assert",
    "unspecified launch",
    "launch failure",
)
"""Errors behind which a process can use its GPU no more."""


class CaptureFailedError(Exception):
    """A part of a round could not be captured; later captures of the process may fail too."""


# --------------------------------------------------------------------------- the checks


def checks(device: str, *, small: bool) -> Iterator[tuple[str, Check]]:
    """Names and checks; a check returns a remark, and raises where something is wrong."""
    from tests.kernels.calls import calls

    for index, (name, call) in enumerate(calls().items()):
        if sum(tensor.numel() for tensor in call.tensors) < LARGEST and not (small and index % 9):
            yield name, lambda call=call: op_agrees(call, device)
    yield from text_checks(device, small=small)


def op_agrees(call: Any, device: str) -> str:
    """An op's kernel beside its reference on the CPU, all results and all that it writes."""
    import torch

    from specctl.kernels.dispatch import forced
    from tests.kernels.helpers import on_device, tensors_of

    mine, theirs = (on_device(call, torch.device(name)) for name in (device, "cpu"))
    began = time.perf_counter()
    with forced("fused" if device == "cuda" else "reference"):
        found = mine.public()(*mine.args, **mine.options)
    synchronize(device)
    spent, widest = time.perf_counter() - began, 0.0
    with forced("reference"):
        wanted = theirs.public()(*theirs.args, **theirs.options)
    pairs = zip(tensors_of(found, *mine.tensors), tensors_of(wanted, *theirs.tensors), strict=True)
    for index, (one, other) in enumerate(pairs):
        rtol, atol = tolerance(one)
        torch.testing.assert_close(
            one.cpu(), other, rtol=rtol, atol=atol, equal_nan=True,
            msg=lambda text, index=index: f"tensor {index}: {text}",
        )  # fmt: skip
        if one.is_floating_point() and one.numel():
            gap = (one.cpu().double() - other.double()).abs().nan_to_num(0.0, 0.0, 0.0)
            widest = max(widest, float(gap.max()))
    return f"first launch {1e3 * spent:.0f} ms, largest difference {widest:.1e}"


def tolerance(values: Any) -> tuple[float, float]:
    """Relative and absolute, of results in another order of sums; integers are exact."""
    if not values.is_floating_point():
        return 0.0, 0.0
    return (1.6e-2, 8e-3) if values.itemsize == 2 else (1e-5, 2e-5)


def text_checks(device: str, *, small: bool) -> Iterator[tuple[str, Check]]:
    """Texts of the embedded pair under every policy, in graphs and without."""
    from specctl.policy import Mars, Policy, SurvivalBudget
    from specctl.runtime.capture import GraphSettings
    from specctl.runtime.requests import Sampling
    from tests.kernels.rounds import SHAPES
    from tests.runtime.test_cuda import POLICIES

    graphs = GraphSettings() if device == "cuda" else None
    policies = POLICIES | {
        "survival budget": Policy(shape=SHAPES["eagle2"], budget=SurvivalBudget(max_tokens=30)),
        "mars": Policy(shape=SHAPES["eagle2"], acceptance=Mars(form="margin", theta=1.0)),
    }
    if small:
        policies = {"eagle2": POLICIES["eagle2"]}
    for name, policy in policies.items():
        yield f"text, {name}, graphs, batch 3", lambda p=policy: text_agrees(p, graphs, device)
    for name in ("eagle2",) if small else ("ar", "eagle2", "echo"):
        yield (
            f"text, {name}, without graphs, batch 3",
            lambda p=POLICIES[name]: text_agrees(p, None, device),
        )
    drawn = (Sampling(0.8, top_p=0.95),)
    yield (
        "text, eagle2, sampled, batch 3",
        lambda: text_agrees(POLICIES["eagle2"], graphs, device, drawn),
    )
    if device == "cuda":
        yield "waits of a warm round", waits_of_a_warm_round
        yield "text, eagle2, bfloat16 beside ar", half_precision
    for kind in ("dense", "live"):
        yield f"{kind} traces", lambda kind=kind: traces_agree(kind, device)


@cache
def pair(device: str, dtype: str) -> Any:
    from specctl.runtime.load import load_pair

    return load_pair("embedded", "embedded", device=device, dtype=dtype)


def text_agrees(policy: Any, graphs: Any, device: str, samplings: tuple[Any, ...] = ()) -> str:
    """A policy's texts beside plain decoding's: greedy ones those of the CPU, sampled ones those of
    the same device with the same seeds."""
    from tests.runtime.captured import decode, ordinary, requests
    from tests.runtime.test_cuda import POLICIES

    given = requests(4, samplings) if samplings else requests(4)
    loaded = pair(device, "float32")
    if samplings:
        plain = decode(POLICIES["ar"], given, None, of=loaded, batch_size=1)
    else:
        plain = ordinary(POLICIES["ar"], given, batch_size=1)
    began = time.perf_counter()
    found = decode(policy, given, graphs, of=loaded, batch_size=3)
    synchronize(device)
    counters = found.loop.graph_counters
    remark = (
        f"captures {counters.captures}, replays {counters.replays}, "
        f"failed {counters.failed_captures}, eager rounds {counters.eager_rounds}, "
        f"{1e3 * (time.perf_counter() - began):.0f} ms"
    )
    if counters.failed_captures or (graphs is not None and not counters.replays):
        raise CaptureFailedError(remark)
    different = difference(found.texts, plain.texts) if policy.lossless else ""
    if different:
        raise AssertionError(f"{different}; {remark}")
    return remark


def difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The first place where a text is another one; empty where there is none."""
    for name, text in wanted.items():
        other = found.get(name, ())
        if other != text:
            both = enumerate(zip(other, text, strict=False))
            at = next((i for i, (a, b) in both if a != b), min(len(other), len(text)))
            return f"{name} from token {at}: {other[at : at + 3]}, not {text[at : at + 3]}"
    return ""


def waits_of_a_warm_round() -> str:
    """One planned wait a round, no other, by torch's detector."""
    from specctl.runtime.capture import GraphSettings
    from tests.kernels.helpers import no_sync
    from tests.runtime.captured import make_loop, requests
    from tests.runtime.test_cuda import POLICIES

    given = requests(2, new_tokens=64)
    settings = GraphSettings(stop_waits="never")
    loop = make_loop(POLICIES["eagle2"], given, settings, of=pair("cuda", "float32"), batch_size=2)
    for request in given:
        loop.submit(request)
    for _ in range(8):
        loop.step()
    before = replace(loop.graph_counters)
    with warnings.catch_warnings(), no_sync():
        warnings.simplefilter("ignore")
        loop.step()
    eager = loop.graph_counters.eager_parts - before.eager_parts
    waits = loop.graph_counters.planned_waits - before.planned_waits
    if eager or waits != 1:
        raise AssertionError(f"{eager} eager parts, {waits} planned waits")
    return "one planned wait"


def half_precision() -> str:
    """Texts may turn at near ties, so the share of equal ones is a remark."""
    from specctl.runtime.capture import GraphSettings
    from tests.runtime.captured import decode, requests
    from tests.runtime.test_cuda import POLICIES

    given, loaded = requests(8), pair("cuda", "bfloat16")
    plain, found = (
        decode(POLICIES[name], given, GraphSettings(), of=loaded, batch_size=size)
        for name, size in (("ar", 1), ("eagle2", 8))
    )
    equal = sum(found.texts[name] == text for name, text in plain.texts.items())
    failed = found.loop.graph_counters.failed_captures
    if failed:
        raise CaptureFailedError(f"{failed} failed captures")
    return f"{equal} of {len(plain.texts)} texts equal"


def traces_agree(kind: str, device: str) -> str:
    """Rows of `collect` on this device beside those on the CPU: the same nodes, scores but for
    rounding. Read with pyarrow alone, as the GPU machine has no polars."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from specctl.collect.dense import collect_dense
    from specctl.collect.live import collect_live
    from specctl.collect.prompts import load_prompts
    from specctl.policy import FullTree
    from specctl.runtime.conversations import DecodeSettings
    from tests.runtime.test_cuda import POLICIES

    prompts, settings, found = load_prompts("embedded")[::80], DecodeSettings(16), []
    for where in (device, "cpu"):
        with tempfile.TemporaryDirectory() as folder:
            loaded, out = pair(where, "float32"), f"{folder}/traces"
            if kind == "dense":
                collect_dense(loaded, prompts, settings, out, FullTree(depth=4, top_k=4))
            else:
                collect_live(loaded, prompts, POLICIES["eagle2"], settings, out, batch_size=2)
            parts = [pq.read_table(path) for path in Path(out, "nodes").glob("*.parquet")]
            rows = pa.concat_tables(parts).to_pylist()
        found.append(sorted(rows, key=lambda r: (r["request_id"], r["round_idx"], r["node_idx"])))
    mine, theirs = found
    for name in ("parent_idx", "token_id", "path_accepted", "node_match"):
        values = [[row[name] for row in rows] for rows in found]
        if values[0] != values[1]:
            raise AssertionError(f"{name} differs ({len(mine)} and {len(theirs)} nodes)")
    widest = max(
        abs(one[name] - other[name])
        for one, other in zip(mine, theirs, strict=True)
        for name in ("joint_logp", "parent_entropy", "target_logp")
        if None not in (one[name], other[name])
    )
    if widest > 1e-3:
        raise AssertionError(f"scores differ by up to {widest:.1e} nats")
    return f"{len(mine)} nodes, largest difference {widest:.1e} nats"


def synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


# --------------------------------------------------------------------------- the child


def run_checks(given: argparse.Namespace) -> None:
    """Runs the checks from `--child` on, a JSON line before and behind each."""
    began = time.perf_counter()
    import torch

    torch.set_num_threads(4 if given.device == "cuda" else 1)
    torch.zeros(1, device=given.device)
    tell(ready=time.perf_counter() - began)
    for index, (name, check) in enumerate(checks(given.device, small=given.small)):
        if index < given.child:
            continue
        line: Line = {"index": index, "name": name}
        if time.time() > given.until:
            tell(**line, ok=None, remark="no time left")
            continue
        tell(**line, begun=True)
        began, is_lost = time.perf_counter(), False
        try:
            line |= {"remark": check(), "ok": True}
        except Exception as error:  # whatever it is, the next check goes on
            text = " ".join(str(error).split())[:400]
            line |= {"remark": f"{type(error).__name__}: {text}", "ok": False}
            is_lost = any(word in text for word in LOST)
            if name.startswith(DECODING):  # a capture may have failed
                is_lost = is_lost or not isinstance(error, AssertionError)
        tell(**line, s=time.perf_counter() - began)
        if is_lost:
            os._exit(3)


def tell(**line: object) -> None:
    print(json.dumps(line), flush=True)


# --------------------------------------------------------------------------- the parent


def main() -> int:
    given = _options()
    if given.child is not None:
        run_checks(given)
        return 0
    until, lines, start = time.time() + given.seconds, list[Line](), 0
    for _ in range(MOST_CHILDREN):
        before = len(lines)
        status, start = one_child(given, until, start, lines)
        if status == 0 or len(lines) == before:
            break
        print(f"      a new process goes on from check {start}", flush=True)
    names = {
        word: [line["name"] for line in lines if line["ok"] is ok]
        for word, ok in (("passed", True), ("failed", False), ("not begun", None))
    }
    print("smoke: " + ", ".join(f"{len(found)} {word}" for word, found in names.items()))
    for name in names["failed"]:
        print(f"  failed: {name}")
    return 0 if lines and len(names["passed"]) == len(lines) else 1


def one_child(
    given: argparse.Namespace, until: float, start: int, lines: list[Line]
) -> tuple[int, int]:
    """Runs a child from a check on; its status, and the check to go on from.

    A child that ends before its first check, as where an import fails, adds no line.
    """
    command = [sys.executable, __file__, "--child", str(start), "--until", str(until)]
    command += ["--device", given.device, *(["--small"] if given.small else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    begun: Line | None = None
    for text in process.stdout:
        try:
            line = json.loads(text)
        except ValueError:  # a warning of a library
            print(text.rstrip())
            continue
        if "ready" in line:
            print(f"torch and the device are ready after {line['ready']:.1f} s", flush=True)
        elif "begun" in line:
            begun = line
        else:
            begun, start = None, line["index"] + 1
            note(line, lines)
    status = process.wait()
    if begun is not None:
        start = begun["index"] + 1
        note(begun | {"ok": False, "remark": f"the process ended with {status}"}, lines)
    return status, start


def note(line: Line, lines: list[Line]) -> None:
    """Prints a check's line, and writes all lines so far."""
    lines.append(line)
    word = {True: "PASS", False: "FAIL", None: "----"}[line["ok"]]
    print(f"{word}  {line['name']:52} {line.get('s', 0):5.1f} s  {line['remark']}", flush=True)
    if folder := os.environ.get("OUT"):
        Path(folder, "smoke.json").write_text(json.dumps(lines, indent=1) + "\n", "utf-8")


def _options() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--device", default="cuda", help="cuda or cpu")
    options.add_argument("--small", action="store_true", help="a few checks of each kind")
    options.add_argument("--seconds", type=float, default=80.0, help="no check begins later")
    options.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options.add_argument("--until", type=float, help=argparse.SUPPRESS)
    return options.parse_args()


if __name__ == "__main__":
    sys.exit(main())
