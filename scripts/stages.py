"""Long runs in stages: each is made once, and kept when a later one fails or is interrupted."""

from __future__ import annotations

import fcntl
import json
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

from specctl.cli import main as run_specctl
from specctl.durable import replace_file
from specctl.errors import SpecctlError, UsageError, reason_of
from specctl.records import canonical_json, json_digest


@contextmanager
def told(place: Path) -> Iterator[None]:
    """Ends a run below `place` with one sentence where it fails or is interrupted."""
    try:
        yield
    except SpecctlError as error:
        raise SystemExit(f"error: {error}") from None
    except OSError as error:
        where = error.filename or place
        raise SystemExit(f"error: {where}: {reason_of(error)}; finished stages are kept") from None
    except KeyboardInterrupt:
        kept = "interrupted: finished stages are kept; the same command goes on"
        raise SystemExit(kept) from None


class Stages:
    """A folder below `place` for the stages of a run with these options.

    Raises:
        UsageError: another run goes on in it.
    """

    def __init__(self, place: Path, options: dict[str, Any]) -> None:
        self.options = options
        self.folder = place / f"run-{json_digest(canonical_json(options))[7:19]}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._seconds, self._lock = self.folder / "seconds.json", (self.folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise UsageError(f"another run goes on in {self.folder}", hint="wait for it") from error

    def close(self) -> None:
        """Lets another run go on in the folder, as the end of the process does."""
        self._lock.close()

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that each stage took."""
        kept = self._seconds
        return dict(json.loads(kept.read_text("utf-8"))) if kept.exists() else {}

    def stage(self, title: str, name: str, make: Callable[[Path], object]) -> Path:
        """Makes a file or folder unless it is there."""
        path, staged = (self.folder / one for one in (name, f"part-{name}"))
        print(f"{title}{' (kept)' * path.exists()}", flush=True)
        if not path.exists():
            shutil.rmtree(staged, ignore_errors=True)
            began = time.perf_counter()
            make(staged)
            seconds = self.seconds | {name: time.perf_counter() - began}
            replace_file(self._seconds, json.dumps(seconds, indent=1).encode())
            staged.rename(path)
        return path

    def verb(self, title: str, name: str, *words: object, passes: Collection[int] = ()) -> Path:
        """The output of a command, run in this process; its tables go to `log.txt`. It ends all
        with an exit code above 0 that is not among `passes`; with one of those, its output may be
        missing."""

        def make(path: Path) -> None:
            arguments = [*map(str, words), "-o", str(path)]
            print(f"  $ specctl {' '.join(arguments)}", flush=True)
            with (
                (self.folder / "log.txt").open("a", encoding="utf-8") as log,
                redirect_stdout(log),
                patch.object(sys, "argv", ["specctl", *arguments]),
            ):
                print(f"\n$ specctl {' '.join(arguments)}")
                try:
                    run_specctl()
                except SystemExit as ended:
                    if ended.code and ended.code not in passes:
                        raise
                    path.touch()

        return self.stage(title, name, make)
