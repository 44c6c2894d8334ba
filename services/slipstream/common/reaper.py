"""Run a program so that whatever it started ends with it: `python reaper.py PARENT_PID COMMAND...`.

A program that puts another into a session of its own, and ends, leaves it to whoever adopts orphans. That is this
process (`PR_SET_CHILD_SUBREAPER`), which ends them all when the program has ended, or when its own parent has, however
that came about. It is in a session of its own, so that who kills the parent's process group does not kill it.

It is two, a keeper and its child, the reaper, whose child is the program; each is in a process group of its own, and no
signal ends either but SIGKILL and what is meant for it. The program knows the reaper for its parent, and may kill or
stop it: its user is the same. The keeper then adopts what the reaper had, and ends it, or lets the reaper go on. Who
kills the keeper as well is rid of both.

It says of itself what the program's end was: the same exit code, or the same signal. SIGTERM goes on to the program;
`END_NOW` ends all of it at once, as SIGKILL to this process would not. SIGCONT after either has it heard also where
this process was stopped. Run as a script: no import takes its time.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

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
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()) - _HEARD

    def reap(keeper: int) -> NoReturn:
        _guard(keeper, lambda reaper: _become(command, reaper, mask))

    _guard(parent, reap, os.WUNTRACED)


def _guard(parent: int, become: Callable[[int], NoReturn], stops: int = 0) -> NoReturn:
    """Have a child, told this process's number, become what it is to be, and end as it does, with all that it left.
    `stops`: WUNTRACED where the child may not be stopped."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the signal was set, so none will come
        sys.exit("the parent is gone")
    this, child = os.getpid(), os.fork()
    if child == 0:
        os.setpgid(0, 0)  # what the program does to its process group it does to itself
        become(this)
    os.closerange(3, _DESCRIPTORS)  # they are the program's
    status = _until_it_ends(child, parent, stops)
    _end_all()
    _end_as(status)


def _become(command: list[str], reaper: int, mask: set[int]) -> NoReturn:
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == reaper:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def _until_it_ends(child: int, parent: int, stops: int) -> int:
    """Wait for the child, reap what it left, and pass on what it is told; returns its wait status."""
    while True:
        heard = signal.sigwait(_HEARD)
        if heard == END_NOW or os.getppid() != parent:
            os.kill(child, signal.SIGKILL)
        elif heard == signal.SIGTERM:
            os.kill(child, signal.SIGTERM)
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG | stops)  # the child is among them until it is returned
            if pid == 0:
                break
            if pid == child and not os.WIFSTOPPED(status):
                return status
            if pid == child:
                os.kill(child, signal.SIGCONT)


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


def _end_as(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        sys.exit(code)
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
    os.kill(os.getpid(), -code)
    os._exit(1)  # not come to: the signal has ended it


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    main()
