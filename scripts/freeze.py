"""Runs a fixed list of commands and keeps what they print and write, to compare after a change.

    python scripts/freeze.py write --work DIR     before: run everything, write --outputs
    python scripts/freeze.py compare --work DIR   after: run everything, list every value that differs

The commands are those of `make demo` and every other verb with `--json`, on prompts of the embedded
set. `--outputs` (default .frozen/outputs.json, which git ignores) holds for one machine: another
processor rounds otherwise. What cannot repeat is left out: measured times, dates, versions, digests
of files. Times that come from the cost model repeat and are kept: the first `write` measures it and
leaves it beside the outputs, where later runs find it. Differences that are meant are listed, each
with its reason, in the file that `--explained` names: a pattern of paths a line.

`specctl` is the module of the folder that the script stands in.
"""

from __future__ import annotations

# ruff: noqa: E501
import argparse
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SPECCTL = [sys.executable, "-m", "specctl"]
OUTPUTS, COSTS = ROOT / ".frozen" / "outputs.json", "cost_model.json"
PROMPTS = ROOT / "specctl" / "embedded" / "prompts.jsonl"
TEXT = "draft_logp,parent_entropy,depth,copy_length"
CLOCK_FAILED = 11
"""Exit code of a profile on a busy machine, whose file is written all the same: delete it then."""
TOLERANCE = 1e-6
"""Relative, of numbers: sums may be taken in another order."""
MEASURED = re.compile(
    r"(^|_)(tokens_per_s|speedup|wall_s|seconds|elapsed\w*|created\w*|date|time|version\w*|commit"
    r"|size_bytes|num_bytes|bytes|path|folder|out|machine|hardware|code\w*|git\w*|peak\w*)$"
    r"|_us$|_ms$|^us_|_us_per_\w+$"
)
MODELLED = re.compile(r"^(replay|ladder|tune|report)")
"""Steps whose times come from the cost model, and repeat."""
NOT_REPEATED = re.compile(
    r"(^|_)(wall_s|seconds|elapsed\w*|created\w*|date|version\w*|commit|size_bytes|path|folder)$"
)
DIGEST = re.compile(r"sha256:[0-9a-f]{12,64}")

REPLAYED = [
    "ar", "chain", "chain:num_draft_tokens=7", "eagle2", "eagle2:depth=9", "eagle2:depth=4:top_k=2:num_tokens=8",
    "svip:window=9", "adaedl:threshold=0.4", "confidence:window=9", "ddd", "opt_tree", "threshold", "hetero", "c2t", "c2t-text",
    "echo:gate_levels=1/3:thresholds=0.4/0.2",
]  # fmt: skip
BATCHED = ["ar", "eagle2", "eagle2+survival", "eagle2+echo_budget:max_tokens=64", "hetero", "chain"]

