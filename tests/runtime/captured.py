"""The embedded pair decoded by the ordinary loop and in graphs, on a capture for CPUs that is as
strict as a CUDA graph.

Every torch operation of the recorded function is put on a tape, and kernels as one operation each;
a replay runs the tape, not the Python, over the same memory. So what Python read, counted or
decided while recording is baked in, as in a graph; and what a graph could not contain, a value
taken to the host or a size that depends on data, is refused while recording. Recording leaves no
trace: what it wrote outside of its own tensors is put back.

`make nightly` takes 200 prompts, by SPECCTL_TEST_PROMPTS; other runs 12, of all categories alike.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from specctl.collect.prompts import Prompt, load_prompts
from specctl.policy import Policy, StaticTree
from specctl.runtime.capture import GraphSettings, Recording
from specctl.runtime.conversations import Conversation, DecodeSettings, next_request
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.load import Pair, load_pair
from specctl.runtime.requests import Completion, Request, Sampling
from tests.runtime.toy import Kept, texts_of

NUM_PROMPTS = int(os.environ.get("SPECCTL_TEST_PROMPTS", "12"))
BASE = StaticTree(depth=5, top_k=6, num_tokens=24)


@dataclass(frozen=True)
class Run:
    """Results: texts and, request by request, counts that the policy decided."""

    texts: dict[str, tuple[int, ...]]
    counts: dict[str, tuple[int, int, int]]
    loop: DecodeLoop


@cache
def pair() -> Pair:
    return load_pair("embedded", "embedded", device="cpu", dtype="float32")


@cache
def small_pair() -> Pair:
    return load_pair("embedded", "embedded:small", device="cpu", dtype="float32")


def requests(
    num: int, samplings: tuple[Sampling, ...] = (Sampling(),), new_tokens: int = 12
) -> list[Request]:
    """Prompts of all categories; the samplings take turns, each request with a seed of its own."""
    prompts, found = load_prompts("embedded"), []
    for index in range(num):
        prompt = prompts[(140 + 97 * index) % len(prompts)]
        sampling = samplings[index % len(samplings)].for_request(1000 + index)
        settings = DecodeSettings(new_tokens, sampling)
        found.append(next_request(pair().target.tokenizer, Conversation(prompt), settings))
    return found


def spread(prompts: Sequence[Prompt]) -> list[Prompt]:
    """As many of them as are wanted, evenly: the set is sorted by category."""
    assert len(prompts) >= NUM_PROMPTS
    return [prompts[place * len(prompts) // NUM_PROMPTS] for place in range(NUM_PROMPTS)]


def spread_requests(new_tokens: int = 24) -> list[Request]:
    settings, tokenizer = DecodeSettings(new_tokens), pair().target.tokenizer
    prompts = spread(load_prompts("embedded"))
    return [next_request(tokenizer, Conversation(prompt), settings) for prompt in prompts]


def tape(**options: object) -> GraphSettings:
    """Settings that record as strictly as CUDA; `options` are those of `GraphSettings`."""
    return GraphSettings(**{"capture": TapeCapture(), **options})  # type: ignore[arg-type]


def make_loop(
    policy: Policy,
    given: list[Request],
    graphs: GraphSettings | None,
    *,
    batch_size: int = 3,
    of: Pair | None = None,
    observer: Kept | None = None,
    **options: Any,
) -> DecodeLoop:
    of = of or pair()
    longest = max(len(r.prompt_ids) + r.max_new_tokens for r in given)
    return DecodeLoop(
        of.target.model,
        of.drafter,
        policy,
        batch_size=batch_size,
        max_text_tokens=longest,
        eos_ids=of.target.eos_ids,
        observer=observer,
        graphs=graphs,
        **options,
    )


def decode(
    policy: Policy, given: list[Request], graphs: GraphSettings | None, **options: Any
) -> Run:
    return run(make_loop(policy, given, graphs, **options), given)


def ordinary(policy: Policy, given: list[Request], *, batch_size: int = 3) -> Run:
    """The same without graphs; decoded once for all tests, so that none may patch it."""
    return _ordinary(policy, tuple(given), batch_size)


@cache
def _ordinary(policy: Policy, given: tuple[Request, ...], batch_size: int) -> Run:
    return decode(policy, list(given), None, batch_size=batch_size)


def run(loop: DecodeLoop, given: list[Request]) -> Run:
    done = list(loop.run(given))
    return Run(
        texts_of(done),
        {
            c.request.request_id: (
                c.metrics.calls,
                c.metrics.verified_tokens,
                c.metrics.drafted_levels,
            )
            for c in done
        },
        loop,
    )


def same_as_ordinary(
    policy: Policy, given: list[Request], graphs: GraphSettings, *, batch_size: int = 3
) -> Run:
    """What is decoded with graphs, after its texts and decisions are held to those without."""
    found = decode(policy, given, graphs, batch_size=batch_size)
    plain = ordinary(policy, given, batch_size=batch_size)
    assert (found.texts, found.counts) == (plain.texts, plain.counts)
    return found


def drive(
    loop: DecodeLoop, given: list[Request], actions: dict[int, Callable[[], object]]
) -> dict[str, Completion]:
    """All requests decoded, with something done before some of the steps."""
    done, step = [], 0
    for request in given:
        loop.submit(request)
    while loop.busy:
        actions.get(step, lambda: None)()
        done += loop.step()
        step += 1
    assert step > max(actions), "the texts ended before all was done"
    return {one.request.request_id: one for one in done}


def assert_same_rounds(seen: Kept, wanted: Kept, at_least: int) -> None:
    """Captured rounds are padded to whole levels, so slots of a pool may differ; trees do not."""
    assert len(seen.records) == len(wanted.records) >= at_least
    for found, plain in zip(seen.records, wanted.records, strict=True):
        for name in ("round_idx", "position", "context_tokens", "offered_depth", "num_emitted"):
            assert torch.equal(getattr(found, name), getattr(plain, name)), name
        width, steps = plain.submitted.shape[1], plain.path.shape[1]
        verified = plain.submitted >= 0
        assert torch.equal(found.submitted[:, :width] >= 0, verified)
        assert (found.submitted[:, width:] == -1).all()
        assert torch.equal(found.path[:, :steps], plain.path)
        pairs = [(found.target_ids, plain.target_ids)]
        pairs += [(getattr(found.tree, n), getattr(plain.tree, n)) for n in ("token_ids", "parent")]
        assert all(torch.equal(one[:, :width][verified], two[verified]) for one, two in pairs)
        logits = (record.target_logits[:, :width][verified] for record in (found, plain))
        torch.testing.assert_close(*logits, atol=1e-3, rtol=1e-3)
        assert found.policy_digest == plain.policy_digest


def check_captured(found: Run) -> None:
    """Most parts were replayed and no capture failed."""
    counters = found.loop.graph_counters
    assert found.loop.round.kernels is not None
    assert counters.failed_captures == 0
    assert counters.captures > 0
    assert counters.replays > counters.captures


# --------------------------------------------------------------------------- the tape


KERNELS = (
    "bookkeeping", "commit_kv", "node_features", "policy_eval", "sample_tokens", "tree_attention",
    "tree_build", "verify_tree",
)  # fmt: skip
HOST_READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique", "masked_select",
              "_unique2", "item"}  # fmt: skip


class HostReadError(Exception):
    """A graph cannot hold this."""


@dataclass
class Tape(TorchDispatchMode):
    """Operations in order; `steps` run again with their results put where they were."""

    steps: list[Callable[[], None]] = field(default_factory=list)
    own: dict[int, Any] = field(default_factory=dict)
    saved: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    numbers: list[Tensor] = field(default_factory=list)
    is_inside: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        self._refuse(name, args)
        writes = any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
        if writes:
            self._save((args, kwargs))
        found = func(*args, **kwargs)
        given = addresses_of((args, kwargs))
        if writes or given.isdisjoint(addresses_of(found)):  # views need no repetition
            self.steps.append(repeat(func, args, kwargs, None if writes else found))
        self._claim(found, given)
        return found

    def opaque(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A kernel: what it does inside is its own."""
        self._save((args, kwargs))
        found = function(*args, **kwargs)
        given = addresses_of((args, kwargs))
        self.steps.append(repeat(function, args, kwargs, found))
        self._claim(found, given)
        return found

    def restore(self) -> None:
        """What was written outside of the tape's own tensors is as before."""
        for whole, before in self.saved.values():
            whole.copy_(before)

    def _refuse(self, name: str, args: Any) -> None:
        masked = name == "index" and any(
            t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1])
        )
        # A list that becomes a tensor is copied to the device. A number is a kernel's argument,
        # unless it is assigned to an element: that copies it, too.
        if name == "lift_fresh":
            self.numbers.append(args[0])
        copied = (name == "lift_fresh" and args[0].ndim > 0) or (
            name == "copy_" and any(args[1] is number for number in self.numbers)
        )
        if name in HOST_READS or masked or copied:
            raise HostReadError(name)

    def _claim(self, found: Any, given: set[int]) -> None:
        for tensor in tensors_in(found):
            address = tensor.untyped_storage().data_ptr()
            if address not in given:
                self.own[address] = tensor

    def _save(self, given: Any) -> None:
        for tensor in tensors_in(given):
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address in self.own or address in self.saved or not storage.nbytes():
                continue
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.saved[address] = (whole, whole.clone())


