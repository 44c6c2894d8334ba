"""The rollouts of a group whose environment takes turns: each member has its own episode and goes at its own pace.

Members whose first prompts are equal share the request of their first turn; from there each asks by itself. A member
that fails, or takes longer than its limit, ends alone and with its reason.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.common.errors import (
    ContextTooLong,
    DeadlineExceeded,
    EnvironmentFailed,
    EnvironmentReplaced,
    RolloutTimeout,
    SandboxAway,
    SlipstreamError,
)
from slipstream.runner import telemetry
from slipstream.runner.cut_turns import CutTurns
from slipstream.runner.envclient import EndedEpisode, OpenEpisode, ScoredSample, TaskKey, TurnPrompt
from slipstream.runner.envpool import EnvironmentPool
from slipstream.runner.rollout import STOP, Rollout
from slipstream.runner.spares import spares_of
from slipstream.runner.traces import AttemptTraces
from slipstream.runner.turn_log import TurnLog
from slipstream.runner.turns import Conversation, TurnClient

log = structlog.get_logger()

MAX_REPLAYS = 3
"""Times that an episode begins again in another process, as others blocked its own."""


@dataclass
class Member:
    """One rollout of a group."""

    index: int
    prompt_text: str = ""
    samples: list[Rollout] = field(default_factory=list[Rollout])
    score: ScoredSample | None = None
    conversations: list[list[dict[str, Any]]] = field(default_factory=list[list[dict[str, Any]]])
    turn_count: int = 1
    cut: str = ""
    """The limit that ended it, as in `limits.Cut`; empty where its environment did."""
    failure: SlipstreamError | None = None
    episode: int = -1
    """Its number in the environment's processes."""
    prompts: list[TurnPrompt] = field(default_factory=list[TurnPrompt])
    """All that its episode has asked."""
    told: list[tuple[list[int], bool]] = field(default_factory=list[tuple[list[int], bool]])
    """Turns that its episode has answered, each with whether it stopped by itself."""
    replays: int = 0

    def take(self, prompt: TurnPrompt) -> Rollout:
        """Put a prompt where its turn is sampled: at the end of its sample, or as another one.

        What another one shares with an earlier is a prompt there, which nobody sampled for it: no token trains twice.
        """
        if prompt.begun:
            if prompt.base_token_count:
                rollout = self.samples[prompt.base_sample].branch(prompt.base_token_count, prompt.token_ids)
            else:
                rollout = Rollout(prompt.token_ids, prompt.role)
            self.samples.append(rollout)
        else:
            rollout = self.samples[prompt.sample]
            rollout.hear(prompt.token_ids)
        rollout.turn_limit_tokens = prompt.max_new_tokens
        return rollout


