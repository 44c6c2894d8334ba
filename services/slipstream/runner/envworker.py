"""The environment worker: a child of the runner that runs environment code and the tokenizer.

    python -m slipstream.runner.envworker SOCKET_FD NAMES REPORT_FD @ config.toml

Answers the requests of `envclient.py`, several at a time. What an environment raises becomes an error reply;
what it prints goes to standard error. It ends when the runner does, at the latest when the socket closes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog

from slipstream.common import tracing
from slipstream.common.auth import Access
from slipstream.common.config import ConfigError, cli
from slipstream.common.errors import ContextTooLong, SlipstreamError
from slipstream.common.exits import REFUSED
from slipstream.common.runtime import die_with_parent
from slipstream.common.sandbox_client import AWAY_TIMEOUT_S, SandboxClient
from slipstream.common.telemetry import setup_logging
from slipstream.environments.base import AnyEnvironment, Completion, Score, takes_turns
from slipstream.environments.prompts import Prompts
from slipstream.environments.registry import build_environments
from slipstream.environments.renderer import Renderer
from slipstream.environments.rendering import load_renderer
from slipstream.environments.tokenizer import TextCodec
from slipstream.environments.tools import Sandbox, Tools
from slipstream.runner import otel_bridge, span_return
from slipstream.runner.config import RunnerConfig
from slipstream.runner.envclient import MAX_LINE_BYTES
from slipstream.runner.episode_host import EpisodeHost
from slipstream.runner.memory_watch import bound_data
from slipstream.runner.scores import score_as_json
from slipstream.runner.session_texts import SessionTexts
from slipstream.runner.span_return import SpanReturn
from slipstream.runner.user_code import RAISED, away, given_up, told
from slipstream.runner.watchdog import Watchdog, request_of

log = structlog.get_logger()

TOKENIZER_WAIT_S = 30.0
TOKENIZER_POLL_S = 0.1
END_TIMEOUT_S = 4.0
"""Of open episodes when the process ends: less than the runner waits for that."""


class EnvironmentHost:
    """Answers requests with the configured environments."""

    def __init__(self, config: RunnerConfig, environments: dict[str, AnyEnvironment], sandbox: Sandbox | None) -> None:
        self._config = config
        self._end: Callable[[], None] | None = None
        self._closes_at_the_end = False
        self._environments = environments
        self._sandbox = sandbox
        self._episodes = EpisodeHost(sandbox, config.environment_timeout_s)
        self._sections = {each.name: each for each in config.environments}
        self._sessions = SessionTexts()
        self._codec: TextCodec | None = None
        self._renderer: Renderer | None = None
        self._prompts: Prompts | None = None
        self._context_tokens = 0

    def ends_with(self, end: Callable[[], None]) -> None:
        """`end`: what ends the serving of requests."""
        self._end = end

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to one request. User code runs in here, so anything may be raised: it becomes an error reply."""
        try:
            codec = await self._load_codec()
            return {"id": request["id"], **await self._answer(codec, request)}
        except SlipstreamError as error:
            log.warning("environment_refused", op=request["op"], reason=error.reason, detail=error.message)
            return {"id": request["id"], "error": f"{type(error).__name__}: {error}", "away": away(error)}
        except RAISED as error:
            if given_up(error):
                raise
            log.exception("environment_failed", op=request["op"])
            return {"id": request["id"], "error": told(error)}

    async def take_back(self, reply: dict[str, Any]) -> None:
        """Close the episodes of an answer that the runner never gets."""
        for member in reply.get("members", ()):
            await self._episodes.abandon({"episode": member.get("episode")})

    async def close(self) -> None:
        """Close what is open: the process ends."""
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await self._episodes.close()
        except TimeoutError:
            log.warning("episodes_not_closed")

    async def _answer(self, codec: TextCodec, request: dict[str, Any]) -> dict[str, Any]:
        match request["op"]:
            case "prompts":
                prompts = [self._prompt_or_error(codec, task) for task in request["tasks"]]
                return {"prompts": prompts, "stop_token_ids": codec.stop_token_ids}
            case "score":
                return await self._score(codec, request["task"], request["samples"])
            case "open":
                return await self._open(codec, request)
            case "turn":
                return await self._episodes.turn(request)
            case "end":
                return await self._episodes.end(request)
            case "session":
                return self._sessions.answer(request, self._load_renderer(codec), self._context_tokens)
            case "abandon":
                return await self._episodes.abandon(request)
            case other:
                raise ValueError(f"no such request: {other!r}")

    async def _open(self, codec: TextCodec, request: dict[str, Any]) -> dict[str, Any]:
        name = request["task"]["environment"]
        environment = self._environments[name]
        assert takes_turns(environment)
        section = self._sections[name]
        self._close_at_the_end()
        return await self._episodes.open(
            request,
            self._load_renderer(codec),
            self._context_tokens,
            environment,
            section.limits(environment.limits),
            section.trained_roles,
        )

    def _close_at_the_end(self) -> None:
        """From the first episode on, SIGTERM ends this process as the end of the runner's socket does."""
        if not self._closes_at_the_end and self._end is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._end)
            self._closes_at_the_end = True

    def _load_renderer(self, codec: TextCodec) -> Renderer:
        if self._renderer is None:
            self._renderer = load_renderer(self._config.model_dir, codec, self._config.renderer)
        return self._renderer

    def _prompt_or_error(self, codec: TextCodec, task: dict[str, Any]) -> dict[str, Any]:
        """The groups of other environments must not fail with this one."""
        try:
            return self._prompt(codec, task)
        except ContextTooLong as error:
            return {"error": error.message, "context": self._context_tokens}
        except (Exception, SystemExit) as error:
            log.exception("environment_failed", op="prompts", environment=task["environment"])
            return {"error": told(error)}

    def _prompt(self, codec: TextCodec, task: dict[str, Any]) -> dict[str, Any]:
        text = task["prompt"]
        if text is None:
            environment = self._environments[task["environment"]]
            if takes_turns(environment):
                return {"takes_turns": True}
            assert self._prompts is not None
            text = self._prompts.text(environment, environment.task(task["split"], task["index"]))
        # A long text takes seconds to encode, which are others' seconds too: what cannot fit is not begun.
        token_ids = codec.encode(text) if len(text) <= self._context_tokens * codec.longest_token else None
        if token_ids is None or len(token_ids) > self._context_tokens:
            raise ContextTooLong(
                f"a prompt of {len(text)} characters does not fit {self._context_tokens} tokens",
                name="prompt",
                limit=self._context_tokens,
            )
        return {"text": text, "token_ids": token_ids}

    async def _score(self, codec: TextCodec, task: dict[str, Any], samples: list[dict[str, Any]]) -> dict[str, Any]:
        completions = [Completion(codec.decode(sample["token_ids"]), sample["stopped"]) for sample in samples]
        if task["prompt"] is not None:  # a third party's own prompt: nobody scores it
            scores = [
                {"reward": 0.0, "correct": False, "text": completion.text, "detail": ""} for completion in completions
            ]
            return {"scores": scores, "sandbox_executions": 0}
        environment = self._environments[task["environment"]]
        assert not takes_turns(environment)
        tools = Tools(self._sandbox)
        with tracing.span("environment_score", environment=task["environment"], samples=len(samples)):
            judged = await environment.score(environment.task(task["split"], task["index"]), completions, tools)
        for score in judged:
            if not isinstance(score, Score):
                raise TypeError(
                    f"score of {task['environment']!r} must return Score objects, got {type(score).__name__}"
                )
        scores = [score_as_json(score, completion.text) for score, completion in zip(judged, completions, strict=True)]
        return {"scores": scores, "sandbox_executions": tools.sandbox_executions}

    async def _load_codec(self) -> TextCodec:
        """The run's tokenizer. The trainer may still write it when the first group comes; `config.json` is last."""
        if self._codec is None:
            async with asyncio.timeout(TOKENIZER_WAIT_S):
                while not (self._config.model_dir / "config.json").exists():  # noqa: ASYNC110 another process writes it
                    await asyncio.sleep(TOKENIZER_POLL_S)
            config = json.loads((self._config.model_dir / "config.json").read_text())
            self._context_tokens = int(config.get("max_position_embeddings") or sys.maxsize)
            self._prompts = Prompts(self._config.environments, self._config.model_dir)
            self._codec = TextCodec.load(self._config.model_dir)
        return self._codec