def repeat(function: Any, args: Any, kwargs: Any, found: Any) -> Callable[[], None]:
    """Calls again and puts the results where the first ones are."""

    first = tensors_in(found)

    def step() -> None:
        again = function(*args, **kwargs)
        for old, new in zip(first, tensors_in(again), strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)

    def only() -> None:
        function(*args, **kwargs)

    return only if found is None else step


def addresses_of(values: Any) -> set[int]:
    """Of the memory that tensors stand in."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_in(values)}


def tensors_in(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class TapeCapture:
    """See the module.

    Args:
        num_bytes: that each recording holds.
        fails: so many of the next recordings run out of memory.
        lenient: refuse as CUDA does, which a loop survives; else tests hear of it.

    Attributes:
        num_launches: operations of each recording, a kernel counting as one.
        num_forgotten: times that all recordings were given up.
    """

    def __init__(self, num_bytes: int = 1, fails: int = 0, *, lenient: bool = False) -> None:
        self.num_bytes, self.fails, self.lenient = num_bytes, fails, lenient
        self.num_launches: list[int] = []
        self.num_forgotten = 0

    def record(self, function: Callable[[], Any]) -> Recording:
        if self.fails:
            self.fails -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 EiB.\nmore")
        tape = Tape()
        try:
            with opaque_kernels(tape), tape:
                found = function()
        except HostReadError as error:
            if self.lenient:
                raise RuntimeError(str(error)) from error
            raise
        finally:
            tape.restore()
        self.num_launches.append(len(tape.steps))

        def replay() -> None:
            for step in tape.steps:
                step()

        return Recording(replay, found, self.num_bytes)

    def forget(self) -> None:
        self.num_forgotten += 1


@contextmanager
def opaque_kernels(tape: Tape) -> Iterator[None]:
    """Kernels' references count as one operation; reading a list of numbers is refused."""
    patches = [patch.object(Tensor, name, refusing(name)) for name in ("tolist", "numpy")]
    for op in KERNELS:
        module = importlib.import_module(f"specctl.kernels.{op}.reference")
        patches += [patch.object(module, name, wrapped(tape, fn)) for name, fn in own(module)]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def own(module: ModuleType) -> list[tuple[str, Callable[..., Any]]]:
    return [
        (name, value)
        for name, value in vars(module).items()
        if callable(value)
        and getattr(value, "__module__", "") == module.__name__
        and not name.startswith("_")
        and not isinstance(value, type)
    ]


def wrapped(tape: Tape, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if tape.is_inside:  # a kernel that calls another
            return function(*args, **kwargs)
        tape.is_inside = True
        try:
            with _disable_current_modes(), patch.object(Tensor, "tolist", TOLIST):
                return tape.opaque(function, args, kwargs)
        finally:
            tape.is_inside = False

    return call


TOLIST = Tensor.tolist


def refusing(name: str) -> Callable[..., Any]:
    """Refuses to read values on the thread that records; others, e.g. a recorder's, may."""
    original, owner = getattr(Tensor, name), threading.get_ident()

    def read(self: Tensor, *args: Any, **named: Any) -> Any:
        if threading.get_ident() == owner:
            raise HostReadError("a list of a tensor's values")
        return original(self, *args, **named)

    return read
