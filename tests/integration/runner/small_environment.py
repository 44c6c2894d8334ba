"""A third party's environment: count to the task's number. `options.behaviour` says how it misbehaves."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import psutil

from slipstream.common.sandbox_client import SandboxLimits
from slipstream.environments.base import Completion, Score, Split, Task
from slipstream.environments.config import ImportedConfig
from slipstream.environments.tools import Tools


class Counting:
    """Rewards an answer that equals the task's index."""

    def __init__(self, config: ImportedConfig, seed: int) -> None:
        self.name = config.name
        self._behaviour = config.options.get("behaviour", "")
        self._file = Path(config.options.get("file", ""))

    def task(self, split: Split, index: int) -> Task:
        return Task(split, index)

    def prompt(self, task: Task) -> str:
        if self._behaviour == "raises at the prompt":
            raise LookupError("no such task")
        return f"count to {task.index}\n"

    async def score(self, task: Task, completions: Sequence[Completion], tools: Tools) -> list[Score]:
        print("environments may print")
        match self._behaviour:
            case "raises":
                raise ZeroDivisionError("a bug of its own")
            case "exits":
                sys.exit(3)
            case "cancels":
                raise asyncio.CancelledError
            case "dies":
                os._exit(3)
            case "forks and dies":
                if os.fork() == 0:
                    time.sleep(20)  # noqa: ASYNC251 holds the socket
                os._exit(3)
            case "leaves a process":
                self._leave()
            case "leaves a process and dies":
                self._leave()
                os._exit(3)
            case "leaves a process and hangs":
                self._leave()
                time.sleep(3600)  # noqa: ASYNC251 blocking is the point
            case "leaves a process and kills its parent":
                self._leave()
                os.kill(os.getppid(), signal.SIGKILL)
                await asyncio.sleep(3600)
            case "leaves a process and stops those that guard it":
                self._leave()
                reaper = psutil.Process().parent()
                assert reaper is not None
                for guard in (reaper.parent(), reaper):
                    assert guard is not None
                    guard.suspend()
                    while guard.status() != psutil.STATUS_STOPPED:
                        time.sleep(0.001)  # noqa: ASYNC251 what it answers comes after
                os._exit(3)
            case "never answers":
                await asyncio.sleep(3600)
            case "leaks":
                held: list[bytes] = []
                while len(held) < 30:  # less than what it is refused at once
                    held.append(os.urandom(16) * 2**20)
                    await asyncio.sleep(0.02)
                await asyncio.sleep(3600)
            case "takes it at once":
                bytearray(4 * 2**30)
            case "blocks at 13" if task.index == 13:
                time.sleep(3600)  # noqa: ASYNC251 blocking is the point
            case "blocks at 13":
                self._file.with_suffix(".asked").touch()
                while not self._file.exists():  # noqa: ASYNC110 a test makes it
                    await asyncio.sleep(0.02)
            case "hangs":
                time.sleep(3600)  # noqa: ASYNC251 blocking is the point
            case "waits":
                self._file.with_suffix(".asked").touch()
                while not self._file.exists():  # noqa: ASYNC110 a test makes it
                    await asyncio.sleep(0.02)
            case "talks to the runner":
                os.write(int(sys.argv[1]), b"no reply\n")
                time.sleep(3600)  # noqa: ASYNC251 blocking is the point
            case "talks JSON to the runner":
                os.write(int(sys.argv[1]), b'"spans"\n')
                time.sleep(3600)  # noqa: ASYNC251 blocking is the point
            case "answers nonsense":
                return [Score(float("nan"), False) for _ in completions]
            case "answers hugely":
                return [Score(1e200, False) for _ in completions]
            case "answers numbers":
                return [0.5 for _ in completions]  # type: ignore[misc]
            case "runs code":
                await tools.run_python("print(1)", b"", SandboxLimits(wall_s=5.0))
            case "answers too few":
                return []
        # A number that JSON does not know, as from numpy.
        half: Any = Fraction(1, 2)
        return [
            Score(half, completion.text == str(task.index), f"{task.index} was asked for") for completion in completions
        ]

    def _leave(self) -> None:
        """Start a process, in a session of its own, whose parent ends at once."""
        script = f"sleep 3600 & echo $! > {self._file}.part && mv {self._file}.part {self._file}"
        subprocess.run(["/bin/sh", "-c", script], start_new_session=True, check=True)

    def demonstration(self, index: int, *, validation: bool = False) -> tuple[str, str] | None:
        return None
