"""Trains the embedded pair.

corpus -> tokenizer -> target -> generate -> head -> small -> export -> evaluate

    python scripts/train_embedded_pair.py --work-dir work-pair --text gsm8k.jsonl --text book.txt
    python scripts/train_embedded_pair.py --work-dir work-pair --stage head --resume

Every stage reads the files of the stages before it in the work folder, so one can be run alone.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from embedded_pair import stages  # noqa: E402

STAGES = ("tokenizer", "target", "generate", "head", "small", "export", "evaluate")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--stage", choices=(*STAGES, "all"), default="all", help="one stage, or all in order"
    )
    parser.add_argument(
        "--work-dir", type=Path, default=Path("work-pair"), help="checkpoints and logs"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("specctl/embedded"), help="where export writes"
    )
    parser.add_argument(
        "--text",
        type=Path,
        action="append",
        default=[],
        help="folder, .jsonl or text file to train on too",
    )
    parser.add_argument(
        "--text-eval",
        type=Path,
        action="append",
        default=[],
        help=".jsonl file to evaluate on, never trained on",
    )
    parser.add_argument("--target-steps", type=int, default=2140, help="updates of 4096 tokens")
    parser.add_argument("--head-steps", type=int, default=1080, help="updates of the draft head")
    parser.add_argument(
        "--head-from", type=Path, help="checkpoint of an earlier head to start from"
    )
    parser.add_argument(
        "--generate-batches", type=int, default=200, help="batches of 64 continuations"
    )
    parser.add_argument("--small-steps", type=int, default=400, help="updates of the small drafter")
    parser.add_argument("--resume", action="store_true", help="go on from the stage's checkpoint")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Runs the chosen stages."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    random.seed(arguments.seed)
    for stage in STAGES if arguments.stage == "all" else (arguments.stage,):
        getattr(stages, f"run_{stage}")(arguments)


if __name__ == "__main__":
    main()