class EpisodeGroup:
    """One attempt at a group."""

    def __init__(
        self,
        environments: EnvironmentPool,
        turns: TurnClient,
        assignment: runner_pb2.GroupAssignment,
        task: TaskKey,
        deadline_s: float,
        turn_log: TurnLog,
        cut_turns: CutTurns,
    ) -> None:
        """`deadline_s`: in `time.monotonic()` terms. `turn_log`: where turns that end are kept."""
        self._cut_turns = cut_turns
        self._turn_log = turn_log
        self._environments = environments
        self._turns = turns
        self._assignment = assignment
        self._task = task
        self._deadline_s = self._group_deadline_s = deadline_s
        self._conversation: Conversation
        self._open: set[int] = set()
        self._spares = spares_of(assignment)
        self._running: list[asyncio.Task[None]] = []
        self.sandbox_executions = 0
        self._traces = AttemptTraces(assignment)

    async def run(self) -> list[Member]:
        """All members, each with a score or a failure, or neither where enough others had ended before. Cancelling it
        frees the engines' blocks first.

        Raises `SlipstreamError` where no episode could be opened, and `SandboxAway` where a member needed what is away:
        the whole group is run again then, as those of one turn are.
        """
        count = self._assignment.sample_count
        with self._traces.span("setup", range(count)):
            opened = await self._environments.open(self._task, count)
        self._open = {each.number for each in opened.members if isinstance(each, OpenEpisode)}
        if opened.timeout_s:
            self._deadline_s = min(self._deadline_s, time.monotonic() + opened.timeout_s)
        if not self._assignment.sampling.stop_token_ids:
            self._assignment.sampling.stop_token_ids.extend(opened.stop_token_ids)
        self._conversation = self._turns.begin_apart(self._assignment, self._turn_log)
        members = [Member(index) for index in range(count)]
        alike: dict[tuple[tuple[int, ...], int], list[tuple[Member, OpenEpisode]]] = {}
        for member, episode in zip(members, opened.members, strict=True):
            if isinstance(episode, SlipstreamError):
                self._fail(member, episode)
            else:
                member.prompt_text, member.episode = episode.text, episode.number
                key = tuple(episode.prompt.token_ids), episode.prompt.max_new_tokens
                alike.setdefault(key, []).append((member, episode))
        ended = False
        try:
            async with asyncio.TaskGroup() as group:
                self._running += [group.create_task(self._run_alike(together)) for together in alike.values()]
            for member in members:
                if isinstance(member.failure, SandboxAway) and not (self._spares is not None and self._spares.enough):
                    raise member.failure
            ended = True
            for member in members:
                if member.score is None:
                    self._conversation.release_routes_of(member.samples)
        finally:
            if not ended:  # cancelled, or to be run again: nobody will ask for its routes
                self._conversation.release_routes()
            for number in self._open:
                self._environments.abandon(number)
        return members

    async def _run_alike(self, together: Sequence[tuple[Member, OpenEpisode]]) -> None:
        """Members that have the same first prompt."""
        indexes: list[int] = []
        for member, episode in together:
            indexes.append(self._take_prompt(member, episode.prompt))
        try:
            async with self._in_time():
                await self._conversation.sample(indexes, self._deadline_s)
        except SlipstreamError as error:
            for member, _ in together:
                self._fail(member, error)
            return
        async with asyncio.TaskGroup() as group:
            for member, _ in together:
                self._cut_turns.note(self._assignment, member.samples[0])
                group.create_task(self._run_member(member))

    async def _run_member(self, member: Member) -> None:
        """From the end of its first turn on."""
        sample, cut = 0, ""
        try:
            async with self._in_time():
                while True:
                    rollout = member.samples[sample]
                    stopped = rollout.finish_reason == STOP
                    asked_s = time.monotonic()
                    with self._traces.span("tools", [member.index]):
                        prompt = await self._turn(member, rollout.answer, stopped)
                    rollout.timings.tools_s += time.monotonic() - asked_s
                    if prompt is None:
                        break
                    index = self._take_prompt(member, prompt)
                    sample = prompt.sample
                    try:
                        await self._conversation.sample([index], self._deadline_s)
                    except ContextTooLong:
                        member.samples[sample].forget_turn()
                        cut = "context"  # the engine takes less than the model's configuration says
                        break
                asked_s = time.monotonic()
                with self._traces.span("score", [member.index]):
                    ended = await self._end(member, cut)
                member.samples[0].timings.score_s += time.monotonic() - asked_s
        except SlipstreamError as error:
            self._fail(member, error)
            return
        self._open.discard(member.episode)
        self.sandbox_executions += ended.sandbox_executions
        if self._spares is not None:
            if self._spares.enough:
                return
            self._spares.ended(member.index)
            if self._spares.enough:
                for task in self._running:  # and with them those of all members; this one has nothing left to wait for
                    task.cancel()
        member.score, member.conversations, member.turn_count = ended.score, ended.conversations, ended.turn_count
        member.cut = ended.cut
        if ended.cut:
            telemetry.rollouts_cut.labels(self._task.environment, ended.cut).inc()
        member.samples = [each for each in member.samples if each.sampled]

    async def _turn(self, member: Member, answer: list[int], stopped: bool) -> TurnPrompt | None:
        while True:
            try:
                prompt = await self._environments.turn(self._task, member.episode, answer, stopped=stopped)
            except EnvironmentReplaced as error:
                await self._begin_again(member, error)
            else:
                member.told.append((answer, stopped))
                return prompt

    async def _end(self, member: Member, cut: str) -> EndedEpisode:
        while True:
            try:
                return await self._environments.end(self._task, member.episode, cut)
            except EnvironmentReplaced as error:
                await self._begin_again(member, error)

    async def _begin_again(self, member: Member, error: EnvironmentReplaced) -> None:
        """Bring an episode to where it was, in another process: it is told the turns that it had answered.

        Raises `EnvironmentFailed` where it says something else than before: it is no pure function of what it is told.
        """
        while member.replays < MAX_REPLAYS:
            member.replays += 1
            self._open.discard(member.episode)
            try:
                (opened,) = (await self._environments.open(self._task, 1)).members
                if isinstance(opened, SlipstreamError):
                    raise opened
                member.episode = opened.number
                self._open.add(opened.number)
                said: list[TurnPrompt | None] = [opened.prompt]
                for answer, stopped in member.told:
                    said.append(await self._environments.turn(self._task, opened.number, answer, stopped=stopped))
            except EnvironmentReplaced:
                continue
            if [prompt for prompt in said if prompt is not None] != member.prompts:
                message = "its process was replaced, and the episode that began again went otherwise"
                raise EnvironmentFailed(message, environment=self._task.environment)
            telemetry.episodes_begun_again.labels(self._task.environment).inc()
            return
        raise error

    def _take_prompt(self, member: Member, prompt: TurnPrompt) -> int:
        """Put the prompt where its turn is sampled; returns the index it is asked for with.

        Draws are those of seed, index and position: samples of a member have indexes of their own.
        """
        index = member.index + self._assignment.sample_count * prompt.sample
        rollout = member.take(prompt)
        member.prompts.append(prompt)
        if prompt.begun:
            telemetry.samples_begun.labels(self._task.environment, prompt.begun).inc()
            self._conversation.add(index, rollout)
        return index

    def _fail(self, member: Member, error: SlipstreamError) -> None:
        member.failure = error
        telemetry.rollouts_failed.labels(self._task.environment, error.reason).inc()
        log.info("rollout_failed", group_id=self._assignment.group_id, sample=member.index, reason=error.reason)
        self._conversation.release_routes_of(member.samples)
        member.samples = []
        if member.episode in self._open:
            self._environments.abandon(member.episode)
            self._open.discard(member.episode)

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Ends what is inside at the deadline, with the error that says whose it was."""
        limit = asyncio.timeout(max(self._deadline_s - time.monotonic(), 0))
        try:
            async with limit:
                yield
        except (TimeoutError, DeadlineExceeded) as error:
            if isinstance(error, TimeoutError) and not limit.expired():
                raise
            if self._deadline_s < self._group_deadline_s:
                raise RolloutTimeout("the rollout took longer than rollout_timeout_s allows") from error
            raise DeadlineExceeded("the rollout did not end before the group's deadline") from error
