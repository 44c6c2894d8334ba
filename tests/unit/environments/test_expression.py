"""Expressions: the split, and the judge program as the sandbox runs it, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import time
from typing import Any

import pytest

from slipstream.common.sandbox_client import ExecResult, SandboxLimits
from slipstream.environments.base import Completion, Score, Task
from slipstream.environments.config import ExpressionConfig
from slipstream.environments.expression import Expression
from slipstream.environments.tools import SandboxNotConfigured, Tools

TARGET = 42
DEADLINE_S = 100.0


class Subprocess:
    """Stands in for the sandbox executor, where there is nothing to be kept from harm. May cut the output."""

    def __init__(self, output_bytes: int | None = None) -> None:
        self.output_bytes = output_bytes
        self.limits: list[SandboxLimits | None] = []

    async def run_python(
        self, source: str, stdin: bytes = b"", limits: SandboxLimits | None = None, timeout_s: float | None = None
    ) -> ExecResult:
        self.limits.append(limits)
        started_s = time.monotonic()
        command = [sys.executable, "-I", "-S", "-c", source]
        done = await asyncio.to_thread(subprocess.run, command, input=stdin, capture_output=True, timeout=DEADLINE_S)
        assert done.stderr == b"" or done.returncode == 0
        stdout = done.stdout[: self.output_bytes]
        wall_s = time.monotonic() - started_s
        return ExecResult(
            "exited", done.returncode, stdout, done.stderr, len(stdout) < len(done.stdout), 0.0, wall_s, 0, ""
        )


async def score(*answers: str, sandbox: Any = None, stopped: bool = True, **config: Any) -> list[Score]:
    environment = Expression(ExpressionConfig(**config), 0)
    task = Task("train", 0, {"target": TARGET})
    tools = Tools(sandbox or Subprocess())
    scores = await environment.score(task, [Completion(answer, stopped) for answer in answers], tools)
    assert tools.sandbox_executions == 1  # one for the whole group
    return scores


async def test_whatever_evaluates_to_the_number_is_right() -> None:
    answers = ["6*7", "5*8+2", " (9-3) * 7", "8*5+4/2", "2+(-2)*(-4)*5", "9*9//2+2", "7*6%9*7"]
    assert [s.correct for s in await score(*answers)] == [eval(answer) == TARGET for answer in answers]
    assert [s.reward for s in await score("6*7", "6*8")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("42", "a literal has more than one digit"),
        ("42+0", "a literal has more than one digit"),
        ("9", "no operator"),
        ("", "not an expression"),
        ("six", "not an expression"),
        ("6*7 or 1", "not an expression"),
        ("__import__", "not an expression"),
        ("6**7j", "not an expression"),
        ("6*(7", "SyntaxError"),
        ("6*7)", "SyntaxError"),
        ("7(6)", "not an expression"),
        ("7/0", "ZeroDivisionError"),
        ("(-8)**(1/2)", "complex"),
    ],
)
async def test_what_is_no_expression_of_single_digits_is_wrong_and_says_why(answer: str, why: str) -> None:
    assert await score(answer) == [Score(0.0, False, why)]


async def test_bombs_end_in_time_and_cost_their_own_sample_only() -> None:
    bombs = ["9**9**9**9", "9**9**9", "(" * 5000 + "1", "-" * 5000 + "1+1", "9**9**9//9**9**9"]
    before_s = spent_s()
    scores = await score("6*7", *bombs, "5*8+2", sample_memory_bytes=2**26)
    assert [s.correct for s in scores] == [True, False, False, False, False, False, True]
    assert spent_s() - before_s < 2 * len(bombs)  # each has a second


def spent_s() -> float:
    """Processor time of all programs that have run."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


SLOW = """
judge_at_once = judge


def judge(*given):
    import time

    time.sleep(1.5)
    return judge_at_once(*given)


"""


async def test_time_in_which_others_have_the_processor_costs_no_sample_its_verdict() -> None:
    main = 'if __name__ == "__main__":'
    source = _source().replace(main, SLOW + main)
    assert SLOW in source
    done = await Subprocess().run_python(source, json.dumps(_request("6*7", "6*8")).encode())
    assert [json.loads(line)["correct"] for line in done.stdout.splitlines()] == [True, False]


async def test_an_answer_without_an_end_token_is_wrong_even_if_it_evaluates() -> None:
    assert await score("6*7", stopped=False) == [Score(0.0, False, "no end token")]


async def test_a_near_miss_earns_part_of_its_credit() -> None:
    scores = await score("6*7+5", "6*7-9-9-9", "9*9/2", "42", "6*7", near_miss_credit=0.5, near_miss_range=20)
    assert [s.reward for s in scores] == [0.375, 0.0, 0.0, 0.0, 1.0]
    assert [s.correct for s in scores] == [False, False, False, False, True]


