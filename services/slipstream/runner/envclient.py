"""The runner's side of an environment worker: a child process that runs environment code and the tokenizer.

One JSON object a line over a socket pair, both ways; replies carry the id of their request, in any order. A worker
that dies or does not answer in time is replaced; what it was asked fails with `EnvironmentFailed`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import structlog

from slipstream.common import tracing
from slipstream.common.config import ConfigError
from slipstream.common.errors import (
    ContextTooLong,
    EnvironmentFailed,
    EnvironmentMemory,
    EnvironmentReplaced,
    EnvironmentTimeout,
    InvalidRequest,
    SandboxAway,
    SlipstreamError,
)
from slipstream.common.reaper import END_NOW, guarded
from slipstream.runner import telemetry
from slipstream.runner.memory_watch import held_bytes
from slipstream.runner.span_intake import SpanIntake
from slipstream.runner.watchdog import MAX_REPORT_BYTES

log = structlog.get_logger()

MAX_LINE_BYTES = 40 * 2**20
"""A group of 32 answers of 131,072 tokens takes 34 MB."""
PROMPTS_AT_ONCE = 8
"""Long ones fit a line together."""
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
EXIT_TIMEOUT_S = 1.0
RESTART_PAUSE_S = 0.5
MAX_RESTART_PAUSE_S = 10.0
STEADY_S = 30.0
MEMORY_WATCH_S = 0.5
LAST_REPLIES_S = 0.2
"""How long replies of a process that has ended are read, in seconds."""
_UNINTELLIGIBLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading a line raises that is no reply."""


@dataclass(frozen=True)
class TaskKey:
    """Which task a group runs; `prompt` replaces the task for a third party's own prompt."""

    environment: str
    split: str
    index: int
    prompt: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {"environment": self.environment, "split": self.split, "index": self.index, "prompt": self.prompt}


@dataclass(frozen=True)
class RenderedPrompt:
    """A task's prompt, as text and as token ids."""

    text: str
    token_ids: list[int]
    stop_token_ids: list[int]
    takes_turns: bool = False
    """The environment's rollouts are episodes, each with a prompt of its own: there is none here."""


@dataclass(frozen=True)
class RoleScore:
    """What a rollout is worth for one of its roles."""

    role: str
    reward: float
    correct: bool
    untrained: bool = False


@dataclass(frozen=True)
class ScoredSample:
    """One sample's score and its text."""

    reward: float
    correct: bool
    text: str
    detail: str = ""
    """For people: why it earned what it did."""
    roles: tuple[RoleScore, ...] = ()
    """One for each role that had a turn, where the environment has any."""


def _rendered(prompt: dict[str, Any], stop_token_ids: list[int]) -> RenderedPrompt:
    if prompt.get("takes_turns"):
        return RenderedPrompt("", [], stop_token_ids, takes_turns=True)
    return RenderedPrompt(prompt["text"], prompt["token_ids"], stop_token_ids)


@dataclass(frozen=True)
class TurnPrompt:
    """What the next turn of an episode is sampled from; as in `transcript.Prompt`."""

    sample: int
    base_sample: int
    base_token_count: int
    token_ids: list[int]
    begun: str
    max_new_tokens: int
    role: str = ""
    """Whose turn it is, where the environment has roles."""


@dataclass(frozen=True)
class OpenEpisode:
    """An episode before its first turn."""

    number: int
    prompt: TurnPrompt
    text: str
    """Of the prompt."""


@dataclass(frozen=True)
class OpenGroup:
    """The episodes of a group's members, in order; the error of those that did not begin."""

    members: list[OpenEpisode | SlipstreamError]
    stop_token_ids: list[int]
    timeout_s: float
    """Of each rollout; 0 is none of its own."""


@dataclass(frozen=True)
class EndedEpisode:
    """What became of an episode."""

    score: ScoredSample
    conversations: list[list[dict[str, Any]]]
    """Of each sample, in OpenAI's form."""
    turn_count: int
    sandbox_executions: int
    cut: str = ""
    """The limit that ended it, as in `limits.Cut`; empty where its environment did."""


def _scored(score: dict[str, Any]) -> ScoredSample:
    roles = tuple(RoleScore(**each) for each in score.get("roles", ()))
    return ScoredSample(float(score["reward"]), bool(score["correct"]), str(score["text"]), str(score["detail"]), roles)


def _failure(task: TaskKey, prompt: dict[str, Any]) -> SlipstreamError:
    if "context" in prompt:
        return ContextTooLong(prompt["error"], name="prompt", limit=prompt["context"])
    return EnvironmentFailed(prompt["error"], environment=task.environment)