STEPS: list[tuple[str, str]] = [
    ("collect-fit", "collect fit.jsonl -o fit --dense {demo} --json"),
    ("collect-held", "collect held.jsonl -o held --dense {demo} --json"),
    ("collect-live", "collect held.jsonl -o live --limit 24 --max-new-tokens 32 --threads 1 --json"),
    ("collect-live-batch", "collect held.jsonl -o live4 --limit 24 --max-new-tokens 32 --batch-size 4"
     " --temperature 1 --seed 3 --threads 1 --policy chain --json"),
    ("collect-sampled", "collect held.jsonl -o sampled --dense --limit 12 --max-new-tokens 24"
     " --temperature 0.8 --top-p 0.9 --depth 5 --children 4 --threads 1 --json"),
    ("collect-small", "collect held.jsonl -o small --dense --limit 8 --max-new-tokens 24 --depth 5"
     " --children 4 --drafter embedded:small --threads 1 --json"),
    ("show-fit", "show fit --json"),
    ("show-live", "show live --json"),
    ("traces-verify", "traces verify fit --json"),
    ("fit-cart", "fit cart fit -o hetero --json"),
    ("fit-cart-live", "fit cart live -o hetero-live --json"),
    ("fit-c2t", "fit c2t fit -o c2t --json"),
    ("fit-c2t-text", f"fit c2t fit -o c2t-text --features {TEXT} --json"),
    ("fit-echo", "fit echo fit -o echo --max-tokens 96 --json"),
    ("fit-mars", "fit mars embedded --limit 40 --shape chain --thetas 0.95,0.9 --max-loss 0.3"
     " --max-new-tokens 24 --threads 1 -o mars --json"),
    ("show-hetero", "show hetero --json"),
    ("replay", "replay held {replayed} --cost-model cost_model.json --by-category -o scores --json"),
    ("replay-counts", "replay held -p eagle2 -p chain --baseline 2 --json"),
    ("replay-batch", "replay held {batched} --batch-size 4 --cost-model cost_model.json --json"),
    ("replay-open", "replay held -p eagle2 -p chain --batch-size 8 --arrival-rate 2 --tpot-limit-ms 20"
     " --cost-model cost_model.json --json"),
    ("replay-sampled", "replay sampled -p ar -p chain:num_draft_tokens=3 -p eagle2:depth=5:top_k=4:num_tokens=16 --json"),
    ("ladder", "ladder held -p eagle2 -p hetero -p svip:window=9 --cost-model cost_model.json -o ladder --json"),
    ("tune", "tune fit --cost-model cost_model.json --family svip --family hetero -o tuned --json"),
    ("tune-batch", "tune fit --cost-model cost_model.json --batch-size 4 --family eagle2+survival"
     " --grid num_tokens=8,16 --grid depth=3,5 -o tuned4 --json"),
    ("tune-grid", "tune --show-grid --json"),
    ("report", "report held --results scores/replay.json --ladder ladder/ladder.json --tune tuned/tune.json"
     " --cost-model cost_model.json -o report.html --json"),
    ("report-live", "report live -o report-live.html --json"),
    ("import-prometheus", "import metrics.txt --json"),
    ("run", "run held.jsonl --limit 12 --max-new-tokens 32 --threads 1 -o run --json --compare "
     "ar,chain,eagle2,eagle2:depth=9,svip,adaedl:threshold=0.4,confidence,ddd,opt_tree,threshold,hetero,c2t,c2t-text,./echo"),
    ("run-batch", "run held.jsonl --limit 12 --max-new-tokens 32 --threads 1 --batch-size 4 -o run4 --json --compare "
     "ar,chain,eagle2,hetero,c2t,./echo,eagle2+survival:max_tokens=64,eagle2+echo_budget:max_tokens=64"),
    ("run-sampled", "run held.jsonl --limit 12 --max-new-tokens 32 --threads 1 --batch-size 3 --temperature 1 --top-p 0.9"
     " --seed 5 -o run-sampled --json --compare ar,chain,eagle2,hetero,c2t"),
    ("run-small", "run held.jsonl --limit 6 --max-new-tokens 32 --threads 1 --drafter embedded:small -o run-small"
     " --json --compare ar,chain,eagle2"),
    ("run-mars", "run held.jsonl --limit 8 --max-new-tokens 32 --threads 1 --allow-lossy -o run-mars --json --compare "
     "ar,chain+mars:theta=0.9,./mars"),
    ("registry-init", "registry init --registry reg --json"),
    ("registry-push", "registry push hetero embedded+h --registry reg --alias prod --json"),
    ("registry-push-2", "registry push c2t embedded+h --registry reg --json"),
    ("registry-list", "registry list --registry reg --json"),
    ("registry-show", "registry show embedded+h --registry reg --json"),
    ("registry-verify", "registry verify embedded+h@prod --registry reg --json"),
    ("run-registry", "run held.jsonl --limit 3 --max-new-tokens 16 --threads 1 --policy reg/embedded+h@prod -o run-reg --json"),
    ("refuse-policy", "run --policy egle2 --limit 1"),
    ("refuse-traces", "fit cart nowhere -o x"),
    ("refuse-live", "replay live -p eagle2 --json"),
]  # fmt: skip


