"""The command `specctl`, also as `python -m specctl`."""

import os
import signal
from typing import Any

ENDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


def main() -> None:
    """Runs the command line. Before a verb begins and after it, Ctrl-C and SIGTERM end the process
    at once, in one line: an exception within an import may be lost."""
    left = ": nothing was written"

    def end(number: int, _: Any) -> None:
        os.write(2, f"{ENDS[signal.Signals(number)]}{left}\n".encode())
        os._exit(128 + number)

    before = {one: signal.getsignal(one) for one in ENDS}
    caught = [one for one in ENDS if before[one] is not signal.SIG_IGN]
    for one in caught:
        signal.signal(one, end)

    def begin() -> None:
        if signal.SIGINT in caught:
            signal.signal(signal.SIGINT, before[signal.SIGINT])

    try:
        from specctl.cli import main as run

        run(begin)
    except KeyboardInterrupt:  # a second one
        left = ""
        end(signal.SIGINT, None)
    finally:
        left = ""
        for one in caught:
            signal.signal(one, end)


if __name__ == "__main__":
    main()
