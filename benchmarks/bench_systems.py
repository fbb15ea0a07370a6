"""The study of docs/systems.md on one pair: the five systems, from prompts to the page's tables.

    python -m benchmarks.bench_systems --target T --head H --gguf T.gguf --data DIR --publish

Policies are fitted and settings chosen on Spec-Bench's five tasks; MT-bench's and GSM8K's questions
are measured, so that no figure is of prompts, or kinds of prompts, that something was fitted to.
The head was trained on none of them. Stages are kept in `--work`, and the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.systems import page
from benchmarks.systems.figures import Figures, Side
from scripts.stages import Stages, told
from scripts.train_eagle3.evaluation import bench_rows
from scripts.train_eagle3.prompts import MAX_CHARACTERS, read_lines
from specctl.policy import EntropyStop, JointThreshold, Shape
from specctl.replay.cost.files import load_cost_model
from specctl.replay.cost.model import CostModel
from specctl.runtime.identity import load_tokenizer, model_folder, processor_name, weights_digest
from specctl.runtime.words import resolve_policy

TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")
"""Spec-Bench's categories beside those of MT-bench."""
CHOOSE, MEASURE = "choose", "measure"
FITS = {
    "HeteroSpec": ("cart", "--preset", "heterospec-paper"),
    # 15 in the paper; the traces hold ten children of a node
    "C2T": ("c2t", "--preset", "c2t-paper", "--first-top-k", 10, "--second-top-k", 10),
    "ECHO": ("echo", "--preset", "echo-paper"),
    "survival table": ("survival",),
}
UNFITTED: dict[str, Shape] = {"threshold": JointThreshold(), "AdaSD's stop": EntropyStop()}
LOSSY = {
    "MARS": ("mars", "--mode", "alg1", "--thetas", "0.9", "--shape", "chain:num_draft_tokens=4"),
    "AdaSD": ("adasd", "--clips", "0.4"),
}
"""Acceptances that change the text, as their papers set them."""
REFUSED, FAILED_CHECK = (2, 4), (11,)
"""Exit codes of a fit that the prompts cannot support, and of a clock that fails its check."""
LLAMACPP = ("--batch-sizes", "1", "--contexts", "64,256", "--verified-tokens", "1,2,3,4,6,9,16")


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", default="embedded", help="a folder")
    add("--head", default="embedded", help="a folder")
    add("--gguf", type=Path, help="the target as llama.cpp runs it, for llama.cpp's clock")
    add("--data", type=Path, help="folder with spec_bench_dev.jsonl and gsm8k_dev.jsonl")
    add("--prompts", type=Path, nargs=2, metavar=("CHOOSE", "MEASURE"), help="instead of --data")
    add("--questions", type=int, default=120, help="of GSM8K")
    add("--tokens", type=int, default=48, help="of an answer at most")
    add("--answer-tokens", type=int, default=96, help="the same, where answers are judged")
    add("--fits", type=int, default=5, help="of each system")
    add("--depth", type=int, default=11, help="levels of the traces")
    add("--threads", type=int, default=min(4, os.cpu_count() or 1))
    add("--work", type=Path, default=Path(".systems"))
    add("--publish", action="store_true", help="also into benchmarks/results and docs/systems.md")
    return parser.parse_args(words)