async def test_lines_that_the_output_limit_cut_fail_their_samples_alone() -> None:
    whole = await Subprocess().run_python(_source(), json.dumps(_request("6*7", "5*8+2")).encode())
    first_line = whole.stdout.index(b"\n") + 1
    scores = await score("6*7", "5*8+2", sandbox=Subprocess(output_bytes=first_line + 9))
    assert [s.correct for s in scores] == [True, False]
    assert [s.correct for s in await score("6*7", sandbox=Subprocess(output_bytes=0))] == [False]


async def test_groups_that_are_ready_together_share_one_execution_and_keep_their_own_verdicts() -> None:
    environment = Expression(ExpressionConfig(), 0)
    tools = Tools(Subprocess())
    targets = [42, 43, 44]
    scores = await asyncio.gather(
        *(
            environment.score(Task("train", n, {"target": n}), [Completion(f"6*7+{k}", True) for k in range(3)], tools)
            for n in targets
        )
    )
    assert tools.sandbox_executions == 1
    assert [[s.correct for s in group] for group in scores] == [[n == 42 + k for k in range(3)] for n in targets]


async def test_a_group_that_is_given_up_while_others_count_on_it_holds_up_nobody() -> None:
    environment = Expression(ExpressionConfig(), 0)
    tools = Tools(Subprocess())
    task = Task("train", 0, {"target": TARGET})
    first = asyncio.create_task(environment.score(task, [Completion("6*7", True)], tools))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(environment.score(task, [Completion("6*7", True)], tools))
    await asyncio.sleep(0.01)
    first.cancel()
    async with asyncio.timeout(30):
        assert [s.correct for s in await second] == [True]


async def test_an_execution_that_fails_fails_every_group_in_it() -> None:
    environment = Expression(ExpressionConfig(), 0)
    task = Task("train", 0, {"target": TARGET})
    judged = [environment.score(task, [Completion("6*7", True)], Tools(None)) for _ in range(2)]
    assert [type(e) for e in await asyncio.gather(*judged, return_exceptions=True)] == [SandboxNotConfigured] * 2


async def test_more_samples_than_one_execution_takes_are_judged_in_turns() -> None:
    environment = Expression(ExpressionConfig(), 0)
    tools = Tools(Subprocess())
    task = Task("train", 0, {"target": TARGET})
    groups = [environment.score(task, [Completion("6*7", True)] * 20, tools) for _ in range(5)]
    assert all(s.correct for scores in await asyncio.gather(*groups) for s in scores)
    assert tools.sandbox_executions == 3  # 40, 40 and 20 samples


async def test_a_runner_without_a_sandbox_refuses_to_judge() -> None:
    environment = Expression(ExpressionConfig(), 0)
    with pytest.raises(SandboxNotConfigured):
        await environment.score(environment.task("train", 0), [Completion("6*7", True)], Tools(None))


def test_numbers_held_out_are_in_no_task_and_no_demonstration() -> None:
    for seed in range(3):
        environment = Expression(ExpressionConfig(), seed)
        held_out = set(environment.held_out)
        assert len(held_out) == 200
        assert {environment.task("held_out", index).payload["target"] for index in range(400)} == held_out
        trained = {environment.task("train", index).payload["target"] for index in range(2000)}
        prompts = {environment.prompt(environment.task("held_out", index)) for index in range(200)}
        shown = [environment.demonstration(index) for index in range(2000)]
        assert not trained & held_out
        assert not {prompt for prompt, _ in filter(None, shown)} & prompts
        assert environment.demonstration(0, validation=True) is None  # there is no single right answer


def test_demonstrations_are_pure_well_formed_and_fit_the_answer() -> None:
    config = ExpressionConfig()
    first, again = Expression(config, 0), Expression(config, 0)
    right = 0
    for index in range(500):
        shown = first.demonstration(index)
        assert shown == again.demonstration(index)
        assert shown is not None
        prompt, answer = shown
        assert len(answer) < config.max_new_tokens  # the end token fits too
        assert all(len(digits) == 1 for digits in "".join(c if c.isdigit() else " " for c in answer).split())
        right += eval(answer) == int(prompt.split(": ")[1])
    assert right > 50  # the careless ones show the form alone


def _source() -> str:
    from importlib.resources import files

    return (files("slipstream.environments") / "expression_judge.py").read_text()


def _request(*expressions: str) -> dict[str, Any]:
    return {"targets": [TARGET] * len(expressions), "cpu_s": 1, "memory_bytes": 2**28, "expressions": expressions}