def encoded(reply: dict[str, Any]) -> bytes:
    """A reply as a line. Raises `TypeError` or `ValueError` where it is none that the runner would take: it would take
    this process for one out of its mind."""
    data = json.dumps(reply).encode() + b"\n"
    if len(data) >= MAX_LINE_BYTES:
        raise ValueError(f"the answer is {len(data)} bytes, of which the runner takes {MAX_LINE_BYTES}")
    return data


async def serve_socket(host: EnvironmentHost, connection: socket.socket, spans: SpanReturn | None = None) -> None:
    """Answer requests until the runner closes its end. At most as many are open as the runner has groups."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_LINE_BYTES)

    if spans is not None:
        spans.sends_to(writer)
    host.ends_with(lambda: connection.shutdown(socket.SHUT_RD))
    writer.write(json.dumps({"ready": True}).encode() + b"\n")

    async def answer(request: dict[str, Any]) -> None:
        with tracing.entered(tracing.parse(request.get("trace", ""))):
            reply = await host.answer(request)
        if spans is not None:
            spans.flush()
        if not reply["id"]:  # nobody waits for it
            return
        try:
            said = encoded(reply)
        except (TypeError, ValueError, RecursionError) as error:  # environment code put something else into it
            log.warning("answer_refused", detail=str(error))
            await host.take_back(reply)
            said = encoded({"id": reply["id"], "error": told(error)})
        writer.write(said)
        await writer.drain()

    answering: set[asyncio.Task[None]] = set()
    try:
        async with asyncio.TaskGroup() as group:
            if spans is not None:
                answering.add(group.create_task(spans.run()))
            while line := await reader.readline():
                request = json.loads(line)
                request_of.set(request["id"])  # of the task that is made now
                task = group.create_task(answer(request))
                answering.add(task)
                task.add_done_callback(answering.discard)
            for task in answering:
                task.cancel()  # nobody hears its answer
        await host.close()
        if spans is not None:
            spans.flush()
    finally:
        writer.close()


async def run(config: RunnerConfig, connection: socket.socket, report_fd: int) -> None:
    limit_s = min(config.environment_blocked_timeout_s, config.environment_timeout_s / 2)
    spans = span_return.install(config.tracing)
    environments = build_environments(config.environments, config.seed)
    otel_bridge.provide()
    Watchdog(report_fd, limit_s, ", ".join(environments)).start()
    if not config.sandbox_address:
        for environment in environments.values():
            if takes_turns(environment) and environment.needs_sandbox:
                raise ConfigError(f"environments.{environment.name}: it needs a sandbox: set sandbox_address")
        await serve_socket(EnvironmentHost(config, environments, None), connection, spans)
        return
    # Whoever waits for an executor says so before the runner gives this process up.
    away_timeout_s = min(AWAY_TIMEOUT_S, config.environment_timeout_s / 3)
    access = Access.from_config(config)
    async with SandboxClient(config.sandbox_address, access, away_timeout_s=away_timeout_s) as sandbox:
        await serve_socket(EnvironmentHost(config, environments, sandbox), connection, spans)


def main() -> None:
    die_with_parent()
    connection = socket.socket(fileno=int(sys.argv[1]))
    names = sys.argv[2].split(",")
    config = cli(RunnerConfig, sys.argv[4:])
    config = config.model_copy(update={"environments": [e for e in config.environments if e.name in names]})
    setup_logging(config, "environment_worker")
    limits = [section.memory_limit_bytes for section in config.environments]
    if limits and all(limits):
        bound_data(max(limits))
    os.dup2(2, 1)  # what environments print must not look like anything else
    try:
        asyncio.run(run(config, connection, int(sys.argv[3])))
    except ConfigError as error:
        log.error("environments_refused", reason=str(error))
        with suppress(OSError):  # the runner is gone
            connection.sendall(encoded({"refused": str(error)}))
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
