"""The pages keep their word: commands run, examples run, tables are those of the code.

`python -m tests.test_docs` writes outputs of commands, and the columns of traces, anew.
"""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
from contextlib import chdir
from pathlib import Path

import pytest

from scripts import readme_table
from scripts.pages import with_part
from specctl import errors
from specctl.logs.trace_files import NodesFile, SegmentRecord, TraceHeader
from specctl.runtime.words import part_of, pieces
from specctl.trace import TABLES, TRACE_VERSION
from tests.cli.command import specctl
from tests.cli.helps import verbs
from tests.collect.sets import collect
from tests.pages import PAGES, ROOT, blocks, lines_to_run, pages_with
from tests.servers import S3_ENVIRONMENT, make_bucket

CLI_PAGE = ROOT / "docs" / "cli.md"
TRACE_PAGE = ROOT / "docs" / "trace-format.md"
MAX_NOT_RUN = 5
"""Blocks that may be exempt, over all pages; raise it only with a reason."""


# --------------------------------------------------------------------------- examples


ANNOUNCED = ("warning: offline: ", "warning: cost model: times of specctl's own loop, not of ")
"""Warnings that a page's command may give: a policy from the cache, a clock of no engine."""
AS_USER = re.compile(r"# as (\w+)")
"""From such a line on, commands are another user's, with a home of their own."""
SERVERS = {"operators.md"}
"""Pages whose commands need an S3 server with the bucket `team-policies`."""


