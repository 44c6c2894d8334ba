"""Programs with hidden tests, judged in the real sandbox."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.common.config import ConfigError
from slipstream.environments.base import Completion
from slipstream.environments.config_own import PythonCodeConfig
from slipstream.environments.python_code import PythonCode, same
from slipstream.environments.tools import Tools

CALLS = {
    "question": "Write square(n).",
    "tests": [{"call": f"square({n})", "expected": str(n * n)} for n in (3, 4, 5, 6)],
}
RIGHT = "def square(n):\n    return n * n\n"
ALWAYS = "class Always:\n    def __eq__(self, other): return True\n    def __repr__(self): return '9'\n"
FORGED = '{"test": %d, "outcome": "ended", "output": "passed"}'
TAMPERING = {
    "exits before": "import os; os._exit(0)",
    "exits cleanly": "raise SystemExit(0)",
    "prints what a judge prints": "print('passed')\n" + "".join(f"print('{FORGED % n}')\n" for n in range(4)),
    "writes into every descriptor": "import os\nfor fd in range(256):\n    for n in range(4):\n"
    "        try: os.write(fd, b'\\n' + b'''" + FORGED + "''' % n + b'\\n')\n        except OSError: pass\n",
    "equals everything": f"{ALWAYS}def square(n): return Always()\n",
    "changes what encodes": "import json, builtins\njson.dumps = lambda *a, **k: '9'\n"
    "builtins.type = lambda x: int\ndef square(n): return 9\n",
    "changes the harness": "import sys\nframe = sys._getframe()\nwhile frame:\n"
    "    frame.f_globals['encoded'] = lambda *a: True\n    frame.f_globals['run'] = lambda *a: {}\n"
    "    frame = frame.f_back\ndef square(n): return 1\n",
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef square(n): return 1\n",
    "nests without end": "x = []\nx.append(x)\ndef square(n): return x\n",
    "is no program": "this is no Python",
    "is empty": "",
}


def environment(path: Path, *rows: Any, **options: Any) -> PythonCode:
    file = path / "problems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"file": file, "evaluation_task_count": 0, "test_cpu_s": 1.0, **options}
    return PythonCode(PythonCodeConfig.model_validate(config), 0)


async def judged(running: Any, code: PythonCode, *texts: str) -> list[Any]:
    task = code.task("train", 0)
    return await code.score(task, [Completion(text, True) for text in texts], Tools(running.client))


async def test_a_program_is_right_when_all_hidden_tests_pass(start_executor, tmp_path):
    async with start_executor() as running:
        code = environment(tmp_path, CALLS)
        fenced = f"Here it is:\n```python\n{RIGHT}```\nDone."
        half = "def square(n):\n    return n * n if n < 5 else 0\n"
        right, in_a_block, partly = await judged(running, code, RIGHT, fenced, half)
        assert (right.reward, right.correct, right.detail) == (1.0, True, "4 of 4 tests")
        assert (in_a_block.reward, in_a_block.correct) == (1.0, True)
        assert (partly.reward, partly.correct, partly.detail) == (0.0, False, "2 of 4 tests; test 3: another value")
        code = environment(tmp_path, CALLS, partial_credit=True)
        (partly,) = await judged(running, code, half)
        assert (partly.reward, partly.correct) == (0.5, False)
        cut = await code.score(code.task("train", 0), [Completion(RIGHT, False)], Tools(running.client))
        assert (cut[0].reward, cut[0].detail) == (0.0, "no end token")


async def test_no_tampering_scores(start_executor, tmp_path):
    async with start_executor() as running:
        code = environment(tmp_path, CALLS, partial_credit=True)
        scores = await judged(running, code, *TAMPERING.values())
        earned = {name: score.detail for name, score in zip(TAMPERING, scores, strict=True) if score.correct}
        assert earned == {}
        # What returns 9 whatever is asked is right where 9 is.
        rewards = {name: score.reward for name, score in zip(TAMPERING, scores, strict=True) if score.reward}
        assert rewards.keys() <= {"changes what encodes"}


async def test_a_program_that_does_not_end_or_takes_all_fails_and_others_are_judged(start_executor, tmp_path):
    endless = "def square(n):\n    while True: pass\n"
    greedy = "def square(n):\n    return [0] * 10**10\n"
    asleep = "import time\ndef square(n):\n    time.sleep(600)\n"
    forks = "import os\ndef square(n):\n    if os.fork() == 0:\n        os.setsid()\n        while True: pass\n"
    forks += "    return n * n\n"
    loud = "def square(n):\n    print('x' * 10**7)\n    return n * n\n"
    async with start_executor() as running:
        scores = await judged(running, environment(tmp_path, CALLS), endless, greedy, loud, RIGHT)
        assert [score.correct for score in scores] == [False, False, True, True]
        assert scores[0].detail == "0 of 4 tests; test 1: killed"
        (slept, _) = await judged(running, environment(tmp_path, CALLS, test_wall_s=0.5), asleep, forks)
        assert (slept.correct, slept.detail) == (False, "0 of 4 tests; test 1: killed")
        await running.idle()


async def test_a_program_that_reads_and_prints_is_compared_by_its_output(start_executor, tmp_path):
    row = {"question": "Add.", "tests": [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "5 5\n", "stdout": "10"}]}
    right = "a, b = map(int, input().split())\nprint(a + b)\n"
    early = f"{right}raise SystemExit(3)\n"
    shows_all = "print('3\\n10')\n"
    async with start_executor() as running:
        scores = await judged(running, environment(tmp_path, row), right, early, shows_all, "print(input())", "1 / 0")
        assert [score.correct for score in scores] == [True, True, False, False, False]


async def test_every_built_in_problem_is_solved_by_its_solution_and_by_no_other(start_executor):
    code = PythonCode(PythonCodeConfig(evaluation_task_count=0, test_cpu_s=5.0), 0)
    problems = code._split.problems
    assert len(problems) >= 30
    async with start_executor() as running:
        tools = Tools(running.client)
        solved = await asyncio.gather(*(code._judge(problem, problem.solution, tools) for problem in problems))
        assert [p.question for p, score in zip(problems, solved, strict=True) if not score.correct] == []
        others = zip(problems[::4], problems[1::4], strict=True)
        solved = await asyncio.gather(*(code._judge(problem, other.solution, tools) for problem, other in others))
        assert not any(score.correct for score in solved)
        assert tools.sandbox_executions == len(problems) + len(problems[::4])


def test_tests_are_never_shown():
    code = PythonCode(PythonCodeConfig(), 0)
    for index in range(100):
        task = code.task("train", index)
        shown = code.prompt(task)
        problem = code._split[task.payload["number"]]
        assert shown == problem.question
        assert not any(test.call and test.call in shown for test in problem.tests)


def test_a_file_with_a_test_that_expects_nothing_is_refused_by_line(tmp_path):
    for test, said in (
        ({"call": "f(1)"}, "a test has stdout, after stdin if it reads any, or call and expected"),
        ({"stdin": "1"}, "a test has stdout"),
        ({"call": "f(1)", "expected": "f("}, "line 1: tests.0: "),
        ({"call": "f(1)", "expected": "f(1)"}, "no Python literal"),
        ({"call": "f(1)", "expected": repr("x" * 20000)}, "output_bytes: is 16384"),
    ):
        with pytest.raises(ConfigError, match=r"^environments\.python_code") as caught:
            environment(tmp_path, {"question": "f?", "tests": [test]})
        assert said in str(caught.value)


def test_values_are_equal_by_type_and_number():
    assert same(1, 1.0)
    assert same(1.0, 1)
    assert same(0.1 + 0.2, 0.3)
    assert not same(True, 1)
    assert not same({"list": [1]}, {"tuple": [1]})
    assert same({"dict": [[1, 2], [3, 4]]}, {"dict": [[3, 4], [1, 2]]})
    assert not same({"dict": "x"}, {"dict": []})
    # Integers that no floating-point number comes near.
    assert not same(10**400, 1.0)
    assert not same(1.0, 10**400)
