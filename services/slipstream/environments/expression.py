"""Write an expression of single digits and operators that evaluates to a number; judged by running it.

There are many right answers and no list of them: only execution tells. A literal has one digit, so the number itself
is no answer. Samples are judged by `expression_judge.py` in the sandbox, groups that are ready together by
one execution.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from slipstream.common.sandbox_client import ExecResult, SandboxLimits
from slipstream.environments.base import Completion, Score, Split, Task
from slipstream.environments.config import ExpressionConfig
from slipstream.environments.expression_queue import JudgeQueue
from slipstream.environments.tokenizer import EXPRESSION_INSTRUCTION
from slipstream.environments.tools import Tools


class Expression:
    """Numbers from a range, split by seed into held-out and training ones."""

    def __init__(self, config: ExpressionConfig, seed: int) -> None:
        self.name = config.name
        self._config = config
        self._seed = seed
        self._queue = JudgeQueue(config.judge_window_s)
        targets = list(range(config.min_target, config.max_target + 1))
        random.Random(f"expression/{seed}").shuffle(targets)
        self.held_out = targets[: config.evaluation_task_count]
        self.training = targets[config.evaluation_task_count :]

    def task(self, split: Split, index: int) -> Task:
        if split == "held_out":
            return Task(split, index, {"target": self.held_out[index % len(self.held_out)]})
        return Task(split, index, {"target": random.Random(f"{self._seed}/{index}").choice(self.training)})

    def prompt(self, task: Task) -> str:
        return _question(task.payload["target"])

    async def score(self, task: Task, completions: Sequence[Completion], tools: Tools) -> list[Score]:
        target = task.payload["target"]
        expressions = [completion.text if completion.stopped else None for completion in completions]

        async def execute(targets: list[int], texts: list[str | None]) -> ExecResult:
            config = self._config
            request = {
                "targets": targets,
                "cpu_s": config.sample_cpu_s,
                "memory_bytes": config.sample_memory_bytes,
                "expressions": texts,
            }
            # Room for every sample to use up its own limit.
            room_s = max(config.sandbox_wall_s, len(texts) * config.sample_cpu_s + 2.0)
            limits = SandboxLimits(wall_s=room_s, cpu_s=room_s)
            return await tools.run_python(_judge(), repr(request).encode(), limits)

        verdicts, outcome = await self._queue.judge(target, expressions, execute)
        return [self._score(target, verdict or {"outcome": outcome}) for verdict in verdicts]

    def demonstration(self, index: int, *, validation: bool = False) -> tuple[str, str] | None:
        if validation:  # there is no single right answer
            return None
        rng = random.Random(f"{self._seed}/demonstration/{index}")
        target = rng.choice(self.training)
        return _question(target), _form(target, careless=rng.random() < self._config.careless_share)

    def _score(self, target: int, verdict: dict[str, Any]) -> Score:
        if verdict.get("correct"):
            return Score(1.0, True, str(verdict["value"]))
        value = verdict.get("value")
        credit = 0.0
        if isinstance(value, int) and self._config.near_miss_credit:
            closeness = 1.0 - abs(value - target) / self._config.near_miss_range
            credit = self._config.near_miss_credit * max(0.0, closeness)
        return Score(credit, False, str(value) if value is not None else str(verdict.get("outcome", "")))


def _question(target: int) -> str:
    return f"{EXPRESSION_INSTRUCTION}{target}\n"


def _form(target: int, *, careless: bool) -> str:
    """One form of many: the tens as 5 * (9 * a + b), then the units, which careless demonstrations leave out."""
    tens, unit = divmod(target, 10)
    nines, rest = divmod(2 * tens, 9)
    return f"5*(9*{nines}+{rest})" + ("" if careless else f"+{unit}")


@cache
def _judge() -> str:
    return Path(__file__).with_name("expression_judge.py").read_text(encoding="utf-8")
