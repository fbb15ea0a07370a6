"""Two devices that are made of this process's memory, for what may run on several GPUs.

    python -m tests.runtime.two_devices FOLDER

A tensor of `twin:0` or `twin:1` holds one of the CPU, which computes; an operation on tensors of
two devices raises, as on GPUs. transformers and accelerate take them for any other accelerator.
As a program: decodes and collects with the embedded target on the CPU and over both, texts to
standard output, trace sets into FOLDER.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import specctl.runtime.config as config
import specctl.runtime.load as load
from specctl.errors import ModelConfigError
from specctl.runtime.api import Decoder
from tests.cli.command import specctl

NAME, NUM_DEVICES = "twin", 2
PROMPTS = ["def fibonacci(n):", "The capital of"]


class Placed(torch.Tensor):
    """A tensor of one of the devices; `held` has its values."""

    held: torch.Tensor

    @classmethod
    def of(cls, held: torch.Tensor, device: torch.device) -> Placed:
        facts: Any = {"strides": held.stride(), "dtype": held.dtype, "device": device}
        made: Placed = torch.Tensor._make_wrapper_subclass(cls, held.shape, **facts)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(op, *args, **(kwargs or {}))

    def tolist(self) -> Any:
        return self.held.tolist()

    def data_ptr(self) -> int:  # by which accelerate tells tied weights
        return self.held.data_ptr()


def computed(op: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation, on the tensors that are held."""
    flat, form = tree_flatten((args, kwargs))
    tensors = [one for one in flat if isinstance(one, torch.Tensor)]
    places = {t.device for t in tensors if isinstance(t, Placed) or t.dim()}  # numbers go anywhere
    named = [one for one in flat if isinstance(one, torch.device)]
    if len(places) > 1 and "copy" not in str(op):
        raise RuntimeError(f"{op}: tensors on {sorted(map(str, places))}")
    place = named[0] if named else tensors[0].device
    held = [one.held if isinstance(one, Placed) else one for one in flat]
    held = [torch.device("cpu") if isinstance(one, torch.device) else one for one in held]
    args, kwargs = tree_unflatten(held, form)
    same = {id(one.held): one for one in flat if isinstance(one, Placed)}

    def placed(found: Any) -> Any:
        if not isinstance(found, torch.Tensor) or place.type != NAME:
            return found
        return same[id(found)] if id(found) in same else Placed.of(found, place)

    return tree_map(placed, op(*args, **kwargs))


class Guard(torch._C._acc.DeviceGuard):  # type: ignore[misc]
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


class Backend:
    """The module `torch.twin`."""

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def device_count(self) -> int:
        return NUM_DEVICES

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        del seed


def register() -> None:
    """Makes the devices, and the loader of models know them."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=Backend())
    library = torch.library.Library("_", "IMPL")
    library.fallback(computed, "PrivateUse1")  # of operations that are given no tensor
    register.library = library  # type: ignore[attr-defined]  # it ends with the object
    # Python tensors have no inference mode, and torch.tensor asks a device in its own way.
    torch.inference_mode = lambda on=True: torch.no_grad() if on else contextlib.nullcontext()  # type: ignore[assignment, misc]
    original, load_quietly = torch.tensor, load.quietly

    def tensor(data: Any, **options: Any) -> torch.Tensor:
        device = torch.device(options.pop("device", None) or "cpu")
        return original(data, **options).to(device)

    def quietly(*args: Any, **options: Any) -> Any:
        torch.tensor = original  # transformers' own way to make tensors is left alone
        try:
            return load_quietly(*args, **options)
        finally:
            torch.tensor = tensor

    load.quietly = quietly
    load.parse_devices = lambda word: tuple(map(torch.device, word.split(",")))
    torch.cuda.mem_get_info = lambda device: (1 << 30, 1 << 30)
    for module in (config, load):
        module.check_device = lambda word: None  # type: ignore[attr-defined]


def texts(device: str) -> dict[str, Any]:
    """What is decoded there, and how it was accepted."""
    found = {}
    for policy, drafter in (("eagle2", "embedded"), ("chain", "embedded:small")):
        options: dict[str, Any] = {"device": device, "dtype": "float32", "batch_size": 2}
        decoder = Decoder.from_pretrained("embedded", drafter, policy=policy, **options)
        answers = decoder.generate(PROMPTS, max_new_tokens=4)
        found[policy] = [[one.text, one.metrics.accepted_lengths] for one in answers]
    return found


def run(folder: Path, both: str = f"{NAME}:0,{NAME}:1") -> None:
    """The program."""
    register()
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS) + "\n")
    options = ["--dense", "--depth", "3", "--children", "2", "--max-new-tokens", "2"]
    for name, device in (("cpu", "cpu"), ("both", both)):
        words = ["collect", prompts, "-o", folder / name, "--device", device, "--dtype", "float32"]
        outcome = specctl(*words, *options)
        assert outcome.code == 0, outcome
        sys.stdout.write(json.dumps(texts(device)) + "\n")
    torch.cuda.mem_get_info = lambda device: (12_000_000, 1 << 30)
    try:
        load.load_pair("embedded", None, device=both, dtype="float32")
    except ModelConfigError as error:
        sys.stdout.write(f"{error}\n")


if __name__ == "__main__":
    run(Path(sys.argv[1]))
