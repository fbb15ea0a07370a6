"""Runs an example as a person would, and shows what it printed.

Each `specctl` that it types is answered by this process, which has torch loaded: an example of ten
commands would load it ten times. `tests/cli` runs commands as processes of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from multiprocessing.connection import Client, Listener
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from unittest.mock import patch

from tests.cli.command import specctl

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMAND = f"""#!{sys.executable} -S
import os, sys
from multiprocessing.connection import Client
with Client(os.environ["SPECCTL_ANSWERS"]) as caller:
    caller.send((sys.argv[1:], os.getcwd(), dict(os.environ)))
    code, out, err = caller.recv()
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""


@contextmanager
def _listening() -> Iterator[tuple[Listener, dict[str, str]]]:
    """Where a `specctl` on the path of an environment calls."""
    with TemporaryDirectory() as folder, Listener(f"{folder}/calls") as listener:
        command = Path(folder, "specctl")
        command.write_text(COMMAND)
        command.chmod(0o755)
        calls = {"SPECCTL_ANSWERS": str(listener.address), "PYTHONPATH": str(EXAMPLES.parent)}
        yield listener, {"PATH": f"{folder}:{os.environ['PATH']}", **calls}


def run_example(name: str, folder: Path, *words: str, **environment: str) -> tuple[int, str]:
    """The exit code of an example, and its two streams as one text.

    Args:
        folder: where it starts, and where its files go.
        environment: variables that make it small.
    """
    interpreter = sys.executable if name.endswith(".py") else "bash"
    with _listening() as (listener, theirs), (folder / "printed").open("w+") as printed:
        started = subprocess.Popen(
            [interpreter, EXAMPLES / name, *words],
            cwd=folder,
            env={**os.environ, "OUT": str(folder / "out"), **environment, **theirs},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
        )

        def say_that_it_ended() -> None:
            started.wait()
            with Client(listener.address) as caller:
                caller.send(None)

        (folder / "out").mkdir(exist_ok=True)
        waiting = Thread(target=say_that_it_ended)
        waiting.start()
        while True:
            with listener.accept() as caller:
                asked = caller.recv()
                if asked is None:
                    break
                arguments, place, variables = asked
                with chdir(place), patch.dict(os.environ, variables, clear=True):
                    done = specctl(*arguments)
                caller.send((done.code, done.out, done.err))
        waiting.join()
        printed.seek(0)
        return started.returncode, printed.read()
