"""The test's side of the pool: spawns the ranks once, and gives them jobs with a deadline. Imports no torch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

JOB_TIMEOUT_S = 60.0
COLLECTIVE_TIMEOUT_S = 30.0
START_TIMEOUT_S = 90.0


class RankFailed(Exception):
    """A rank raised, died, or did not answer in time. Says which, with what each of them said."""


class Pool:
    """Processes that take jobs together, on CPUs or each on a card of its own."""

    def __init__(self, size: int, directory: Path, device: str = "cpu") -> None:
        self.size = size
        self._device = device
        self._directory = directory
        self._jobs = 0
        pairs = [socket.socketpair() for _ in range(size)]
        theirs = [pair[1] for pair in pairs]
        tests = Path(__file__).parents[1]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(
                [str(tests), str(tests.parent / "services"), str(tests.parent), os.environ.get("PYTHONPATH", "")]
            ),
        }
        # Forks of one that imported torch share its memory; but no fork of one that has looked for cards can use them.
        groups = [theirs] if device == "cpu" else [[line] for line in theirs]
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "parallel.ranks", *(str(line.fileno()) for line in group)],
                pass_fds=[line.fileno() for line in group],
                env=environment,
                start_new_session=True,
            )
            for group in groups
        ]
        for line in theirs:
            line.close()
        self._lines = [pair[0] for pair in pairs]
        self._files = [line.makefile("rw") for line in self._lines]
        try:
            self.run("ready", size, timeout_s=START_TIMEOUT_S)
        except RankFailed:
            self.close()
            raise

    def run(self, name: str, ranks: int, timeout_s: float = JOB_TIMEOUT_S, **arguments: Any) -> list[Any]:
        """Answers of the first `ranks` processes to a job; raises `RankFailed`, after which the pool is of no use."""
        self.start(name, ranks, **arguments)
        answers = [self.answer(rank, timeout_s) for rank in range(ranks)]
        errors = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
        if errors:
            raise RankFailed("\n".join(errors))
        return [answer["answer"] for answer in answers]

    def start(
        self, name: str, ranks: int, collective_timeout_s: float = COLLECTIVE_TIMEOUT_S, **arguments: Any
    ) -> None:
        """Give the first `ranks` processes a job, whose answers come when they come."""
        self._jobs += 1
        store = str(self._directory / f"store-{self._jobs}")
        for rank, file in enumerate(self._files[:ranks]):
            job = {"name": name, "rank": rank, "ranks": ranks, "store": store, "arguments": arguments}
            job |= {"collective_timeout_s": collective_timeout_s, "device": self._device}
            file.write(json.dumps(job) + "\n")
            file.flush()

    def answer(self, rank: int, timeout_s: float) -> Mapping[str, Any]:
        """What one rank says, as `answer` or as `error`."""
        self._lines[rank].settimeout(timeout_s)
        try:
            line = self._files[rank].readline()
        except TimeoutError:
            return {"error": f"no answer within {timeout_s} s"}
        return json.loads(line) if line else {"error": "died"}

    def close(self, grace_s: float = 5.0) -> None:
        """End the ranks: by closing their lines, or after `grace_s` by force."""
        for file, line in zip(self._files, self._lines, strict=True):
            file.close()
            line.close()
        deadline_s = time.monotonic() + grace_s
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