@contextmanager
def closing_fd(descriptor: int) -> Iterator[None]:
    """Close it at the end."""
    try:
        yield
    finally:
        os.close(descriptor)


def read_report(descriptor: int) -> dict[str, Any]:
    """What the watchdog of a process that ended left in the pipe; nothing where it said nothing."""
    os.set_blocking(descriptor, False)
    try:
        data = os.read(descriptor, MAX_REPORT_BYTES)
    except BlockingIOError:  # what it forked holds the other end
        return {}
    try:
        said = json.loads(data)
        return {"request": int(said["request"]), "blocked_s": float(said["blocked_s"]), "where": str(said["where"])}
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):  # nothing, or environment code wrote there
        return {}


async def _close_after(process: asyncio.subprocess.Process, writer: asyncio.StreamWriter) -> None:
    """End the connection some time after the process: what it forked may hold the other end open for good."""
    await process.wait()
    await asyncio.sleep(LAST_REPLIES_S)
    writer.close()


def failure_of(reply: dict[str, Any], environment: str) -> SlipstreamError:
    """What a reply with an `error` tells of."""
    kind = SandboxAway if reply.get("away") else EnvironmentFailed
    return kind(reply["error"], environment=environment)


def _tell_reaper(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    process.send_signal(number)
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGCONT)  # environment code may have stopped it