def inputs(work: Path) -> None:
    """Writes the prompts of the demo and a scrape of a server's metrics."""
    lines = PROMPTS.read_text("utf-8").splitlines(keepends=True)
    numbered = list(enumerate(lines, 1))
    (work / "fit.jsonl").write_text(
        "".join(line for n, line in numbered if n % 10 in (1, 4, 7)), "utf-8"
    )
    (work / "held.jsonl").write_text("".join(line for n, line in numbered if n % 5 == 3), "utf-8")
    counters = {"num_drafts": 100, "num_draft_tokens": 300, "num_accepted_tokens": 150}
    scrape = [
        f'vllm:spec_decode_{name}_total{{engine="0",model_name="m"}} {value}'
        for name, value in counters.items()
    ]
    per_position = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="{}"}} {}'
    scrape += [per_position.format(n, value) for n, value in enumerate((80, 50, 20))]
    (work / "metrics.txt").write_text("".join(f"{line}\n" for line in scrape), "utf-8")


def run_all(work: Path, only: str) -> dict[str, Any]:
    """Runs every step in `work`; what each printed and wrote, by its name."""
    found: dict[str, Any] = {}
    for name, command in STEPS:
        if not fnmatch.fnmatch(name, only):
            continue
        words = command.format(
            demo="--max-new-tokens 64 --batch-size 4 --threads 1",
            replayed=" ".join(f"-p {one}" for one in REPLAYED),
            batched=" ".join(f"-p {one}" for one in BATCHED),
        ).split()
        drop = NOT_REPEATED if MODELLED.match(name) else MEASURED
        before = dict(_written(work))
        done = subprocess.run(
            [*SPECCTL, *words],
            cwd=work, env=_environment(work), capture_output=True, text=True, check=False,
        )  # fmt: skip
        new = sorted(path for path, at in _written(work) if before.get(path) != at)
        found[name] = {
            "exit": done.returncode,
            "out": _scrubbed(_parsed(done.stdout), work, drop),
            "err": _scrubbed(done.stderr.strip().splitlines()[-1:], work, drop),
            "files": {
                str(path.relative_to(work)): _content(path, work, drop)
                for path in new
                if _is_kept(path)
            },
        }
        print(f"{done.returncode:3d}  {name}", file=sys.stderr, flush=True)
        if done.returncode and not name.startswith("refuse"):
            print(done.stderr[-600:], file=sys.stderr)
    return found


def _written(work: Path) -> Iterator[tuple[Path, int]]:
    """Files with the time of their last change."""
    return ((path, path.stat().st_mtime_ns) for path in work.rglob("*") if path.is_file())


def _environment(work: Path) -> dict[str, str]:
    homes = {
        f"XDG_{kind}_HOME": str(work / ".home" / kind) for kind in ("CONFIG", "STATE", "CACHE")
    }
    quiet = {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "200",
    }
    return {**os.environ, **homes, **quiet, "PYTHONPATH": str(ROOT)}


def _is_kept(path: Path) -> bool:
    """Whether a file's content is compared: not the trace set's own files, whose layout may change."""
    hidden = any(part.startswith(".") for part in path.parts[1:])
    parts = set(path.parts)
    return not hidden and not parts & {"fit", "held", "live", "live4", "sampled", "small", "reg"}


