"""The arithmetic behind the comparison of asynchronous with synchronous training: distribution, ideal, curves."""

from __future__ import annotations

import asyncio
from collections import Counter
from statistics import fmean, median
from types import SimpleNamespace

import pytest
import tool_waits
from phases import Ideal, accuracy_curve, percentile, reached_after_s
from tool_waits import ToolWaits, WaitingTools

from slipstream.environments.base import Completion
from slipstream.environments.config import ImportedConfig
from slipstream.environments.tools import Tools

WAITS = ToolWaits(median_s=0.25)


def test_tool_waits_have_the_stated_shape():
    draws = sorted(WAITS.draw_s(0, index, sample) / WAITS.median_s for index in range(1000) for sample in range(8))
    assert median(draws) == pytest.approx(1.0, rel=0.05)
    assert draws[len(draws) * 9 // 10] == pytest.approx(3.6, rel=0.05)
    assert draws[len(draws) * 99 // 100] == pytest.approx(10.2, rel=0.15)
    assert fmean(draws) == pytest.approx(1.6, rel=0.05)
    assert max(draws) == 20.0
    assert [WAITS.quantile_s(q) / WAITS.median_s for q in (0.5, 0.9, 0.99)] == pytest.approx([1.0, 3.6, 10.2], rel=0.01)
    assert WAITS.quantile_s(0.0) == 0.0


def test_a_group_waits_for_its_slowest_rollout():
    groups = [WAITS.group_s(0, index, 8) for index in range(1000)]
    assert groups[7] == max(WAITS.draw_s(0, 7, sample) for sample in range(8))
    assert median(groups) == pytest.approx(WAITS.group_quantile_s(0.5, 8), rel=0.1)
    assert fmean(groups) == pytest.approx(4.9 * WAITS.median_s, rel=0.05)


def test_a_wait_depends_on_seed_task_and_sample_alone():
    assert WAITS.draw_s(0, 5, 3) == ToolWaits(median_s=0.25).draw_s(0, 5, 3)
    assert len({WAITS.draw_s(seed, index, sample) for seed in (0, 1) for index in (5, 6) for sample in (3, 4)}) == 8


async def test_groups_wait_for_their_tools_at_once_and_held_out_tasks_do_not_wait(monkeypatch):
    environment = WaitingTools(ImportedConfig(type="import", name="w", path="a:b", evaluation_task_count=4), 0)
    answers = [Completion("x", True)] * 2
    indexes = range(20)
    waits_s: list[float] = []
    all_wait = asyncio.Event()

    async def wait(duration_s: float) -> None:
        waits_s.append(duration_s)
        if len(waits_s) == len(indexes):
            all_wait.set()
        await all_wait.wait()

    monkeypatch.setattr(tool_waits, "asyncio", SimpleNamespace(sleep=wait))
    async with asyncio.timeout(60):
        await environment.score(environment.task("held_out", 0), answers, Tools(None))
        assert not waits_s
        tasks = [environment.task("train", index) for index in indexes]
        await asyncio.gather(*(environment.score(task, answers, Tools(None)) for task in tasks))
    assert sorted(waits_s) == sorted(ToolWaits().group_s(0, index, 2) for index in indexes)


def test_the_ideal_step_is_that_of_the_busiest_resource():
    ideal = Ideal(trainer_s=0.4, generation_s=1.6, cpu_s=0.5)
    assert (ideal.step_s, ideal.bound_by) == (1.6, "generation")
    assert Ideal(trainer_s=2.0, generation_s=1.6, cpu_s=0.5).bound_by == "trainer"


def test_overlap_is_read_against_the_ideal_and_against_the_opponent():
    ideal = Ideal(trainer_s=0.4, generation_s=1.5, cpu_s=0.5)
    assert ideal.reached(1.5) == ideal.hidden(6.0, 1.5) == 1.0
    assert ideal.reached(2.0) == 0.75
    assert ideal.hidden(6.0, 2.0) == pytest.approx(4.0 / 4.5)
    assert ideal.hidden(2.0, 2.0) == 0.0
    # Less than twice the ideal, what could be hidden is little: then this reading is the harder one.
    assert ideal.hidden(2.0, 1.6) < ideal.reached(1.6)
    with pytest.raises(ValueError, match="measured wrongly"):
        ideal.hidden(1.4, 1.3)


def test_accuracy_of_a_version_is_that_of_the_rollouts_dispatched_at_it_and_shortly_before():
    answers = {0: [False] * 4, 1: [True, False], 2: [True] * 4, 4: [True] * 2}
    serving_s = {0: 90.0, 1: 105.0, 2: 110.0, 3: 115.0, 4: 120.0}
    curve = accuracy_curve(answers, serving_s, 100.0, window=2)
    assert curve == [(5.0, 1 / 6), (10.0, 5 / 6), (20.0, 1.0)]
    assert reached_after_s(curve, 0.8) == 10.0
    assert reached_after_s(curve, 1.1) is None


def test_percentiles_of_counted_lags():
    lags = Counter({0: 60, 1: 34, 2: 5, 3: 1})
    assert [percentile(lags, fraction) for fraction in (0.5, 0.94, 0.95, 0.99, 1.0)] == [0, 1, 2, 2, 3]
    with pytest.raises(ValueError, match="counted"):
        percentile({}, 0.5)
