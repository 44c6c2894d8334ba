"""Become a service that cannot outlive its launcher: `python child.py LAUNCHER_PID COMMAND...`.

Run as a script before the service's own program, because a parent-death signal must be set inside the
child and forking with a Python hook is not safe once the launcher has threads. It survives `exec`.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def guarded(command: tuple[str, ...]) -> list[str]:
    """The command, started through this script. -I and -S keep this first stage at a few milliseconds."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main() -> None:
    launcher_pid, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != launcher_pid:  # it died before the signal was set, so none will come
        sys.exit("launcher is gone")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
