"""The warden: a line of shell that outlives the executor by a moment and ends what bubblewrap could leave then.

bubblewrap has one gap: when its outer process is killed after it asked for a parent-death signal and before it told the
inner one to go on, the inner one waits for ever, doing nothing. It is still in the process group of the outer one;
the warden is told these groups, and when the pipe to it closes, however the executor ended, it kills them.
"""

from __future__ import annotations

import os
from contextlib import suppress

SETTLE_S = 0.2

SCRIPT = f"""
trap '' TERM INT HUP
while read -r change group; do
    case $change in
        +) groups="$groups $group" ;;
        -) rest=; for other in $groups; do [ "$other" = "$group" ] || rest="$rest $other"; done; groups=$rest ;;
    esac
done
[ -z "$groups" ] && exit
sleep {SETTLE_S}
for group in $groups; do kill -KILL "-$group"; done
"""


class Warden:
    """One process for all places; `started` and `ended` may be called from any thread."""

    def __init__(self) -> None:
        reader, self._pipe = os.pipe2(os.O_CLOEXEC)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        actions = [(os.POSIX_SPAWN_DUP2, reader, 0), (os.POSIX_SPAWN_DUP2, null, 1), (os.POSIX_SPAWN_DUP2, null, 2)]
        arguments = ["sh", "-c", SCRIPT]
        environment = {"PATH": "/usr/bin:/bin"}
        # A session of its own: who kills the executor's group does not kill it.
        self._pid = os.posix_spawn("/bin/sh", arguments, environment, file_actions=actions, setsid=True)
        os.close(reader)
        os.close(null)

    def started(self, group: int) -> None:
        self._tell(f"+ {group}\n")

    def ended(self, group: int) -> None:
        self._tell(f"- {group}\n")

    def close(self) -> None:
        """When all programs have ended."""
        os.close(self._pipe)
        os.waitpid(self._pid, 0)

    def _tell(self, line: str) -> None:
        with suppress(BrokenPipeError):  # somebody killed it: programs run on without
            os.write(self._pipe, line.encode())