class Study(Stages):
    """The stages of the study."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.folders = {
            "target": model_folder(given.target, embedded_default="target"),
            "head": model_folder(given.head, embedded_default="eagle3"),
        }
        sizes = ("questions", "tokens", "answer_tokens", "fits", "depth", "threads")
        options = {name: getattr(given, name) for name in sizes}
        options |= {f"{name}_digest": weights_digest(of) for name, of in self.folders.items()}
        options["gguf_digest"] = weights_digest(given.gguf) if given.gguf else None
        options["prompts"] = [path.name for path in given.prompts or (given.data,)]
        super().__init__(given.work, options)

    @property
    def pair(self) -> tuple[object, ...]:
        folders = self.folders
        words = ("--target", folders["target"], "--drafter", folders["head"], "--dtype", "float32")
        return (*words, "--threads", self.given.threads)

    def prompts(self, side: str) -> Path:
        """The prompts of a side."""
        given = self.given
        if given.prompts:
            return Path(given.prompts[side == MEASURE])

        def write(path: Path) -> None:
            rows = spec_bench(given.data / "spec_bench_dev.jsonl", self.folders["target"])
            chosen = [row for row in rows if (row["category"] in TASKS) == (side == CHOOSE)]
            for row in chosen:
                row["category"] = row["category"] if side == CHOOSE else "MT-bench"
            if side == MEASURE:
                questions = read_lines(given.data / "gsm8k_dev.jsonl")[: given.questions]
                chosen += [
                    {
                        "prompt": one["question"],
                        "category": "GSM8K",
                        "answer": one["answer"].rpartition("####")[2].strip(),
                    }
                    for one in questions
                ]
            lines = [json.dumps({"id": f"{side}-{n}"} | row) for n, row in enumerate(chosen)]
            path.write_text("\n".join(lines) + "\n", "utf-8")

        return self.stage(f"Prompts to {side}", f"{side}.jsonl", write)

    def traces(self, side: str) -> Path:
        words = ("collect", self.prompts(side), "--dense", "--depth", self.given.depth, *self.pair)
        title = f"Dense traces of the prompts to {side}"
        return self.verb(title, f"traces-{side}", *words, "--max-new-tokens", self.given.tokens)

    def fits(self) -> dict[str, list[Path]]:
        """Every system's artifacts, each fitted to four fifths of the prompts, drawn anew; fewer
        where a fit refuses them."""
        traces, found = self.traces(CHOOSE), {}
        for name, (verb, *more) in FITS.items():
            made = [
                self.verb(
                    f"{name}, fit {seed + 1} of {self.given.fits}",
                    f"{verb}-{seed}",
                    *("fit", verb, traces, *more, "--held-out", 0.2, "--seed", seed),
                    passes=REFUSED,
                )
                for seed in range(self.given.fits)
            ]
            found[name] = [path for path in made if path.is_dir()]
        return found

    def clocks(self, fits: dict[str, list[Path]]) -> dict[str, Path]:
        """Cost models: of our loop here, of llama.cpp here, and the published one of a GPU."""
        timed = ["threshold", "adasd_stop", *(of[0] for of in fits.values() if of)]
        decisions = [word for policy in timed for word in ("--policy", policy)]
        here = self.verb(
            "The clock of our loop",
            "clock.json",
            *("profile", "--quick", "--batch-sizes", 1, *self.pair, *decisions),
            passes=FAILED_CHECK,
        )
        found = {"our loop": here}
        if self.given.gguf:
            folders, gguf = self.folders, self.given.gguf
            words = ("export", "chain:num_draft_tokens=3", "--to", "llamacpp", "--target", gguf)
            title = "The head becomes a GGUF file"
            head = self.verb(title, "drafter", *words, "--drafter", folders["head"])
            words = ("profile", "--engine", "llamacpp", "--quick", "--threads", self.given.threads)
            pair = ("--target", gguf, "--drafter", head / "drafter.gguf")
            title = "llama.cpp's clock"
            found["llama.cpp"] = self.verb(title, "clock-llamacpp.json", *words, *pair, *LLAMACPP)
        return found | {"H100": Path("h100-llama-3.1-8b-eagle")}

    def lossy(self, name: str) -> dict[str, Any] | None:
        """The report of a relaxed acceptance, whether it is certified or not; None where there are
        too few questions to try."""
        verb, *more = LOSSY[name]
        title, runs = f"{name}: right answers with its acceptance", self.folder / f"{verb}-answers"
        words = ("fit", verb, self.prompts(MEASURE), *more, *self.pair, "--batch-size", 8)
        size = ("--max-new-tokens", self.given.answer_tokens, "--runs", runs)
        resume = ("--resume",) if runs.exists() else ()
        self.verb(title, verb, *words, *size, *resume, passes=REFUSED)
        report = runs / "report.json"
        return page.judged(json.loads(report.read_text("utf-8"))) if report.exists() else None


def spec_bench(path: Path, target: Path) -> list[dict[str, Any]]:
    """First turns of Spec-Bench's questions that no head was trained on."""
    unseen = bench_rows(path, load_tokenizer(target))
    long = [row for row in read_lines(path) if len(row["turns"][0]) > MAX_CHARACTERS]
    rows = unseen + [{"category": row["category"], "prompt": row["turns"][0]} for row in long]
    return [*{row["prompt"]: row for row in rows}.values()]


def run(study: Study) -> dict[str, Any]:
    """All stages; the facts behind the page."""
    paths = study.fits()
    measured = study.traces(MEASURE)
    files = study.clocks(paths)
    clocks: dict[str, CostModel] = {name: load_cost_model(path) for name, path in files.items()}
    fits = {
        name: [resolve_policy(str(one)).policy.shape for one in of]
        for name, of in paths.items()
        if of
    }
    of_papers = {n: of for n, of in fits.items() if n in ("HeteroSpec", "C2T", "ECHO")}
    stop = {"AdaSD's stop": [UNFITTED["AdaSD's stop"]]}
    families = {n: [shape] for n, shape in UNFITTED.items()} | fits

    def tables(path: Path) -> None:
        sides = (Side.open(one, clocks) for one in (study.traces(CHOOSE), measured))
        figures = Figures.of(*sides)
        deep = {name: of for name, of in families.items() if name not in (*stop, "ECHO")}
        rows = {
            "times": [*figures.times(families)],
            "presets": [*figures.presets(of_papers | stop)],
            "equal_depth": [*figures.equal_depth(deep)],
            "prompts": {
                side: page.counts(one)
                for side, one in ((CHOOSE, figures.choice), (MEASURE, figures.side))
            },
        }
        path.write_text(json.dumps(rows), "utf-8")

    ladders = {}
    for name, file in files.items():
        words = ("ladder", measured, "--cost-model", file, "--held-out", 0.5, "--force")
        place = study.verb(f"The ladder on the clock of {name}", f"ladder-{file.stem}", *words)
        ladders[name] = page.rungs(json.loads((place / "ladder.json").read_text("utf-8")))
    title = "Every policy on every clock"
    rows = json.loads(study.stage(title, "tables.json", tables).read_text("utf-8"))
    return rows | {
        "left_out": [name for name, of in paths.items() if not of],
        "ladders": ladders,
        "lossy": {name: study.lossy(name) for name in LOSSY},
        "clocks": {name: page.clock_facts(model) for name, model in clocks.items()},
        "options": study.options,
        "seconds": study.seconds,
        "device": processor_name(),
        "num_cpus": os.cpu_count(),
        "target": Path(study.folders["target"]).name,
        "head": Path(study.folders["head"]).name,
        "specctl": version("specctl"),
    }


def main() -> None:
    given = parse_arguments()
    if (given.data is None) == (given.prompts is None):
        raise SystemExit("error: give --data DIR, or --prompts CHOOSE MEASURE")
    began = time.perf_counter()
    with told(given.work), closing(Study(given)) as study:
        result = run(study)
    (study.folder / page.NAME).write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(page.block(result))
    print(f"{time.perf_counter() - began:.0f} s; {study.folder / page.NAME}")
    if given.publish:
        page.publish(result)


if __name__ == "__main__":
    main()
