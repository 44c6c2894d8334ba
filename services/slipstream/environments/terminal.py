"""Tasks at a shell, over several turns: the model calls a `shell` tool, and check scripts judge what it leaves behind.

Each rollout has a sandbox of its own. Its working directory outlives commands, processes do not. The checks are not in
the sandbox until the model is done.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from slipstream.common.sandbox_client import SandboxLimits
from slipstream.environments.base import Context, Score, Split, Task
from slipstream.environments.config_own import TerminalConfig
from slipstream.environments.limits import Limits
from slipstream.environments.messages import Message, ToolSpec
from slipstream.environments.problem_files import ProblemSplit, read_problems
from slipstream.environments.tools import SandboxSession, Tools

BUILT_IN = Path(__file__).with_name("data") / "terminal_tasks.jsonl"
STATE = "work.tar"
SHELL = ToolSpec(
    "shell",
    "Run a command with bash in the working directory, which later commands find as this one leaves it. Returns what "
    "it prints and its exit code.",
    {
        "type": "object",
        "properties": {"command": {"type": "string", "description": "what bash -c is given"}},
        "required": ["command"],
    },
)


@dataclass(frozen=True)
class _Ran:
    """What became of a command."""

    exit_code: int | None
    output: str
    shown: str
    """What the model is told."""


class OutputCheck(BaseModel):
    """A command whose output is compared outside the sandbox, where nothing that it runs can change the verdict."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str = Field(min_length=1)
    stdout: str
    """What it prints, standard error included; spaces at the end aside."""


class TerminalProblem(BaseModel):
    """A row of the file."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    question: str = Field(min_length=1)
    """What is to be done."""

    files: dict[str, str] = Field(default_factory=dict)
    """Files that the working directory begins with, by relative path."""

    checks: list[str | OutputCheck] = Field(min_length=1, max_length=64)
    """Commands that exit with 0 in the working directory where the task is done, or print what they should."""

    solution: str = ""
    """A command that does it: for whoever tests the task."""


class Terminal:
    """Tasks at a shell."""

    needs_sandbox = True

    def __init__(self, config: TerminalConfig, seed: int) -> None:
        self.name = config.name
        self.limits = Limits(max_turns=16, step_timeout_s=max(30.0, 2 * config.command_wall_s))
        self._config = config
        file = BUILT_IN if config.file is None else config.file
        problems = read_problems(file, TerminalProblem, f"environments.{config.name}.file")
        self._split = ProblemSplit(problems, config.evaluation_task_count, seed, config.name)

    def task(self, split: Split, index: int) -> Task:
        return self._split.task(split, index)

    async def setup(self, task: Task, tools: Tools) -> TerminalEpisode:
        problem = self._split[task.payload["number"]]
        session = tools.open_session()
        try:
            await session.write_files({STATE: packed(problem.files)})
        except BaseException:
            await session.close()
            raise
        return TerminalEpisode(self._config, problem, session, tools)


class TerminalEpisode:
    """One rollout and its sandbox."""

    tools: Sequence[ToolSpec] = (SHELL,)

    def __init__(self, config: TerminalConfig, problem: TerminalProblem, session: SandboxSession, tools: Tools) -> None:
        self._config = config
        self._problem = problem
        self._session = session
        self._tools = tools
        self.messages = [Message("user", f"{config.before}{problem.question}{config.after}")]

    async def step(self, message: Message) -> Sequence[Message] | Context:
        answers: list[Message] = []
        for call in message.tool_calls[: self._config.max_calls]:
            shown = (await self._run(str(call.arguments.get("command", "")), keep=True)).shown
            answers.append(Message("tool", shown, tool_call_id=call.id, name=call.name))
        for call in message.tool_calls[self._config.max_calls :]:
            said = f"not run: at most {self._config.max_calls} calls in a message"
            answers.append(Message("tool", said, tool_call_id=call.id, name=call.name))
        return answers  # without a call, the model says that it is done

    async def score(self) -> Score:
        passed, count = 0, len(self._problem.checks)
        for check in self._problem.checks:
            passed += await self._passes(check)
        reward = passed / count if self._config.partial_credit else float(passed == count)
        return Score(reward, passed == count, f"{passed} of {count} checks")

    async def close(self) -> None:
        await self._session.close()

    async def _passes(self, check: str | OutputCheck) -> bool:
        if isinstance(check, str):
            return (await self._run(check, keep=False)).exit_code == 0
        return (await self._run(check.run, keep=False)).output.rstrip() == check.stdout.rstrip()

    async def _run(self, command: str, *, keep: bool) -> _Ran:
        """Run a command; what it changes is kept or not."""
        config = self._config
        request = {"command": command, "wall_s": config.command_wall_s, "output_bytes": config.output_bytes}
        limits = SandboxLimits(
            wall_s=config.sandbox_wall_s,
            cpu_s=config.sandbox_wall_s,
            memory_bytes=config.memory_bytes,
            output_bytes=config.sandbox_output_bytes,
        )
        self._tools.sandbox_executions += 1
        argv = ["python3", "-I", "-S", "-c", _program()]
        result = await self._session.run(argv, json.dumps(request).encode(), limits)
        if result.outcome in ("not_started", "cancelled", "expired"):
            raise RuntimeError(f"the sandbox did not run a command: {result.outcome} {result.message}")
        head, _, state = result.stdout.partition(b"\n")
        if not result.ok or not head:
            ended = result.outcome.replace("_", " ")
            return _Ran(None, "", f"[the command was ended: {ended}; what it changed is lost]")
        if keep:
            await self._session.write_files({STATE: state})
        told = json.loads(head)
        code, output = told["exit_code"], told["output"]
        note = f"[no end within {config.command_wall_s:g} s]" if code is None else f"[exit code {code}]"
        lines = [output.removesuffix("\n"), *(["[cut]"] if told["cut"] else []), note]
        return _Ran(code, output, "\n".join(lines).lstrip("\n"))


def packed(files: dict[str, str]) -> bytes:
    """A working directory with these files."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for path, text in files.items():
            data = text.encode()
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o755
            archive.addfile(entry, io.BytesIO(data))
    return stream.getvalue()


@cache
def _program() -> str:
    return Path(__file__).with_name("terminal_step.py").read_text(encoding="utf-8")
