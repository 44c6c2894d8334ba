"""Run a program so that whatever it started ends with it: `python reaper.py PARENT_PID COMMAND...`.

A program that puts another into a session of its own, and ends, leaves it to whoever adopts orphans. That is this
process (`PR_SET_CHILD_SUBREAPER`), which ends them all when the program has ended, or when its own parent has, however
that came about. It is in a session of its own, so that who kills the parent's process group does not kill it.

It says of itself what the program's end was: the same exit code, or the same signal. SIGTERM goes on to the program;
`END_NOW` ends all of it at once, as SIGKILL to this process would not. Run as a script: no import takes its time.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

END_NOW = signal.SIGUSR1
_END_TIMEOUT_S = 5.0
"""Of processes that were killed: one that hangs in the kernel is not waited for."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_DESCRIPTORS = 4096
"""Those above are none that a service hands on."""
_HEARD = {signal.SIGTERM, END_NOW, signal.SIGCHLD}


def guarded(command: list[str]) -> list[str]:
    """The command, started through this script by this process; start it in a new session."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the signal was set, so none will come
        sys.exit("the parent is gone")
    reaper, program = os.getpid(), os.fork()
    if program == 0:
        _become(command, reaper)
    os.closerange(3, _DESCRIPTORS)  # they are the program's
    status = _until_it_ends(program, parent)
    _end_all()
    _end_as(status)


def _become(command: list[str], reaper: int) -> None:
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == reaper:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
            os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def _until_it_ends(program: int, parent: int) -> int:
    """Wait for the program, reap what it left, and pass on what it is told; returns its wait status."""
    while True:
        heard = signal.sigwait(_HEARD)
        if heard == END_NOW or os.getppid() != parent:
            os.kill(program, signal.SIGKILL)
        elif heard == signal.SIGTERM:
            os.kill(program, signal.SIGTERM)
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)  # the program itself is among them until it is returned
            if pid == program:
                return status
            if pid == 0:
                break


def _end_all() -> None:
    """Kill what is left. Whose parent dies becomes a child of this process, hence again until there is none."""
    deadline_s = time.monotonic() + _END_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in _children():
            try:
                os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
            except PermissionError:  # it took another user's rights: the others end all the same
                continue
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)


def _children() -> list[int]:
    """Processes whose parent this is."""
    found: list[int] = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                after_name = file.read().rpartition(b")")[2].split()
        except OSError:  # it ended
            continue
        if int(after_name[1]) == os.getpid():
            found.append(int(name))
    return found


def _end_as(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        sys.exit(code)
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
    os.kill(os.getpid(), -code)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    main()
