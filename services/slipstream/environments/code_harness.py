"""Runs inside the sandbox: a program against inputs, each in a process of its own. Standard library only.

Reads {"source", "tests", "cpu_s", "wall_s", "memory_bytes", "output_bytes"} as JSON, prints one JSON line a test. It
knows inputs only: what is expected never enters the sandbox, so there is nothing in here whose change would pay.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

GROUPED = (list, tuple, set, dict)
MAX_DEPTH = 50


def encoded(value: Any, depth: int = 0) -> Any:
    """A value of Python's own types as JSON that tells them apart. Raises `TypeError` for others: they could say
    of themselves what they like."""
    kind = type(value)
    if depth > MAX_DEPTH:
        raise TypeError("nested too deeply")
    if value is None or kind in (bool, int, float, str):
        return value
    if kind not in GROUPED:
        raise TypeError(f"a test cannot compare a {kind.__name__}")
    if kind is dict:
        return {"dict": [[encoded(key, depth + 1), encoded(part, depth + 1)] for key, part in value.items()]}
    parts = [encoded(part, depth + 1) for part in value]
    return {kind.__name__: sorted(parts, key=json.dumps) if kind is set else parts}


def child(request: dict[str, Any], test: dict[str, Any], write_fd: int) -> None:
    """Run the program; standard output, or the value of a call, goes to `write_fd`."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (request["memory_bytes"],) * 2)
    # Processor time, not the clock: a busy machine changes no verdict.
    signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
    called = test.get("call")
    stdin, nowhere = os.memfd_create("stdin"), os.open(os.devnull, os.O_WRONLY)
    os.write(stdin, test.get("stdin", "").encode())
    os.lseek(stdin, 0, os.SEEK_SET)
    for source, target in ((stdin, 0), (nowhere if called else write_fd, 1), (nowhere, 2)):
        os.dup2(source, target)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 the program's, for all of its life
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    names: dict[str, Any] = {"__name__": "answer" if called else "__main__"}
    try:
        exec(compile(request["source"], "answer.py", "exec"), names)
    except SystemExit:
        if called:
            raise
    if called:
        value = eval(compile(called, "test", "eval"), names)
        os.write(write_fd, json.dumps(encoded(value)).encode()[: request["output_bytes"]])
    sys.stdout.flush()


def collected(read_fd: int, until_s: float, limit_bytes: int) -> bytes:
    """What comes until the pipe closes, the time is over or it is too much."""
    found = b""
    while len(found) <= limit_bytes:
        ready, _, _ = select.select([read_fd], [], [], max(0.0, until_s - time.monotonic()))
        part = os.read(read_fd, 65536) if ready else b""
        if not part:
            break
        found += part
    return found[:limit_bytes]


def run(request: dict[str, Any], test: dict[str, Any]) -> dict[str, Any]:
    """How one test went."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()
            os.closerange(3, write_fd)
            child(request, test, write_fd)
            code = 0
        finally:
            os._exit(code)
    os.close(write_fd)
    output = collected(read_fd, time.monotonic() + request["wall_s"], request["output_bytes"])
    os.close(read_fd)
    killed = False
    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        time.sleep(0.01)  # it may have closed its output just before its end
        killed = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
    try:
        os.killpg(pid, signal.SIGKILL)  # it and what it started; it is not reaped, so the number is still its own
    except OSError:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    outcome = "killed" if killed or code < 0 else "failed" if code else "ended"
    return {"outcome": outcome, "output": output.decode(errors="replace")}


def main() -> None:
    request = json.load(sys.stdin)
    for number, test in enumerate(request["tests"]):
        verdict = run(request, test)
        print(json.dumps({"test": number, **verdict}), flush=True)
        if verdict["outcome"] == "killed":  # the others would take as long
            break


if __name__ == "__main__":
    main()
