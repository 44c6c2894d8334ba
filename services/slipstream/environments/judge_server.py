"""Judging that may never come back, in processes that can be killed: a server that forks for each group of answers.

    python -m slipstream.environments.maths_judge     reads one JSON object a line, writes one a line

The server has what judging needs imported. For each request it forks a process, which judges one answer after the
other; where an answer uses up its processor time or memory, the kernel kills the process, the answer has failed, and
another process goes on with the next. So a hostile answer costs a bounded time and changes no verdict beside it.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from slipstream.common.runtime import die_with_parent

Judge = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Judges one answer. It may raise, hang or take all memory."""

MAX_DETAIL_CHARACTERS = 200


def serve(judge: Judge) -> None:
    """Answer requests `{"id", "cpu_s", "memory_bytes", "answers": [...]}` until standard input closes."""
    die_with_parent()
    replies = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no reply
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes of requests
    with tempfile.TemporaryFile() as lock:
        _write(replies, lock.fileno(), {"ready": True})
        for line in sys.stdin:
            server = os.getpid()
            if os.fork() == 0:
                try:
                    die_with_parent(server)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    request = json.loads(line)
                    verdicts = judge_all(judge, request)
                    _write(replies, lock.fileno(), {"id": request["id"], "verdicts": verdicts})
                finally:
                    os._exit(0)


def judge_all(judge: Judge, request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One verdict an answer, whatever judging it does."""
    verdicts: list[dict[str, Any]] = []
    answers = request["answers"]
    while len(verdicts) < len(answers):
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(read_fd)
                _judge_from(len(verdicts), judge, request, write_fd)
            finally:
                os._exit(0)
        os.close(write_fd)
        with os.fdopen(read_fd, "rb") as lines:
            verdicts += [json.loads(line) for line in lines]
        _, status = os.waitpid(pid, 0)
        if len(verdicts) < len(answers):
            spent = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
            verdicts.append({"error": "out of processor time" if spent else "judging it ended the process"})
    return verdicts


def _judge_from(first: int, judge: Judge, request: Mapping[str, Any], write_fd: int) -> None:
    """Judge from `first` on; a verdict goes out before the next answer begins."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (request["memory_bytes"],) * 2)
    for answer in request["answers"][first:]:
        # Processor time, not the clock: a busy machine changes no verdict. The signal's own action ends the process,
        # also within a library that does not come back to the interpreter.
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        try:
            verdict = judge(answer)
        except Exception as error:  # of libraries, about text that nobody has read
            verdict = {"error": f"{type(error).__name__}: {error}"[:MAX_DETAIL_CHARACTERS]}
        os.write(write_fd, json.dumps(verdict).encode() + b"\n")


def _write(fd: int, lock_fd: int, reply: dict[str, Any]) -> None:
    """One line, whole: several processes write to the same pipe."""
    data = json.dumps(reply).encode() + b"\n"
    fcntl.lockf(lock_fd, fcntl.LOCK_EX)
    while data:
        data = data[os.write(fd, data) :]
    fcntl.lockf(lock_fd, fcntl.LOCK_UN)
