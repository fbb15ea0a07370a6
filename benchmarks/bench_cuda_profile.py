"""`specctl profile` where only the runtime's dependencies are: the cost table of a pair.

    python benchmarks/bench_cuda_profile.py                     # 8B shape, on a GPU, a minute
    python benchmarks/bench_cuda_profile.py --rounds ordinary   # the loop without graphs
    python benchmarks/bench_cuda_profile.py --shape embedded    # the pair that ships
    python benchmarks/bench_cuda_profile.py --small             # to its end on any machine

The rounds that are timed are those of a loop on the device: graphs on CUDA. The table of the 8B
shape is written for batches of 1 and 8 first, and anew with batches of 32: what stands is always a
whole table.

The command line itself needs typer and rich. This calls what it calls, and writes the same file,
which `specctl replay --cost-model` and all other verbs read.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from common import RESULTS
from decode_8b.pair import SIZES, random_pair
from kernels.timing import Row, print_table

from specctl.replay.config import ProfileGrid
from specctl.replay.cost.files import load_cost_model, save_cost_model
from specctl.replay.cost.model import TableCost
from specctl.replay.cost.probe import Bench
from specctl.replay.cost.profile import profile
from specctl.runtime.capture import GraphSettings
from specctl.runtime.load import Pair, load_pair

EMBEDDED = "embedded"
LARGE = ProfileGrid(
    batch_sizes=(1, 8, 32),
    context_tokens=(1024, 4096),
    tokens=(1, 4, 16, 64),
    widths=(1, 10),
    prompt_tokens=(64, 256, 1024),
    num_passes=1,
    num_rounds=3,
)
GRIDS = {
    "8b": LARGE,
    EMBEDDED: ProfileGrid(num_passes=1, num_rounds=5),
    "tiny": ProfileGrid(
        batch_sizes=(1, 2),
        context_tokens=(16, 48),
        tokens=(1, 4, 8),
        widths=(1, 3),
        prompt_tokens=(8, 16),
        num_passes=1,
        num_rounds=2,
        loop_tokens=4,
    ),
}


STAGES = {"8b": (LARGE.model_copy(update={"batch_sizes": (1, 8)}), LARGE)}


def pair_of(shape: str, device: torch.device) -> Pair:
    """The pair, loaded or made."""
    if shape == EMBEDDED:
        return load_pair(EMBEDDED, EMBEDDED, device=str(device))
    return random_pair(SIZES[shape], device)


def verify_rows(record: TableCost) -> list[Row]:
    """The table of verification, ms by tokens a request."""
    grid = record.verify
    return [
        {"batch": batch, "context": context}
        | {f"{size} tokens": us / 1e3 for size, us in zip(grid.sizes, times, strict=True)}
        for batch, plane in zip(grid.batch_sizes, grid.us, strict=True)
        for context, times in zip(grid.context_tokens, plane, strict=True)
    ]


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--shape", choices=tuple(GRIDS), help="8b on CUDA, else embedded")
    options.add_argument(
        "--rounds", choices=("auto", "graphs", "ordinary"), default="auto", help="as of the verb"
    )
    options.add_argument("--small", action="store_true", help="the tiny shape, and few points")
    options.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    options.add_argument("--out", type=Path, default=RESULTS, help="folder for the cost model")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    shape = "tiny" if given.small else given.shape or ("8b" if device.type == "cuda" else EMBEDDED)
    pair = pair_of(shape, device)
    bench = Bench.of(pair, given.rounds)
    given.out.mkdir(parents=True, exist_ok=True)
    is_default = (bench.graphs is None) == (GraphSettings().capture_on((device,)) is None)
    suffix = "" if is_default else "-ordinary"
    path = given.out / f"cost_model-{shape}-{device.type}{suffix}.json"
    for grid in STAGES.get(shape, (GRIDS[shape],)):
        model = profile(bench, grid)
        save_cost_model(model, path)
        record = load_cost_model(path)
        assert isinstance(record, TableCost)
        print(
            f"{record.pair.target} + {record.pair.drafter}, {record.machine.dtype}, "
            f"{record.machine.device}, {record.rounds} rounds: ms to verify; mean error at "
            f"held-out points: {record.held_out_text}; {path.name} {model.digest}",
            flush=True,
        )
        print_table(verify_rows(record))


if __name__ == "__main__":
    main()
