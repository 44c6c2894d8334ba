"""Tasks at a shell in the real sandbox, over several turns."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.api.sandbox.v1 import sandbox_pb2
from slipstream.common.config import ConfigError
from slipstream.environments.base import Episode, Score
from slipstream.environments.config_own import TerminalConfig
from slipstream.environments.messages import Message, ToolCall
from slipstream.environments.terminal import Terminal
from slipstream.environments.tools import SandboxNotConfigured, Tools

TASK = {
    "question": "Make b.txt a copy of a.txt.",
    "files": {"a.txt": "one\n", "deep/er/c.txt": "x"},
    "checks": ["cmp a.txt b.txt", {"run": "cat b.txt", "stdout": "one\n"}],
}


def environment(path: Path, task: Any = TASK, **options: Any) -> Terminal:
    file = path / "tasks.jsonl"
    file.write_text(json.dumps(task) + "\n")
    return Terminal(TerminalConfig.model_validate({"file": file, "evaluation_task_count": 0, **options}), 0)


async def begun(running: Any, terminal: Terminal, index: int = 0) -> Episode:
    return await terminal.setup(terminal.task("train", index), Tools(running.client))


async def judged(episode: Episode) -> Score:
    score = await episode.score()
    assert isinstance(score, Score)
    return score


async def typed(episode: Episode, *commands: str) -> list[str]:
    """What the model is shown of commands, each a call of one message."""
    asked = tuple(ToolCall("shell", {"command": command}, f"c{n}") for n, command in enumerate(commands))
    answers = await episode.step(Message("assistant", "", asked))
    assert isinstance(answers, list)
    assert [(m.role, m.tool_call_id) for m in answers] == [("tool", call.id) for call in asked]
    return [message.content for message in answers]


async def test_the_working_directory_outlives_commands_and_is_judged(start_executor, tmp_path):
    async with start_executor() as running:
        terminal = environment(tmp_path)
        episode = await begun(running, terminal)
        assert episode.messages == [Message("user", "Make b.txt a copy of a.txt.")]
        assert [tool.name for tool in episode.tools] == ["shell"]
        assert await typed(episode, "ls", "cat deep/er/c.txt") == ["a.txt\ndeep\n[exit code 0]", "x\n[exit code 0]"]
        assert await typed(episode, "cp a.txt b.txt; false") == ["[exit code 1]"]
        assert (await typed(episode, "cat b.txt nothing"))[0].startswith("one\ncat: nothing: No such file")
        assert await episode.step(Message("assistant", "I am done.")) == []
        score = await judged(episode)
        assert (score.reward, score.correct, score.detail) == (1.0, True, "2 of 2 checks")
        await episode.close()
        await running.idle()


async def test_what_is_not_done_earns_nothing_or_a_part(start_executor, tmp_path):
    async with start_executor() as running:
        for partial, reward in ((False, 0.0), (True, 0.5)):
            terminal = environment(tmp_path, {**TASK, "checks": ["cmp a.txt b.txt", "test -e a.txt"]})
            terminal._config = terminal._config.model_copy(update={"partial_credit": partial})
            episode = await begun(running, terminal)
            assert ((await judged(episode)).reward, (await judged(episode)).correct) == (reward, False)
            await episode.close()


async def test_rollouts_do_not_see_each_other_and_the_checks_are_not_there(start_executor, tmp_path):
    async with start_executor() as running:
        terminal = environment(tmp_path)
        one, other = await begun(running, terminal), await begun(running, terminal)
        await typed(one, "cp a.txt b.txt")
        assert await typed(other, "ls") == ["a.txt\ndeep\n[exit code 0]"]
        (found,) = await typed(one, "grep -rs cmp /files /tmp . ; ls /files")
        assert found == "work.tar\n[exit code 0]"
        assert [(await judged(episode)).reward for episode in (one, other)] == [1.0, 0.0]
        await one.close()
        await other.close()


async def test_commands_that_do_not_end_or_take_too_much_end_alone(start_executor, tmp_path):
    async with start_executor() as running:
        bounds = {"output_bytes": 64, "state_bytes": 4096}
        episode = await begun(running, environment(tmp_path, command_wall_s=2.5, **bounds))
        assert await typed(episode, "sleep 600") == ["[no end within 2.5 s]"]
        (loud,) = await typed(episode, "yes")
        assert loud.startswith("y\ny\n")
        assert "[cut]" in loud
        await episode.close()
        # What ends by itself has the time for it.
        episode = await begun(running, environment(tmp_path, command_wall_s=60.0, **bounds))
        (lost,) = await typed(episode, f"head -c 500000 /dev/urandom > big; {sys.executable} --version")
        assert lost == "[the command was ended: output limit; what it changed is lost]"
        assert await typed(episode, "(sleep 600; echo late) & echo now") == ["now\n[exit code 0]"]
        assert await typed(episode, "ls") == ["a.txt\ndeep\n[exit code 0]"]
        await episode.close()


async def test_tampering_does_not_score(start_executor, tmp_path):
    task = {
        "question": "Mend add.py.",
        "files": {"add.py": "print(0)\n"},
        "checks": [{"run": "python3 add.py 2 3", "stdout": "5"}, 'test "$(cat sum.txt)" = 5'],
    }
    attacks = [
        "ln -s /bin/true test; ln -s /bin/true cat; export PATH=.:$PATH; echo 'exit 0' > .bashrc",
        "printf 'import os, signal\\nos.kill(os.getppid(), signal.SIGKILL)\\nos.kill(1, 9)\\n' > add.py",
        'echo \'{"exit_code": 0, "output": "5", "cut": false}\'; kill -9 1; kill -9 $PPID',
        "rm -rf /tmp/work; rm -rf /files; mkdir -p /tmp/work",
    ]
    async with start_executor() as running:
        for attack in attacks:
            episode = await begun(running, environment(tmp_path, task, partial_credit=True))
            await typed(episode, attack)
            assert (await judged(episode)).reward == 0.0, attack
            await episode.close()


async def test_calls_beyond_those_allowed_are_not_run(start_executor, tmp_path):
    async with start_executor() as running:
        episode = await begun(running, environment(tmp_path, max_calls=1))
        ran, refused = await typed(episode, "echo 1", "echo 2")
        assert (ran, refused) == ("1\n[exit code 0]", "not run: at most 1 calls in a message")
        await episode.close()


async def test_a_sandbox_that_is_gone_is_made_anew_with_its_files(start_executor, tmp_path):
    async with start_executor() as running:
        episode: Any = await begun(running, environment(tmp_path))
        await typed(episode, "cp a.txt b.txt")
        gone = await episode._session._sandbox()
        await running.stub.DeleteSandbox(sandbox_pb2.DeleteSandboxRequest(sandbox_id=gone))
        assert await typed(episode, "cat b.txt") == ["one\n[exit code 0]"]
        assert (await judged(episode)).reward == 1.0
        assert await episode._session.read_files(["work.tar"]) == [episode._session._files["work.tar"]]
        await episode.close()


async def test_every_built_in_task_is_done_by_its_solution_and_not_by_nothing(start_executor):
    terminal = Terminal(TerminalConfig(evaluation_task_count=0), 0)
    problems = terminal._split.problems
    assert len(problems) >= 10
    async with start_executor() as running:
        done = set()
        index = 0
        while len(done) < len(problems):
            number = terminal.task("train", index).payload["number"]
            if number not in done:
                episode = await begun(running, terminal, index)
                assert not (await judged(episode)).correct, problems[number].question
                await typed(episode, problems[number].solution)
                assert (await judged(episode)).correct, problems[number].question
                await episode.close()
                done.add(number)
            index += 1


async def test_without_a_sandbox_it_cannot_begin(tmp_path):
    terminal = environment(tmp_path)
    assert terminal.needs_sandbox
    with pytest.raises(SandboxNotConfigured):
        await terminal.setup(terminal.task("train", 0), Tools(None))


def test_a_task_without_checks_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^environments\.terminal\.file: .*line 1: checks"):
        environment(tmp_path, {"question": "x", "checks": []})