@pytest.fixture
def servers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts the server that a page's commands talk to."""
    page = request.getfixturevalue("page")
    if page.name not in SERVERS:
        return
    endpoint = request.getfixturevalue("s3_endpoint")
    make_bucket(endpoint, "team-policies")
    for name, value in {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(name, value)


MADE: dict[tuple[str, ...], Path] = {}
"""What commands wrote that read nothing of their folder, by their words without its name."""


def fresh(words: list[str]) -> tuple[tuple[str, ...], Path]:
    """The key of a command that reads nothing of its folder, and what it writes; () of others."""
    reads_nothing = words[1:2] == ["profile"] or words[1:3] == ["collect", "embedded"]
    if not reads_nothing or "-o" not in words:
        return (), Path()
    at = words.index("-o") + 1
    is_folder = "://" not in words[at]
    return (*words[:at], *words[at + 1 :]) if is_folder else (), Path(words[at])


def copied(source: Path, target: Path) -> Path:
    return Path((shutil.copytree if source.is_dir() else shutil.copy)(source, target))


@pytest.mark.parametrize("page", pages_with("bash"), ids=lambda page: page.name)
@pytest.mark.usefixtures("servers", "busy_machine")
def test_commands_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, one folder and one home for a page; only `specctl` commands may stand in a block
    that is run.

    What a page collects or measures as one before it did, into a new place, is copied from there.
    """
    monkeypatch.chdir(tmp_path)
    for line in ("# as reader", *lines_to_run(page)):
        user = AS_USER.fullmatch(line)
        if user:
            for kind in ("CONFIG", "STATE", "CACHE"):
                monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / ".homes" / user[1] / kind))
        words = shlex.split(line, comments=True)
        if not words:
            continue
        assert words[0] == "specctl", f"{page.name}: cannot run {line!r}"
        key, out = fresh(words)
        if key in MADE and not out.exists():
            copied(MADE[key], out)
            continue
        is_new = not out.exists()
        outcome = specctl(*words[1:])
        warned = [one for one in outcome.err.splitlines() if not one.startswith(ANNOUNCED)]
        assert (outcome.code, warned) == (0, []), line
        if key and is_new:
            MADE[key] = copied(out, tmp_path / f".made-{len(MADE)}")


@pytest.mark.parametrize("page", pages_with("python"), ids=lambda page: page.name)
def test_python_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block alone, as a reader would paste it."""
    monkeypatch.chdir(tmp_path)
    for block in blocks("python"):
        if block.page == page and block.reason is None:
            exec(compile(block.code, str(page), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_command_reads_a_word_where_it_means_a_folder(page: Path) -> None:
    """Commands that are not run, too: what a fit wrote into `echo` is `./echo`."""
    text = page.read_text("utf-8")
    wrote = set(re.findall(r"specctl fit .*? -o ([a-z]+)\b", text))
    given = re.findall(r" (?:-p|--policy|--family) (\S+)", text)
    for one in re.findall(r" --compare (\S+)", text):
        given += one.split(",")
    hidden = {one for one in given for piece in pieces(one) if part_of(piece) and piece in wrote}
    assert not hidden


def test_few_blocks_are_exempt() -> None:
    exempt = [block for kind in ("bash", "python") for block in blocks(kind) if block.reason]
    assert len(exempt) <= MAX_NOT_RUN, [(block.page.name, block.reason) for block in exempt]


# --------------------------------------------------------------------------- references


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = page.read_text("utf-8")
        for named in re.findall(r"`make ([a-z0-9-]+)", text):
            assert named in targets, f"{page.name}: make {named}"


def test_links_lead_to_files() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#\s]+)\)", page.read_text("utf-8")):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_tables_are_whole() -> None:
    """A blank line would cut one: each has a head, and rows with as many cells."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
        for found in re.findall(r"(?:^\|.*\n)+", text, re.M):
            rows = found.splitlines()
            assert re.fullmatch(r"[|:-]+", rows[1]), f"{page.name}: {rows[0]}"
            cells = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
            assert len(cells) == 1, f"{page.name}: {rows[0]}"


def test_dependencies_are_those_of_the_project() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text("utf-8")
    stated = set(re.findall(r"^\| `([\w-]+)` \| `([^`]+)` \|", page, re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(line for extra in extras for line in extra)]
    names = [re.match(r"([\w-]+)([^;]*)", line) for line in wanted]
    assert stated == {(found[1], found[2].strip()) for found in names if found}


def test_readme_table_is_written_from_a_demo(tmp_path: Path) -> None:
    options = ("--limit", 2, "--max-new-tokens", 4, "--device", "cpu", "-o", tmp_path)
    assert specctl("run", "embedded", "--compare", "ar,chain", *options).code == 0
    page = (ROOT / "README.md").read_text("utf-8")
    block = readme_table.demo_block(tmp_path)
    written = with_part(page, *readme_table.FIGURES, block)
    assert written.replace(block, "") == with_part(page, *readme_table.FIGURES, "")
    assert "| `chain` |" in block
    for named in ("n = 2 prompts", "fixture", "float32", "greedy", "equal plain decoding's"):
        assert named in " ".join(block.split())


# --------------------------------------------------------------------------- generated tables


def column_tables() -> str:
    lines = []
    for table, columns in TABLES.items():
        lines += [f"### `{table}`", "", "| column | type | unit | meaning |", "|---|---|---|---|"]
        for column in columns:
            kind = column.dtype + ("?" if column.nullable else "")
            lines.append(f"| `{column.name}` | {kind} | {column.unit} | {column.meaning} |")
        lines.append("")
    return "\n".join(lines)


CONSOLE = re.compile(r"^```console\n\$ (?P<command>(?:.*\\\n)*.*)\n(?P<output>(?s:.*?))^```$", re.M)
"""A command, which may go on behind a backslash, and its whole output."""
LOGS = ROOT / "examples" / "logs"
"""Where commands of these blocks run."""


def with_output(block: re.Match[str]) -> str:
    """The block with the output of its command anew."""
    [program, *words] = shlex.split(block["command"].replace("\\\n", " "))
    assert program == "specctl"
    with chdir(LOGS):
        outcome = specctl(*words)
    assert (outcome.code, outcome.err) == (0, ""), block["command"]
    return f"```console\n$ {block['command']}\n{outcome.out}```"


def rewritten(path: Path) -> str:
    """A page with its generated tables and outputs replaced."""
    text = CONSOLE.sub(with_output, path.read_text("utf-8"))
    if path == TRACE_PAGE:
        begin, end = "<!-- begin columns: python -m tests.test_docs -->\n", "<!-- end columns -->"
        head, rest = text.split(begin)
        text = head + begin + column_tables() + end + rest.split(end)[1]
    return text


GENERATED = [
    page for page in PAGES if page == TRACE_PAGE or CONSOLE.search(page.read_text("utf-8"))
]


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.name)
def test_tables_and_outputs_are_those_of_the_code(path: Path) -> None:
    assert path.read_text("utf-8") == rewritten(path), "run `python -m tests.test_docs`"


def test_version_and_fields_of_traces_are_those_of_the_code() -> None:
    page = TRACE_PAGE.read_text()
    assert f"version {TRACE_VERSION}\n" in page
    for record in (TraceHeader, SegmentRecord, NodesFile):
        for field in record.model_fields:
            assert f"`{field}`" in page, f"{record.__name__}.{field} is not on the page"


def test_lines_for_other_tools_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collect(tmp_path / "traces", "ab", "c")
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"^```py\n(.*?)^```$", TRACE_PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(code, str(TRACE_PAGE), "exec"), {})


def test_pages_name_one_price_of_a_stop_in_vllm() -> None:
    """That of the table of docs/vllm.md: hooks over a plain step, at the cheapest and dearest."""
    page = (CLI_PAGE.parent / "vllm.md").read_text("utf-8")
    hooks = re.findall(
        r"^\| (?:a confidence stop|AdaSD.*?) \| +\| (\S+) \| +\| (\S+) \|", page, re.M
    )
    told = re.search(r"A plain step takes (\S+) and (\S+) ms", page)
    assert told
    assert len(hooks) == 2
    shares = [
        float(us.replace(",", "")) / float(ms) / 10
        for row in hooks
        for us, ms in zip(row, told.groups(), strict=True)
    ]
    price = f"{min(shares):.0f} to {max(shares):.0f} %"
    regime = "of a step of {:.0f} to {:.0f} ms on a CPU".format(*map(float, told.groups()))
    for name in ("README.md", "docs/which-policy.md"):
        text = " ".join((CLI_PAGE.parents[1] / name).read_text("utf-8").split())
        assert f"{price} {regime}" in re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text), name


def test_every_verb_with_json_has_its_value_stated() -> None:
    table = CLI_PAGE.read_text("utf-8").partition("## Output")[2].partition("\n\n`run -o")[0]
    stated = set(re.findall(r"`([a-z0-9 .-]+)`", "".join(re.findall(r"^\|([^|]+)\|", table, re.M))))
    for verb, command in verbs():
        if any("--json" in getattr(param, "opts", ()) for param in command.params):
            group, _, last = verb.rpartition(" ")
            assert {verb, last, f"{group} ..."} & stated, verb


def error_types() -> list[type[errors.SpecctlError]]:
    found = [getattr(errors, name) for name in dir(errors)]
    return [
        kind for kind in found if isinstance(kind, type) and issubclass(kind, errors.SpecctlError)
    ]


@pytest.mark.parametrize("kind", error_types(), ids=lambda kind: kind.__name__)
def test_exit_codes_are_those_of_the_code(kind: type[errors.SpecctlError]) -> None:
    if kind in (errors.SpecctlError, errors.CodedError):
        return  # bases, never raised themselves
    table = CLI_PAGE.read_text("utf-8").partition("## Exit codes")[2]
    row = next(line for line in table.splitlines() if f"`{kind.__name__}`" in line)
    assert row.startswith(f"| {kind.exit_code} |")


if __name__ == "__main__":
    for changed in GENERATED:
        changed.write_text(rewritten(changed), "utf-8")
