"""Training C2T's network: 9 million rows, 10 epochs, beside a plain DataLoader loop.

Rows are made up (three features, a logistic law), since speed depends on their number alone. The
DataLoader loop is what one writes first (TensorDataset, shuffle, Adam); it is timed for some
seconds and extrapolated to all rows and epochs. Both run on one thread, one after the other.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, report
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

from specctl.train.c2t import train_ffn
from specctl.train.configs import FfnConfig

NAMES = ("draft_logp", "parent_entropy", "depth")


def made_up_rows(size: int) -> tuple[Any, Any]:
    """`[M, 3]` float32 and `[M]` bool, one in ten accepted."""
    random = np.random.default_rng(0)
    features = random.standard_normal((size, 3), np.float32)
    odds = 2.0 * features[:, 0] - features[:, 1] - 3.0
    return features, random.random(size, np.float32) < 1 / (1 + np.exp(-odds))


def time_ours(features: Any, accepted: Any, config: FfnConfig) -> dict[str, Any]:
    """Wall and processor seconds of the whole training, standardisation and shuffle included."""
    wall, cpu = time.perf_counter(), time.process_time()
    train_ffn(features, accepted, NAMES, config)
    return row(
        f"specctl, batch {config.batch_size}",
        len(features) * config.epochs,
        time.perf_counter() - wall,
        time.process_time() - cpu,
        extrapolated=False,
    )


def time_data_loader(
    features: Any, accepted: Any, config: FfnConfig, seconds: float
) -> dict[str, Any]:
    """The plain loop for some seconds; the first batch, before which all rows are shuffled, counts
    once an epoch."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(3, config.hidden), torch.nn.ReLU(), torch.nn.Linear(config.hidden, 1)
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=config.lr)
    rows = TensorDataset(torch.from_numpy(features), torch.from_numpy(accepted).float())
    began, cpu = time.perf_counter(), time.process_time()
    batches = iter(DataLoader(rows, batch_size=config.batch_size, shuffle=True))
    next(batches)
    shuffled, seen = time.perf_counter() - began, 0
    for x, y in batches:
        loss = binary_cross_entropy_with_logits(net(x)[:, 0], y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += len(x)
        if time.perf_counter() - began > shuffled + seconds:
            break
    spent = time.perf_counter() - began
    whole = config.epochs * (shuffled + (spent - shuffled) * len(features) / seen)
    cpu_share = (time.process_time() - cpu) / spent
    name = f"DataLoader, batch {config.batch_size}"
    return row(name, len(features) * config.epochs, whole, whole * cpu_share, extrapolated=True)


def row(
    name: str, num_rows: int, wall_s: float, cpu_s: float, *, extrapolated: bool
) -> dict[str, Any]:
    return {
        "system": name,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "rows_per_s": num_rows / wall_s,
        "extrapolated": extrapolated,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--num-rows", type=float, default=9e6)
    options.add_argument("--epochs", type=int, default=10)
    options.add_argument("--seconds", type=float, default=6.0, help="of the DataLoader loop")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--device", default="cpu", choices=["cpu"])
    options.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    features, accepted = made_up_rows(int(given.num_rows))
    load = os.getloadavg()[0]
    rows = []
    for batch_size in (1024, 8192):
        config = FfnConfig(
            epochs=given.epochs, min_steps=1, batch_size=batch_size, threads=given.threads
        )
        rows.append(time_data_loader(features, accepted, config, given.seconds))
        rows.append(time_ours(features, accepted, config))
    note = (
        f"3-48-1 network, {len(features):,} made-up rows, {given.epochs} epochs, CPU, "
        f"{given.threads} thread; load average {load:.1f} at the start, {os.getloadavg()[0]:.1f} "
        "at the end"
    )
    report("fit", rows, given, note)


if __name__ == "__main__":
    main()
