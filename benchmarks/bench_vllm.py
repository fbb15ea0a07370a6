"""What the plugin costs a step of vLLM: engines in one process, with it and without, taking turns.

    LD_PRELOAD=.venv-engines/lib/libiomp5.so .venv-engines/bin/python benchmarks/bench_vllm.py

vLLM's CPU build on the embedded pair, chains of K drafts, the same prompts in every engine. A
setting stands beside a plain engine that does the same work in the same steps:

    live           rounds are logged                     beside the plain engine
    dense          drafts logged and none verified       beside a plain engine that loses its drafts
    keep all       a policy that stops nowhere           beside the plain engine
    other stops    they save work, so that no step of a plain engine is their equal: hooks alone

A step is one call of `LLMEngine.step` in which all B requests decode. Of each group of B prompts
the ratio of summed step times is taken; the figures are its median and quartiles over groups, by
the clock and, as `cpu_percent`, by the processor time of the engine's thread, which other processes
of the machine stretch less. `hooks_us` is the time of that thread inside the plugin, `policy_us`
what rules took of it, `writer_us` processor time of the writing thread, all a step.

A step of this pair is small. `percent_of_20_ms` says what these hooks would be of a step of 20 ms,
as large models have; vocabulary and processor stay this machine's. It is no measurement of a GPU.

Prediction: live 2 % and dense 4 % of a step of 10 ms at batch 1, most of it features of drafter
logits; rules 20 µs a level, so 1 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from common import parser, report

sys.path.insert(0, str(Path(__file__).parent.parent))
from specctl.engines.settings import PluginSettings, TraceSettings
from specctl.runtime.words import resolve_policy
from tests.engines.vllm_engine import Engine, engine, ids_of, packaged

K = 5
POLICIES = {
    "keep all": f"chain:num_draft_tokens={K}",
    "confidence": f"confidence:window={K}:threshold=0.4",
    "entropy": f"stop:signal=entropy:threshold=1.0:window={K}",
    "AdaSD": f"adasd_stop:window={K}:min_samples=2",
}
LOSING = "plain, drafts lost"
BESIDE = {"live": "plain", "dense": LOSING, "keep all": "plain"}
"""Settings, and the plain engine that does the same work."""
HOOKS = (
    "begin_step",
    "before_verdict",
    "after_verdict",
    "begin_draft",
    "take_level",
    "end_draft",
    "end_step",
)
STEP_MS = 20


class Spent(NamedTuple):
    """Microseconds of one step; `cpu_us` of the engine's thread."""

    step_us: float
    cpu_us: float
    hooks_us: float
    policy_us: float


