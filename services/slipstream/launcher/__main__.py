"""`python -m slipstream.launcher` is the `slipstream` command.

Imports nothing of ours at first: whoever stops it while it starts is told so in one line, too, whatever it was at.
"""

import contextlib
import signal
import sys
from types import FrameType
from typing import NoReturn


def main() -> None:
    """Run the command. Sessions, and commands that are followed, have handlers of their own while they last."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` has it
            signal.signal(number, _stopped)
    try:
        from slipstream.common.open_files import raise_limit
        from slipstream.launcher.cli import main as command

        raise_limit()
        command()
    except KeyboardInterrupt:
        _stopped(signal.SIGINT)


def _stopped(number: int, _frame: FrameType | None = None) -> NoReturn:
    with contextlib.suppress(OSError):  # nobody reads it
        print(f"stopped by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
