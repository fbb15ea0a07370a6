"""What a hurried person types wrong in the first half hour: one line says the cause and the step.

The cases are of the kinds that someone met who tried specctl for half an hour. `test_refusals` has
the others.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import INPUT, MODEL, REGISTRY, USAGE, copy_model, refuses, write_lines

LIGHT: list[tuple[int, str, str]] = [
    # Words that do not exist.
    (USAGE, "replya DENSE", "No such command 'replya'. Did you mean 'replay'?"),
    (USAGE, "fit crat DENSE", "No such command 'crat'. Did you mean 'cart'?"),
    (USAGE, "run p.txt --limt 3", "No such option: --limt; did you mean --limit?"),
    (USAGE, "run p.txt --policy eagle3", "policy 'eagle3' is no word of docs"),
    (USAGE, "export tune.json --to vllm", "'tune.json' is no file or folder"),
    (USAGE, "run p.txt --compare ar,chian", "did you mean chain?"),
    (USAGE, "run p.txt --policy chain+mras:theta=0.9", "; did you mean mars?"),
    (USAGE, "run p.txt --policy eagle2:dept=4", "did you mean depth?"),
    (USAGE, "replay DENSE -p eagle2:dept=4", "which has depth, top_k, num_tokens; did you"),
    (USAGE, "run p.txt --policy ./nofolder", "no artifact's folder and no REGISTRY/NAME@ALIAS"),
    (USAGE, "run p.txt --on-long skp", "must be skip or error, not skp; did you mean skip?"),
    (USAGE, "run p.txt --format spcbench", "--format 'spcbench' is none of auto, text"),
    (USAGE, "run p.txt --dtype bf16", "--dtype bf16 is none of auto"),
    (USAGE, "run p.txt --device gpu", "--device gpu is none of auto, cpu, cuda"),
    (USAGE, "collect p.txt -o OUT --tokens drp", "not drp; did you mean drop?"),
    (USAGE, "replay DENSE -p ar --engine vlm", "not vlm; did you mean vllm?"),
    (USAGE, "run p.txt --decisions trch", "'trch' is none of auto, fused, torch, onnx"),
    (USAGE, "tune DENSE --for vlm --cost-model c.json", "not vlm; did you mean vllm?"),
    (USAGE, "tune DENSE --objective latncy --cost-model c.json", "did you mean laten"),
    (USAGE, "tune DENSE --packing raged --cost-model c.json", "not raged; did you mean ragged?"),
    (USAGE, "profile --rounds graph", "--rounds must be auto, graphs or ordinary, not graph;"),
    (USAGE, "import vllm.log -o OUT --format vllm", "did you mean vllm-log?"),
    (USAGE, "fit cart DENSE -o OUT --algorithm prinetd", "not prinetd; did you mean printed?"),
    (USAGE, "fit auto DENSE -o OUT --skip ecoh --cost-model c.json", "did you mean echo?"),
    (USAGE, "export chain --to vlm", "--to 'vlm' is none of vllm, "),
    (USAGE, "export chain --to vllm --method eagel", "did you mean eagle?"),
    (USAGE, "export chain --to vllm --trace t --tokens kep", "not kep; did you mean keep?"),
    # Values out of range, or of another kind.
    (USAGE, "run p.txt --policy eagle2:depth=four", "depth is 'four', but must be a whole number"),
    (USAGE, "run p.txt --policy eagle2:depth=0", "depth is 0, but must be at least 1"),
    (USAGE, "run p.txt --policy eagle2:depth", "'depth' is no setting; write field=value"),
    (USAGE, "run p.txt --temperature -1", "temperature is -1.0, but must be"),
    (USAGE, "run p.txt --temperature hot", "'--temperature': expected a number; see specctl run"),
    (USAGE, "run p.txt --top-p 2", "top_p is 2.0, but must be a number above 0"),
    (USAGE, "run p.txt --top-k -2", "top_k is -2, but must be at least 0"),
    (USAGE, "run p.txt --max-new-tokens 0", "--max-new-tokens must be at least 1, not 0"),
    (USAGE, "run p.txt --limit 0", "--limit must be at least 1, not 0"),
    (USAGE, "collect p.txt -o OUT --dense --children 0", "--children must be at least 1"),
    # Options that do not go together, or are missing.
    (USAGE, "collect p.txt -o OUT --dense --top-k 4", "for the children of a drafted node"),
    (USAGE, "collect p.txt", "Missing option '--out' / '-o'; see specctl collect --help"),
    (USAGE, "registry list", "'SPECCTL_REGISTRY'); see specctl registry list --help"),
    (REGISTRY, "registry push ./x n --alias v1 --registry r", "'v1' is the number of a version"),
    # Files that are not there, or are something else.
    (INPUT, "run nofile.txt", "nofile.txt is no such file; name a prompt file, or"),
    (INPUT, "run p.csv", "line 1: 'a,b' is no JSON from column 1 on; for plain text"),
    (INPUT, "run empty.txt", "empty.txt has no prompt"),
    (INPUT, "replay nofolder -p ar", "nofolder is no trace set: no such folder;"),
    (INPUT, "traces verify nofolder", "a folder that `specctl collect` wrote"),
    (MODEL, "run p.txt --target ./nonexist", "no folder here, no hub id (owner/name)"),
]
"""Refused before torch is imported, hence at once."""
HEAVY: list[tuple[int, str, str]] = [
    (MODEL, "run p.txt --target embeded", "is set; did you mean embedded?"),
    (MODEL, "run p.txt --target untold", "no tokenizer, such as tokenizer.json, among"),
    (MODEL, "run p.txt --target strange", "is of model_type 'strange'"),
    (MODEL, "run p.txt --target broken", "a file is damaged or does not fit the others"),
    (MODEL, "run p.txt --target bert", "generates no text (...ForCausalLM): BertForMaskedLM"),
    (INPUT, "replay DENSE -p ar --cost-model nope.json", "model nope.json cannot be read: no such"),
    (INPUT, "report -o r.html --results nope.json", "nope.json cannot be read: no such file"),
    (USAGE, "fit c2t NODES -o OUT --features draft_lgp", "did you mean draft_logp?"),
    (USAGE, "fit c2t NODES -o OUT --predicts jiont", "not jiont; did you mean joint?"),
    (USAGE, "fit cart DENSE -o OUT --base eagle2:depth=9", "larger than the traces, which hold"),
    (USAGE, "fit echo DENSE -o OUT --depth 9", "--depth 9 is more than the traces hold, 6"),
]
FOREIGN = ("Traceback", "Error:", "Input should", "Extra inputs", "Expecting", "Validation")
"""Words of libraries, which no message has."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the commands name, and a user without settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPECCTL_REGISTRY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    write_lines(tmp_path / "p.txt", "How much is 2 + 2?")
    write_lines(tmp_path / "p.csv", "a,b", "1,2")
    (tmp_path / "empty.txt").touch()
    for name in ("strange", "broken"):
        copy_model("target", tmp_path / name)
    config = tmp_path / "strange" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "strange"}))
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"not tensors")
    shutil.copytree(tmp_path / "broken", tmp_path / "untold")
    for path in (tmp_path / "untold").glob("tokenizer*"):
        path.unlink()
    (tmp_path / "bert").mkdir()
    bert = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    (tmp_path / "bert" / "config.json").write_text(json.dumps(bert))
    (tmp_path / "bert" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return tmp_path


@pytest.mark.parametrize(("code", "command", "says"), LIGHT + HEAVY, ids=lambda v: str(v)[:40])
@pytest.mark.usefixtures("place")
def test_one_line_names_cause_and_next_step(
    code: int, command: str, says: str, dense: Path, nodes: Path
) -> None:
    known = {"DENSE": dense, "NODES": nodes, "OUT": "out"}
    line = refuses(code, *(known.get(word, word) for word in shlex.split(command)))
    assert says in line
    assert not any(word in line.removeprefix("error:") for word in FOREIGN), line
    assert len(line) < 330, "a person reads it"


def test_refusals_that_need_no_model_import_none(place: Path) -> None:
    """All in one process; torch alone takes over a second, transformers several."""
    commands = [shlex.split(command) for _, command, _ in LIGHT if "DENSE" not in command]
    script = (
        "import sys; from specctl.cli import main\n"
        f"for words in {commands!r}:\n"
        "    sys.argv = ['specctl', *words]\n"
        "    try: main()\n"
        "    except SystemExit as ended: assert ended.code, words\n"
        "    heavy = {'torch', 'transformers', 'polars'} & {*sys.modules}\n"
        "    assert not heavy, (words, heavy)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=place, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("\n") == len(commands)
