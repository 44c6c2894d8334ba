"""One turn of a session: prompts, sampling, and the pieces of its answers for whoever asked.

It runs in its group's task group, whoever reads: a reader that is slow delays its own pieces alone, which are joined
meanwhile, and one that goes ends the turn. A turn that comes to no end leaves nothing in the session.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import structlog

from slipstream.api.rollout.v1 import runner_pb2, session_pb2
from slipstream.common.errors import InternalError, RequestAborted, SamplingBiased, SlipstreamError
from slipstream.runner import telemetry
from slipstream.runner.attempt import Wish
from slipstream.runner.rollout import STOP, Rollout
from slipstream.runner.rollout_record import SESSION
from slipstream.runner.session_log import KeptAnswer, KeptTurn, SessionLog
from slipstream.runner.session_memory import SessionMemory, as_json
from slipstream.runner.turns import Conversation

log = structlog.get_logger()


class Samples:
    """What a session has sampled: a rollout for each sample of its trajectory."""

    def __init__(
        self, session_id: str, index: int, assignment: runner_pb2.GroupAssignment, conversation: Conversation
    ) -> None:
        self.session_id = session_id
        self.index = index
        self.assignment = assignment
        self.conversation = conversation
        self.rollouts: dict[int, Rollout] = {}
        self.turn_count = 0

    @property
    def sampled(self) -> list[Rollout]:
        """Those with tokens that train, in order."""
        return [rollout for _, rollout in sorted(self.rollouts.items()) if rollout.sampled]

    def take(self, prompt: Mapping[str, Any], limit: int) -> int:
        """Put a prompt where its turn is sampled; returns the index that it is asked for with, its own in the group."""
        sample: int = prompt["sample"]
        index = self.index + self.assignment.sample_count * sample
        if prompt["begun"]:
            base = self.rollouts.get(prompt["base_sample"])
            shared = base.token_ids[: prompt["base_token_count"]] if base is not None else []
            rollout = self.rollouts[sample] = Rollout([*shared, *prompt["token_ids"]])
            self.conversation.add(index, rollout)
        else:
            rollout = self.rollouts[sample]
            rollout.hear(prompt["token_ids"])
        rollout.turn_limit_tokens = min(prompt["max_new_tokens"], limit or prompt["max_new_tokens"])
        return index

    def take_up(self, turn: KeptTurn) -> None:
        """Put a turn of an earlier process where it was."""
        for answer in turn.answers:
            index = self.take({**answer.prompt, "max_new_tokens": 1}, 0)
            self.conversation.rollout(index).recall(answer.record)
        self.turn_count += 1


class Turn:
    """One turn. `start` it; read its `pieces` in another task."""

    def __init__(
        self,
        samples: Samples,
        memory: SessionMemory,
        request: session_pb2.RunTurnRequest,
        limits: Mapping[str, int],
        session_log: SessionLog,
    ) -> None:
        """Raises `SamplingBiased` for what the session is not sampled with."""
        self._limits = limits
        self._log = session_log
        self._prompts: dict[int, dict[str, Any]] = {}
        """By index in the group, as they are asked."""
        self._shown: dict[int, str | None] = {}
        self._samples = samples
        self._memory = memory
        self.epoch = 0
        """Of the process of texts that it was asked of."""
        self._request = request
        self._pending: dict[int, session_pb2.RunTurnResponse] = {}
        self._news = asyncio.Event()
        self._over = False
        self._error: SlipstreamError | None = None
        self._choices: dict[int, tuple[int, int]] = {}
        """Choice and sample, by index in the group."""
        self._cut: set[int] = set()
        self.task: asyncio.Task[None] | None = None
        self._check_sampling()

    def start(self, tasks: asyncio.TaskGroup, deadline_s: float, done: Callable[[], None]) -> None:
        """Sample to the end, in a task. What goes wrong is for the reader; `done` is called in any case."""

        def over(task: asyncio.Task[None]) -> None:  # also of a task that was cancelled before it began
            if task.cancelled():
                self._error = self._error or RequestAborted("the turn was aborted")
            self._over = True
            self._news.set()
            done()

        self.task = tasks.create_task(self._sample(deadline_s))
        self.task.add_done_callback(over)

    async def _sample(self, deadline_s: float) -> None:
        try:
            await self._run(deadline_s)
        except SlipstreamError as error:
            self._error = error
        except Exception:
            log.exception("turn_failed", session_id=self._samples.session_id)
            self._error = InternalError("internal error")

    def end(self, error: SlipstreamError) -> None:
        """Abort it, and tell its reader this."""
        self._error = error
        self.abandon()

    def abandon(self) -> None:
        """Nobody reads it any more."""
        if self.task is not None:
            self.task.cancel()

    async def pieces(self) -> AsyncIterator[session_pb2.RunTurnResponse]:
        """What has come since the last piece, joined. Raises `SlipstreamError`."""
        while True:
            await self._news.wait()
            self._news.clear()
            pending, self._pending = self._pending, {}
            for piece in pending.values():
                yield piece
            if self._over and not self._pending:
                if self._error is not None:
                    raise self._error
                return

    async def _run(self, deadline_s: float) -> None:
        request, samples = self._request, self._samples
        self.epoch = await self._memory.ready()
        asked = await self._memory.call(
            self.epoch,
            "ask",
            messages=[as_json(each) for each in request.messages],
            prompt=None if request.messages else request.prompt,
            tools_json=request.tools_json,
            stop=list(request.stop),
            count=request.choice_count or 1,
            turn_count=samples.turn_count,
            limits=dict(self._limits),
        )
        if not samples.assignment.sampling.stop_token_ids:
            samples.assignment.sampling.stop_token_ids.extend(asked["stop_token_ids"])
        before: dict[int, tuple[int, int, int]] = {}
        try:
            for choice, prompt in enumerate(asked["prompts"]):
                index = samples.take(prompt, request.max_new_tokens)
                if prompt["begun"]:
                    telemetry.samples_begun.labels(SESSION, prompt["begun"]).inc()
                rollout = samples.rollouts[prompt["sample"]]
                self._choices[index] = choice, prompt["sample"]
                self._prompts[index] = prompt
                counts = rollout.cached_token_count, len(rollout.token_ids)
                before[prompt["sample"]] = len(rollout.routes), *counts
            await samples.conversation.sample(list(self._choices), deadline_s, self._wish())
            for index in self._choices:
                await self._finish(index, *before[self._choices[index][1]][1:])
        except BaseException:
            for sample, (route_count, *_) in before.items():
                self._forget(sample, route_count)
            raise
        samples.turn_count += 1
        self._keep()
        telemetry.session_turns.inc()

    def _keep(self) -> None:
        """On disk before whoever asked hears that it is over."""
        answers = [
            KeptAnswer(prompt, self._samples.rollouts[prompt["sample"]].ended_turn(), self._shown[index])
            for index, prompt in self._prompts.items()
        ]
        self._log.keep_turn(self._samples.index, self._request, answers)

    def _forget(self, sample: int, route_count: int) -> None:
        rollout = self._samples.rollouts[sample]
        self._samples.conversation.release(rollout.routes[route_count:])
        del rollout.routes[route_count:]
        rollout.forget_turn()
        self._memory.tell(self.epoch, "give_up", sample=sample)

    def _wish(self) -> Wish:
        listens = self._request.stream or bool(self._request.stop)
        seed = self._request.seed if self._request.HasField("seed") else None
        draws = {index: choice for index, (choice, _) in self._choices.items()} if seed is not None else {}
        return Wish(seed, draws, self._listen if listens else None)

    async def _listen(self, news: Mapping[int, tuple[Sequence[int], Sequence[float]]]) -> dict[int, int]:
        ends: dict[int, int] = {}
        for index, (token_ids, logprobs) in news.items():
            choice, sample = self._choices[index]
            heard = await self._memory.call(self.epoch, "hear", sample=sample, token_ids=list(token_ids))
            if heard["cut"] is not None:
                ends[index] = heard["cut"]
                self._cut.add(index)
                token_ids, logprobs = token_ids[: heard["cut"]], logprobs[: heard["cut"]]
            if self._request.stream:
                await self._say(choice, heard["text"], token_ids, logprobs)
        return ends

    async def _finish(self, index: int, cached_before: int, prompt_token_count: int) -> None:
        choice, sample = self._choices[index]
        rollout = self._samples.rollouts[sample]
        cut = index in self._cut
        answered = await self._memory.call(
            self.epoch,
            "answer",
            sample=sample,
            token_ids=rollout.answer,
            stopped=rollout.finish_reason == STOP and not cut,
            cut=cut,
            streamed=self._request.stream,
        )
        self._shown[index] = answered["shown"]
        count = len(rollout.answer)
        unsaid = [] if self._request.stream else rollout.answer
        piece = await self._say(choice, answered["text"], unsaid, rollout.logprobs[-count:] if unsaid else [])
        piece.finish_reason = rollout.finish_reason
        piece.tool_calls.extend(session_pb2.ToolCall(**call) for call in answered["tool_calls"])
        piece.prompt_token_count, piece.completion_token_count = prompt_token_count, count
        piece.cached_token_count = max(0, rollout.cached_token_count - cached_before)
        self._news.set()

    async def _say(
        self, choice: int, text: str, token_ids: Sequence[int], logprobs: Sequence[float]
    ) -> session_pb2.RunTurnResponse:
        """Add to the piece that the reader takes next."""
        tokens: list[session_pb2.TokenPiece] = []
        if self._request.logprobs and token_ids:
            spelt = await self._memory.call(self.epoch, "spell", token_ids=list(token_ids))
            tokens = [
                session_pb2.TokenPiece(token_id=token_id, text=said, logprob=logprob)
                for token_id, said, logprob in zip(token_ids, spelt["texts"], logprobs, strict=True)
            ]
        piece = self._pending.setdefault(choice, session_pb2.RunTurnResponse(choice_index=choice))
        piece.text += text
        piece.tokens.extend(tokens)
        if text or tokens:
            self._news.set()
        return piece

    def _check_sampling(self) -> None:
        own = self._samples.assignment.sampling.temperature
        asked = self._request
        if asked.HasField("temperature") and abs(asked.temperature - own) > 1e-4:
            raise SamplingBiased(
                f"temperature: this session is sampled at {own:g}, which its tokens train at; open it with another",
                field="temperature",
            )
        if asked.HasField("top_p") and asked.top_p != 1:
            raise SamplingBiased("top_p: it cuts tokens off, which training must not", field="top_p")