def _content(path: Path, work: Path, drop: re.Pattern[str]) -> Any:
    if path.suffix == ".json":
        return _scrubbed(json.loads(path.read_text("utf-8")), work, drop)
    if path.suffix == ".jsonl":
        return [
            _scrubbed(json.loads(line), work, drop) for line in path.read_text("utf-8").splitlines()
        ]
    if path.suffix == ".html":
        text = re.sub(r"<(svg|style)\b.*?</\1>", "", path.read_text("utf-8"), flags=re.DOTALL)
        text = re.sub(r"<[^>]*>|\b[0-9a-f]{12,64}\b", " ", text)
        numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
        return dict(Counter(numbers))  # how often each stands there: a new sentence moves no other
    if path.suffix == ".parquet":
        import polars as pl

        frame = pl.read_parquet(path)
        times = [name for name in frame.columns if name.endswith("_us")]
        frame = frame.drop(times)
        return {
            "rows": frame.height,
            "columns": sorted(frame.columns),
            "hash": str(frame.hash_rows(0).sort().hash(0).sum()),
        }
    return "there"


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.splitlines()


def _scrubbed(value: Any, work: Path, drop: re.Pattern[str]) -> Any:
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if not drop.search(key)}
        return {key: _scrubbed(item, work, drop) for key, item in kept.items()}
    if isinstance(value, list):
        return [_scrubbed(item, work, drop) for item in value]
    if isinstance(value, str):
        return DIGEST.sub("sha256", value.replace(str(work), "WORK"))
    return value


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested values with their paths."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flat(item, f"{path}/{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from flat(item, f"{path}/{index}")
    else:
        yield path, value


def differences(old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Paths at which two results differ, with both values; None where one has no such path."""
    before, after = dict(flat(old)), dict(flat(new))
    for path in sorted(before.keys() | after.keys()):
        was, now = before.get(path), after.get(path)
        numbers = isinstance(was, float) and isinstance(now, int | float)
        if numbers and abs(was - now) <= TOLERANCE * max(1.0, abs(was)):
            continue
        if was != now:
            yield path, was, now


def explained_by(path: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("what", choices=("write", "compare"))
    options.add_argument("--work", type=Path, required=True, help="folder to run in, emptied first")
    options.add_argument(
        "--only", default="*", help="pattern of steps; later steps need earlier ones"
    )
    options.add_argument("--keep", action="store_true", help="go on in --work as it is")
    options.add_argument(
        "--outputs",
        type=Path,
        default=OUTPUTS,
        help="written or compared with; cost_model.json stands beside it",
    )
    options.add_argument("--explained", type=Path, help="patterns of differences that are meant")
    asked = options.parse_args()
    work, costs = asked.work.resolve(), asked.outputs.resolve().parent / COSTS
    if asked.what == "compare" and not (asked.outputs.is_file() and costs.is_file()):
        options.error(f"expected {asked.outputs} and {COSTS} beside it: run `write` before")
    if not asked.keep:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        inputs(work)
        if not costs.exists():
            costs.parent.mkdir(parents=True, exist_ok=True)
            profiled = f"profile -o {costs} --batch-sizes 1,2,4,8 --quick --threads 1"
            done = subprocess.run(
                [*SPECCTL, *profiled.split()], env=_environment(work), check=False
            )
            if done.returncode not in (0, CLOCK_FAILED):
                return done.returncode
        shutil.copy(costs, work / COSTS)
    found = run_all(work, asked.only)
    if asked.what == "write":
        if asked.keep:
            found = {**json.loads(asked.outputs.read_text("utf-8")), **found}
        asked.outputs.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n", "utf-8")
        print(
            f"wrote {asked.outputs}: {sum(1 for _ in flat(found))} values of {len(found)} commands"
        )
        return 0
    old = {
        name: value
        for name, value in json.loads(asked.outputs.read_text("utf-8")).items()
        if name in found
    }
    lines = asked.explained.read_text("utf-8").splitlines() if asked.explained else []
    patterns = [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]
    known = fresh = 0
    for path, was, now in differences(old, found):
        if explained_by(path, patterns):
            known += 1
            continue
        fresh += 1
        print(f"{path}: {str(was)[:120]!r} -> {str(now)[:120]!r}")
    print(f"{sum(1 for _ in flat(old))} values; {fresh} differ, {known} more that are explained")
    return 1 if fresh else 0


if __name__ == "__main__":
    raise SystemExit(main())