class EnvironmentWorker:
    """Owns one environment worker process, and, through `common/reaper.py`, all that it starts."""

    def __init__(
        self,
        config_arguments: Sequence[str],
        timeout_s: float,
        environments: Sequence[str],
        memory_limit_bytes: int = 0,
    ) -> None:
        """`environments`: names of those that this process is for. `memory_limit_bytes`: 0 is no limit."""
        self._memory_limit_bytes = memory_limit_bytes
        self._open: set[int] = set()
        self._spans = SpanIntake(",".join(environments))
        self._why = ""
        """Why the present process ended, where that is known."""
        self._config_arguments = list(config_arguments)
        self._environments = ",".join(environments)
        self._started_once = False
        self._timeout_s = timeout_s
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._traced: set[int] = set()
        """Requests that carried a trace: what their process had recorded of it ends with the process."""
        self._writer: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._up = asyncio.Event()
        self._epoch = 0
        """Counts the processes that came up."""

    async def up(self) -> int:
        """The epoch of the process that is up, once one is. Raises `EnvironmentFailed` where none is in time."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not self._up.is_set():
                    await self._up.wait()
        except TimeoutError:
            raise EnvironmentFailed("the environment worker does not start") from None
        return self._epoch

    def serves(self, epoch: int) -> bool:
        """Whether the process of that epoch is up: what is asked or told at once, it hears."""
        return self._up.is_set() and self._epoch == epoch

    @property
    def load(self) -> tuple[bool, int]:
        """What makes another process of the same environment a better choice: this one is away, or has more to do."""
        return not self._up.is_set(), len(self._waiting) + len(self._open)

    async def run(self) -> None:
        """Keep a worker process running for good. Waits on the process; a dead one is replaced after a pause, which
        doubles while they live for seconds only.

        Raises:
            ConfigError: the first one refuses its configuration; an environment that cannot be imported, say.
            EnvironmentFailed: the first one does not even start.
        """
        pause_s = RESTART_PAUSE_S
        try:
            while True:
                began_s = time.monotonic()
                await self._run_once()
                steady = time.monotonic() - began_s > STEADY_S
                pause_s = RESTART_PAUSE_S if steady else pause_s
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_RESTART_PAUSE_S)
        finally:
            await self._end_process()

    async def prompts(self, tasks: Sequence[TaskKey]) -> list[RenderedPrompt | SlipstreamError]:
        """Render tasks to prompts, each by itself. Raises `EnvironmentFailed` when the worker fails."""
        reply = await self._ask(
            ",".join(sorted({task.environment for task in tasks})),
            {"op": "prompts", "tasks": [task.as_json() for task in tasks]},
        )
        stop = reply["stop_token_ids"]
        return [
            _failure(task, prompt) if "error" in prompt else _rendered(prompt, stop)
            for task, prompt in zip(tasks, reply["prompts"], strict=True)
        ]

    async def score(self, task: TaskKey, samples: Sequence[tuple[list[int], bool]]) -> tuple[list[ScoredSample], int]:
        """Score a group's samples, each (token ids, whether it stopped by itself).

        Returns the scores and how many sandbox executions it took. Raises `EnvironmentFailed`.
        """
        request = {
            "op": "score",
            "task": task.as_json(),
            "samples": [{"token_ids": token_ids, "stopped": stopped} for token_ids, stopped in samples],
        }
        reply = await self._ask(task.environment, request)
        return [_scored(score) for score in reply["scores"]], int(reply["sandbox_executions"])

    async def open(self, task: TaskKey, count: int) -> OpenGroup:
        """Begin so many episodes of a task. Raises `EnvironmentFailed`, as do the calls below."""
        reply = await self._ask(task.environment, {"op": "open", "task": task.as_json(), "count": count})
        members = [
            failure_of(each, task.environment)
            if "error" in each
            else OpenEpisode(each["episode"], TurnPrompt(**each["prompt"]), each["text"])
            for each in reply["members"]
        ]
        self._open |= {each.number for each in members if isinstance(each, OpenEpisode)}
        return OpenGroup(members, reply["stop_token_ids"], reply["timeout_s"])

    async def turn(self, task: TaskKey, episode: int, token_ids: Sequence[int], *, stopped: bool) -> TurnPrompt | None:
        """Hand a turn of the model to an episode; returns the next prompt, or None when it is over."""
        request = {"op": "turn", "episode": episode, "token_ids": list(token_ids), "stopped": stopped}
        reply = await self._ask(task.environment, request)
        return TurnPrompt(**reply["prompt"]) if "prompt" in reply else None

    async def end(self, task: TaskKey, episode: int, cut: str = "") -> EndedEpisode:
        """Score an episode and close it. `cut`: the limit that ended it, where the process does not know that."""
        reply = await self._ask(task.environment, {"op": "end", "episode": episode, "cut": cut})
        self._open.discard(episode)
        score = _scored(reply["score"])
        executions = int(reply["sandbox_executions"])
        return EndedEpisode(score, reply["conversations"], reply["turn_count"], executions, str(reply["cut"]))

    def abandon(self, episode: int) -> None:
        """Close an episode without its score. Waits for nothing: a worker that is gone has none."""
        self._open.discard(episode)
        self._tell({"op": "abandon", "episode": episode})

    async def session(self, session_id: str, call: str, **fields: Any) -> dict[str, Any]:
        """One call for a session; see `session_texts.py`. Raises what it is refused with, and `EnvironmentFailed`."""
        reply = await self._ask("session", {"op": "session", "call": call, "session": session_id, **fields})
        if "refused" in reply:
            refused = reply["refused"]
            refusal = SlipstreamError.by_reason[refused["reason"]](refused["message"])
            refusal.metadata = refused["metadata"]
            raise refusal
        return reply

    def tell_session(self, session_id: str, call: str, **fields: Any) -> None:
        """The same without an answer, and without waiting."""
        self._tell({"op": "session", "call": call, "session": session_id, **fields})

    def _tell(self, request: dict[str, Any]) -> None:
        if self._up.is_set() and self._writer is not None:
            self._writer.write(json.dumps({"id": 0, **request}).encode() + b"\n")

    def _give_back(self, reply: dict[str, Any]) -> None:
        """Close the episodes of an answer that nobody waits for any more."""
        for member in reply.get("members", ()):
            if "episode" in member:
                self.abandon(member["episode"])

    async def _ask(self, environment: str, request: dict[str, Any]) -> dict[str, Any]:
        number = next(self._ids)
        trace = tracing.traceparent()
        carried = {} if trace is None else {"trace": trace}
        line = json.dumps({"id": number, **carried, **request}).encode() + b"\n"
        if len(line) >= MAX_LINE_BYTES:  # it would end the process, and what others have there
            message = f"this is {len(line)} bytes for the environment worker, which takes {MAX_LINE_BYTES}"
            if request["op"] == "session":
                raise InvalidRequest(message, field="messages", limit=MAX_LINE_BYTES)
            raise EnvironmentFailed(message, environment=environment)
        future: asyncio.Future[dict[str, Any]] | None = None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not self._up.is_set():  # it may have died again before this task ran
                    await self._up.wait()
            async with asyncio.timeout(self._timeout_s):
                assert self._writer is not None
                future = self._waiting[number] = asyncio.get_running_loop().create_future()
                if trace is not None:
                    self._traced.add(number)
                self._writer.write(line)
                await self._writer.drain()
                reply = await future
        except asyncio.CancelledError:
            if future is not None and future.done() and not future.cancelled() and not future.exception():
                self._give_back(future.result())  # it came, and was not taken
            raise
        except TimeoutError:
            if trace is not None:
                self._spans.lost("process_ended")
            telemetry.environment_failures.labels(environment).inc()
            self._why = self._why or "too_slow"
            self._kill()
            raise EnvironmentTimeout(
                f"environment code did not answer within {self._timeout_s:g} s", environment=environment
            ) from None
        except ConnectionError as error:
            telemetry.environment_failures.labels(environment).inc()
            raise EnvironmentFailed("the environment worker died", environment=environment) from error
        finally:
            self._waiting.pop(number, None)
            self._traced.discard(number)
        if "error" in reply:
            telemetry.environment_failures.labels(environment).inc()
            raise failure_of(reply, environment)
        return reply

    async def _run_once(self) -> None:
        started, refused = False, ""
        self._why = ""
        ours, theirs = socket.socketpair()
        report, their_report = os.pipe()
        with theirs, closing_fd(their_report):
            arguments = [str(theirs.fileno()), self._environments, str(their_report), *self._config_arguments]
            self._process = await asyncio.create_subprocess_exec(
                *guarded([sys.executable, "-m", "slipstream.runner.envworker", *arguments]),
                pass_fds=[theirs.fileno(), their_report],
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # who kills the runner's group leaves the one that ends what is left
            )
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)
        closing = asyncio.create_task(_close_after(self._process, self._writer))
        watching = asyncio.create_task(self._watch_memory(self._process.pid))
        try:
            while line := await reader.readline():
                reply = json.loads(line)
                if not started:  # the first line says that the environments are built, or why they cannot be
                    if "refused" in reply:
                        refused = str(reply["refused"])
                        continue
                    started = self._started_once = True
                    log.info("environment_worker_started", pid=self._process.pid, environments=self._environments)
                    self._epoch += 1
                    self._up.set()
                    continue
                if "spans" in reply:
                    self._spans.take(reply)
                    continue
                future = self._waiting.get(reply["id"])
                if future is not None and not future.done():
                    future.set_result(reply)
                else:
                    self._give_back(reply)
        except asyncio.CancelledError:
            for future in self._waiting.values():
                future.cancel()  # this process ends, and what it was at did not fail: the next one takes it up
            raise
        except ConnectionError:
            log.info("environment_worker_connection_broke")
        except _UNINTELLIGIBLE as error:  # a line that is too long, or none of ours: environment code wrote it
            log.warning("environment_worker_unintelligible", detail=f"{type(error).__name__}: {error}")
        finally:
            self._up.clear()
            closing.cancel()
            watching.cancel()
            self._writer.close()
            self._open.clear()
            self._fail_waiting(read_report(report))
            os.close(report)
        with suppress(TimeoutError):  # it closed its socket: it is ending by itself
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                await self._process.wait()
        await self._end_process()
        code = self._process.returncode
        why = self._why or "died"
        log.warning("environment_worker_ended", returncode=code, environments=self._environments, why=why)
        telemetry.environment_processes_ended.labels(self._environments, why).inc()
        if refused and not self._started_once:
            raise ConfigError(refused)
        if not (started or self._started_once):
            raise EnvironmentFailed(f"the environment worker does not start (exit code {code}); the log says why")

    def _fail_waiting(self, report: dict[str, Any]) -> None:
        """Tell those who wait what became of the process. `report`: what its watchdog said, if it did."""
        if report:
            self._why = "blocked"
        for number, future in self._waiting.items():
            if future.done():
                continue
            if number in self._traced:
                self._spans.lost("process_ended")
            if self._why == "memory":
                limit = f"the environment's process held more than memory_limit_bytes = {self._memory_limit_bytes}"
                future.set_exception(EnvironmentMemory(limit, environment=self._environments))
            elif not report:
                future.set_exception(EnvironmentFailed("the environment worker died"))
            elif report["request"] == number:
                held = f"environment code held its process for {report['blocked_s']:.0f} s without awaiting anything"
                message = f"{held}: {report['where']}"
                future.set_exception(EnvironmentTimeout(message, environment=self._environments))
            else:
                message = "other code blocked the environment's process, which was replaced"
                future.set_exception(EnvironmentReplaced(message, environment=self._environments))

    async def _watch_memory(self, pid: int) -> None:
        limit_bytes = self._memory_limit_bytes
        while limit_bytes:
            await asyncio.sleep(MEMORY_WATCH_S)
            held = held_bytes(pid, limit_bytes)
            if held > limit_bytes:
                self._why = "memory"
                log.error(
                    "environment_memory", environment=self._environments, held_bytes=held, limit_bytes=limit_bytes
                )
                self._kill()
                return

    def _kill(self) -> None:
        """A worker whose code does not come back is of no more use to anyone, nor is what it started."""
        if self._process is not None and self._process.returncode is None:
            _tell_reaper(self._process, END_NOW)

    async def _end_process(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        _tell_reaper(process, signal.SIGTERM)
        for escalation in (END_NOW, signal.SIGKILL):
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()
                    return
            except TimeoutError:
                _tell_reaper(process, escalation)
        await process.wait()
