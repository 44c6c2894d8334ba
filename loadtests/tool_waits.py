"""How long an agent's tools take, and an environment whose rollouts wait for them.

Agents spend most of their time waiting: for a build, a test suite, a browser, a search. Published traces of such
workloads have medians of seconds and tails of tens of seconds. `ToolWaits` is that shape on a smaller scale: a
lognormal with a median of `MEDIAN_S` and a 99th percentile ten times as long (sigma = 1), cut at twenty medians as a
tool's own time limit would.

    times the median     p50   p90   p99  longest  mean  longest / mean
    a rollout            1.0   3.6    10       20   1.6              12
    a group of 8         4.0   9.2    20       20   4.9               4   ends with its slowest rollout

A draw depends on seed, task and sample alone: two runs with one task sequence wait for the same tools.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from slipstream.environments.base import Completion, Score, Split, Task
from slipstream.environments.config import ImportedConfig, SpellBackwardConfig
from slipstream.environments.spell_backward import SpellBackward
from slipstream.environments.tools import Tools

MEDIAN_S = 0.25
SIGMA = 1.0
CUT_MEDIANS = 20.0


@dataclass(frozen=True)
class ToolWaits:
    """Lognormal waits in seconds, cut at `cut_s`: what is longer ends there, as at a time limit."""

    median_s: float = MEDIAN_S
    sigma: float = SIGMA
    cut_medians: float = CUT_MEDIANS

    @property
    def cut_s(self) -> float:
        return self.median_s * self.cut_medians

    def draw_s(self, seed: int, index: int, sample: int) -> float:
        """The wait of one rollout: sample `sample` of training task `index`."""
        return self.quantile_s(random.Random(f"tool-waits/{seed}/{index}/{sample}").random())

    def group_s(self, seed: int, index: int, samples: int) -> float:
        """The wait of a group: that of its slowest member."""
        return max((self.draw_s(seed, index, sample) for sample in range(samples)), default=0.0)

    def quantile_s(self, probability: float) -> float:
        """The wait that a part `probability` of all rollouts do not exceed."""
        if probability <= 0.0:
            return 0.0
        return min(self.median_s * math.exp(self.sigma * NormalDist().inv_cdf(probability)), self.cut_s)

    def group_quantile_s(self, probability: float, samples: int) -> float:
        """The same for groups of `samples` rollouts."""
        return self.quantile_s(probability ** (1 / samples))


class WaitingTools:
    """`spell_backward` as an agent would meet it: each training rollout waits for its tools before it is judged.

    All members of a group wait at once, and so do all groups: a wait takes no processor. Held-out tasks do not wait.
    """

    def __init__(self, config: ImportedConfig, seed: int) -> None:
        inner = SpellBackwardConfig(name=config.name, evaluation_task_count=config.evaluation_task_count)
        self.name = config.name
        self._inner = SpellBackward(inner, seed)
        self._waits = ToolWaits()
        self._seed = seed

    def task(self, split: Split, index: int) -> Task:
        return self._inner.task(split, index)

    def prompt(self, task: Task) -> str:
        return self._inner.prompt(task)

    async def score(self, task: Task, completions: Sequence[Completion], tools: Tools) -> list[Score]:
        if task.split == "train":
            await asyncio.sleep(self._waits.group_s(self._seed, task.index, len(completions)))
        return await self._inner.score(task, completions, tools)

    def demonstration(self, index: int, *, validation: bool = False) -> tuple[str, str] | None:
        return self._inner.demonstration(index, validation=validation)
