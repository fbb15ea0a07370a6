"""What the plugin costs a step of vLLM: engines in one process, with it and without, taking turns.

    LD_PRELOAD=.venv-engines/lib/libiomp5.so .venv-engines/bin/python benchmarks/bench_vllm.py

vLLM's CPU build on the embedded pair, chains of K drafts, the same prompts in every engine. A
setting stands beside a plain engine that does the same work in the same steps:

    live           rounds are logged                     beside the plain engine
    dense          drafts logged and none verified       beside a plain engine that loses its drafts
    keep all       a policy that stops nowhere           beside the plain engine
    other stops    they save work, so that no step of a plain engine is their equal: hooks alone

A step is one call of `LLMEngine.step` in which all B requests decode. Of each group of B prompts
the ratio of summed step times is taken; the figures are its median and quartiles over groups and
repeats. `hooks_us` is the time of the engine's thread inside the plugin, `policy_us` what rules
took of it, `writer_us` processor time of the writing thread, all a step. A step of this pair is
small, so `percent_of_20_ms` says what the hooks would be of a step of that size: what a large
model's step takes, with hooks of a small vocabulary on a CPU. It is no measurement of a GPU.

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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from common import parser, report

sys.path.insert(0, str(Path(__file__).parent.parent))
from specctl.engines.settings import PluginSettings, TraceSettings
from specctl.runtime.policy_spec import resolve_policy
from tests.engines.vllm_engine import Engine, engine, ids_of, packaged

K = 5
KEEP_ALL = f"chain:num_draft_tokens={K}"
STOPS = {
    "confidence": f"confidence:window={K}:threshold=0.4",
    "entropy": f"stop:signal=entropy:threshold=1.0:window={K}",
    "AdaSD": f"adasd_stop:window={K}:min_samples=2",
}
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
    """Microseconds of one step."""

    step_us: float
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
        tracer = None if self.session is None else self.session.tracer
        if tracer is None:
            return 0.0
        clock = time.pthread_getcpuclockid(tracer.recorder._thread.ident)
        return time.clock_gettime(clock)

    def _timed_step(self) -> Any:
        is_whole = (
            self.running.llm.llm_engine.get_num_unfinished_requests() == self._batch_size
            and not self._is_first
        )
        self._hooks_s, self._is_first = 0.0, False
        began = time.perf_counter()
        out = self._step()
        spent_s = time.perf_counter() - began
        if is_whole:
            rules = None if self.session is None else self.session.rules
            policy_us = 0.0 if rules is None else rules.spent_us
            self.steps.append(Spent(1e6 * spent_s, 1e6 * self._hooks_s, policy_us))
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
    known.set_defaults(num_prompts=32)
    known.add_argument("--repeats", type=int, default=3, help="passes over the prompts")
    known.add_argument("--drafter", default="eagle3", help="eagle3 or small")
    options = known.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        settings = {
            "plain": None,
            "live": PluginSettings(trace=TraceSettings(out=f"{folder}/live")),
            "dense": PluginSettings(trace=TraceSettings(out=f"{folder}/dense", dense=True)),
            "policy": PluginSettings(policy=KEEP_ALL),
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
        f"{options.drafter}, chains of {K}, float32, greedy, {options.num_prompts} prompts x "
        f"{options.max_new_tokens} tokens x {options.repeats} passes"
    )
    report("vllm", rows, options, text)


BESIDE = {"live": "plain", "dense": "plain, drafts lost", "keep all": "plain"}


def measured(
    engines: dict[str, Timed], batch_size: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row of the table for each setting."""
    ids = ids_of(packaged(options.num_prompts))
    groups = [ids[at : at + batch_size] for at in range(0, len(ids), batch_size)]
    systems = ["plain", "plain, drafts lost", "live", "dense", "keep all", *STOPS]
    steps: dict[str, list[list[Spent]]] = defaultdict(list)
    writer_s: dict[str, float] = defaultdict(float)
    for number in range(1 + options.repeats):
        for index, group in enumerate(groups):
            texts = []
            for name in sorted(systems, reverse=bool((number + index) % 2)):
                one = engines[name if name in engines else "policy"]
                before = one.writer_s()
                with ExitStack() as stack:
                    if name == "plain, drafts lost":
                        one = engines["plain"]
                        stack.enter_context(losing_drafts(one))
                    elif one is engines["policy"]:
                        words = STOPS.get(name, KEEP_ALL)
                        one.session.reload(resolve_policy(words).policy)
                    texts.append(one.run(group, options.max_new_tokens))
                if number:  # the first pass warms up
                    steps[name].append(one.steps)
                    writer_s[name] += one.writer_s() - before
            assert all(one == texts[0] for one in texts), "settings changed a text"
    return [row(name, batch_size, steps, writer_s[name]) for name in systems]


def row(
    name: str, batch_size: int, steps: dict[str, list[list[Spent]]], writer_s: float
) -> dict[str, Any]:
    """Figures of one setting."""
    flat = [one for group in steps[name] for one in group]
    step_us, hooks_us, policy_us = (statistics.median(column) for column in zip(*flat, strict=True))
    found = {
        "batch": batch_size,
        "system": name,
        "steps": len(flat),
        "step_us": step_us,
        "percent": None,
        "quartiles": "",
        "hooks_us": hooks_us,
        "hooks_percent": 100 * hooks_us / step_us,
        "percent_of_20_ms": 100 * hooks_us / (1e3 * STEP_MS),
        "policy_us": policy_us,
        "writer_us": 1e6 * writer_s / len(flat),
    }
    if name in BESIDE:
        ratios = []
        for mine, plain in zip(steps[name], steps[BESIDE[name]], strict=True):
            assert len(mine) == len(plain), "another number of steps"
            ratios.append(sum(one.step_us for one in mine) / sum(one.step_us for one in plain))
        low, middle, high = (100 * (one - 1) for one in statistics.quantiles(ratios, n=4))
        found |= {"percent": middle, "quartiles": f"{low:.1f} to {high:.1f}"}
    return found


if __name__ == "__main__":
    main()