class Timed:
    """An engine whose steps are timed, and the plugin's part in them.

    Attributes:
        steps: in which all requests of the last group decoded, in order.
    """

    def __init__(self, running: Engine) -> None:
        self.running, self.steps = running, list[Spent]()
        self._batch_size, self._hooks_s = 0, 0.0
        self._is_first = False
        inner = running.llm.llm_engine
        self._step, inner.step = inner.step, self._timed_step
        self.session = getattr(running.runner, "_specctl", None)
        for name in HOOKS if self.session is not None else ():
            setattr(self.session, name, self._timed(getattr(self.session, name)))

    def run(self, group: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        """Texts of the group."""
        self.steps, self._batch_size, self._is_first = [], len(group), True
        return self.running.generate(group, max_tokens=max_new_tokens, ignore_eos=True)

    def writer_s(self) -> float:
        """Processor time of the thread that writes traces, so far."""
        if self.session is None or not self.session.tracers:
            return 0.0
        [tracer] = self.session.tracers
        clock = time.pthread_getcpuclockid(tracer.recorder._thread.ident)
        return time.clock_gettime(clock)

    def _timed_step(self) -> Any:
        is_whole = (
            self.running.llm.llm_engine.get_num_unfinished_requests() == self._batch_size
            and not self._is_first
        )
        self._hooks_s, self._is_first = 0.0, False
        began, cpu_began = time.perf_counter(), time.thread_time()
        out = self._step()
        spent_s, cpu_s = time.perf_counter() - began, time.thread_time() - cpu_began
        if is_whole:
            rules = None if self.session is None else self.session.rules
            policy_us = 0.0 if rules is None else rules.spent_us
            self.steps.append(Spent(1e6 * spent_s, 1e6 * cpu_s, 1e6 * self._hooks_s, policy_us))
        return out

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return hook(*args)
            finally:
                self._hooks_s += time.perf_counter() - began

        return timed


@contextmanager
def losing_drafts(one: Timed) -> Iterator[None]:
    """Inside, nothing that the engine drafts reaches its scheduler."""
    runner = one.running.runner
    runner.take_draft_token_ids = lambda: None
    yield
    del runner.take_draft_token_ids


def main() -> None:
    known = parser(__doc__ or "")
    known.add_argument("--groups", type=int, default=16, help="of prompts, at each batch size")
    known.add_argument("--drafter", default="eagle3", help="eagle3 or small")
    options = known.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        settings = {
            "plain": None,
            "live": PluginSettings(trace=TraceSettings(out=f"{folder}/live")),
            "dense": PluginSettings(trace=TraceSettings(out=f"{folder}/dense", dense=True)),
            "policy": PluginSettings(policy=POLICIES["keep all"]),
        }
        engines = {
            name: Timed(stack.enter_context(engine(options.drafter, K, given)))
            for name, given in settings.items()
        }
        for batch_size in (1, 8):
            rows += measured(engines, batch_size, options)
    worst = {name: max(r["percent"] for r in rows if r["system"] == name) for name in BESIDE}
    text = (
        f"the plugin costs {worst['live']:.1f} % of a step while it logs, {worst['dense']:.1f} % "
        f"while it logs densely and {worst['keep all']:.1f} % under a policy that stops nowhere, "
        f"the larger figure of both batch sizes; vLLM's CPU build, embedded pair, "
        f"{options.drafter}, chains of {K}, float32, greedy, {options.groups} groups of prompts x "
        f"{options.max_new_tokens} tokens"
    )
    report("vllm", rows, options, text)


def measured(
    engines: dict[str, Timed], batch_size: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row of the table for each setting."""
    ids = ids_of(packaged(options.num_prompts))
    systems = ["plain", LOSING, "live", "dense", *POLICIES]
    steps: dict[str, list[list[Spent]]] = defaultdict(list)
    writer_s: dict[str, float] = defaultdict(float)
    for number in range(1 + options.groups):
        group = [ids[(number * batch_size + i) % len(ids)] for i in range(batch_size)]
        texts = []
        for name in sorted(systems, reverse=bool(number % 2)):
            one = engines["policy"] if name in POLICIES else engines[name.partition(",")[0]]
            before = one.writer_s()
            with losing_drafts(one) if name == LOSING else nullcontext():
                if name in POLICIES:
                    one.session.reload(resolve_policy(POLICIES[name]).policy)
                texts.append(one.run(group, options.max_new_tokens))
            if number:  # the first group warms up
                steps[name].append(one.steps)
                writer_s[name] += one.writer_s() - before
        assert all(one == texts[0] for one in texts), "settings changed a text"
    return [row(name, batch_size, steps, writer_s[name]) for name in systems]


def row(
    name: str, batch_size: int, steps: dict[str, list[list[Spent]]], writer_s: float
) -> dict[str, Any]:
    """Figures of one setting."""
    flat = [one for group in steps[name] for one in group]
    median = Spent(*(statistics.median(column) for column in zip(*flat, strict=True)))
    found = {
        "batch": batch_size,
        "system": name,
        "steps": len(flat),
        "step_us": median.step_us,
        "percent": None,
        "quartiles": "",
        "cpu_percent": None,
        "hooks_us": median.hooks_us,
        "hooks_percent": 100 * median.hooks_us / median.step_us,
        f"percent_of_{STEP_MS}_ms": 100 * median.hooks_us / (1e3 * STEP_MS),
        "policy_us": median.policy_us,
        "writer_us": 1e6 * writer_s / len(flat),
    }
    if name in BESIDE:
        pairs = list(zip(steps[name], steps[BESIDE[name]], strict=True))
        assert all(len(mine) == len(plain) for mine, plain in pairs), "another number of steps"
        low, middle, high = quartiles_of_cost(pairs, "step_us")
        found |= {"percent": middle, "quartiles": f"{low:.1f} to {high:.1f}"}
        found["cpu_percent"] = quartiles_of_cost(pairs, "cpu_us")[1]
    return found


def quartiles_of_cost(pairs: list[tuple[list[Spent], list[Spent]]], clock: str) -> list[float]:
    """Percent that groups of steps take longer than the plain ones."""
    ratios = (
        sum(getattr(one, clock) for one in mine) / sum(getattr(one, clock) for one in plain)
        for mine, plain in pairs
    )
    return [100 * (one - 1) for one in statistics.quantiles(ratios, n=4)]


if __name__ == "__main__":
    main()
