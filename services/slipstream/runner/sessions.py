"""Groups whose members are sessions of outside agents: from assignment to report.

What a turn sampled, and how a session ended, is on disk before anybody hears of it (`session_log.py`), so that a
restarted runner goes on with the sessions of the one before it: agents repeat the turn that broke off.

| loop of a group | takes | waits for | unblocked by |
|---|---|---|---|
| end | members that end | a member's end, the earliest timeout | EndSession; time |
| each turn | one turn of a session | workers' tokens | the engines, or whoever ends it |
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import structlog

from slipstream.api.rollout.v1 import runner_pb2, session_pb2
from slipstream.common.errors import (
    Draining,
    EnvironmentFailed,
    SessionBusy,
    SessionEnded,
    SessionUnknown,
    SlipstreamError,
    Unreachable,
)
from slipstream.runner import telemetry
from slipstream.runner.attempt import attempt_name
from slipstream.runner.config import SessionLimits
from slipstream.runner.envclient import EnvironmentWorker, ScoredSample
from slipstream.runner.records import Finished, Recorder
from slipstream.runner.rollout import Rollout
from slipstream.runner.rollout_record import records_of
from slipstream.runner.session_limits import limit_reached
from slipstream.runner.session_log import Gap, KeptEnd, KeptTurn, SessionLog
from slipstream.runner.session_memory import SessionMemory
from slipstream.runner.session_turn import Samples, Turn
from slipstream.runner.spool import Rows, Spool
from slipstream.runner.teacher import TeacherClient
from slipstream.runner.turns import TurnClient
from slipstream.runner.unfinished import Unfinished

log = structlog.get_logger()

KNOWN_WAIT_S = 2.0
"""A session may be told to its agent a moment before its group arrives here."""
_NAME = re.compile(r"session-[0-9a-f]{32}-\d+")
"""What is called otherwise was never told to anybody."""
END_TIMEOUT_S = 8.0
TEXTS_TIMEOUT_S = 30.0
"""How long a group whose sessions are all over waits for their texts, in seconds: for a process that starts, say."""


@dataclass
class Member:
    """One session."""

    session_id: str
    samples: Samples
    asked_s: float
    """When something was last asked of it, in `time.monotonic()` terms."""
    turns: set[Turn] = field(default_factory=set[Turn])
    closing: bool = False
    ending: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is closed: whoever closes it again meanwhile hears what became of that."""
    reward: session_pb2.EndSessionRequest | None = None
    """What it was closed with."""
    ended: str = ""
    """Why, where it is not trained on."""
    memory: SessionMemory = field(init=False)
    """Its conversation."""

    @property
    def over(self) -> bool:
        return self.reward is not None or bool(self.ended)


class SessionGroup:
    """One attempt at a group."""

    def __init__(
        self,
        assignment: runner_pb2.GroupAssignment,
        texts: EnvironmentWorker,
        turns: TurnClient,
        spool: Spool,
        limits: SessionLimits,
        unfinished: Unfinished | None = None,
    ) -> None:
        """`unfinished`: what an earlier process left of it, for `take_up`."""
        now = time.monotonic()
        self.assignment = assignment
        self.began_s = now - (unfinished.elapsed_s if unfinished else 0.0)
        self._texts = texts
        self._limits = limits
        self._log = SessionLog(spool, attempt_name(assignment))
        self._unfinished = unfinished
        self._conversation = turns.begin_apart(assignment, taken_up=unfinished.resumed_count if unfinished else 0)
        self._idle_s = assignment.session_group.idle_timeout_ms / 1000
        self.deadline_s = self.began_s + assignment.deadline_ms / 1000
        self._changed = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._cancelled = self.left = False
        names = [f"{assignment.session_group.name}-{index}" for index in range(assignment.sample_count)]
        self.members = [
            Member(name, Samples(name, index, assignment, self._conversation), now) for index, name in enumerate(names)
        ]
        for member in self.members:
            member.memory = self._memory_of(member)

    def _memory_of(self, member: Member) -> SessionMemory:
        samples = member.samples

        def lost() -> None:
            if not member.over:
                self._give_up(member, "TURNS_LOST")

        return SessionMemory(
            member.session_id,
            samples.index,
            self._texts,
            self._log,
            lambda: list(member.turns),
            lambda: samples.turn_count,
            lost,
        )

    async def take_up(self) -> None:
        """Be where the earlier process was, as far as its files say. A member whose turns are not all there ends."""
        assert self._unfinished is not None
        try:
            epoch = await self._texts.up()
        except EnvironmentFailed:  # whatever process comes up later is told when something is asked
            epoch = 0
        try:
            for kept in self._log.read(self._unfinished.session_records):
                member = self.members[kept.index]
                match kept:
                    case _ if member.over:
                        pass
                    case KeptTurn():
                        await self._take_up_turn(member, kept, epoch)
                    case KeptEnd(reason=""):
                        member.reward = kept.request
                    case KeptEnd():
                        member.ended = kept.reason
                    case Gap():
                        self._give_up(member, "TURNS_LOST")
        except BaseException:
            if not self.left:
                self._conversation.release_routes()
            raise
        self._log.done_reading()
        for member in self.members:
            member.memory.epoch = epoch
        turn_count = sum(member.samples.turn_count for member in self.members)
        telemetry.turns_recalled.inc(turn_count)
        telemetry.groups_taken_up.labels("resumed" if turn_count else "started_over").inc()
        log.info("sessions_taken_up", group=self.assignment.session_group.name, turn_count=turn_count)

    async def _take_up_turn(self, member: Member, kept: KeptTurn, epoch: int) -> None:
        member.samples.take_up(kept)
        try:
            await member.memory.take_up(epoch, kept)
        except Unreachable:
            pass  # as above
        except EnvironmentFailed as error:
            log.warning("session_not_taken_up", session_id=member.session_id, detail=error.message)
            self._give_up(member, "TURNS_LOST")

    def leave(self) -> None:
        """This process ends, and the next one goes on: turns that run are asked again there."""
        self.left = True
        for member in self.members:
            for turn in list(member.turns):
                turn.end(Draining("the session's runner is being started again"))

    async def run(self) -> list[Finished]:
        """Wait until all members are over. Cancelling it aborts their turns and frees the engines' blocks first."""
        finished = False
        try:
            async with asyncio.TaskGroup() as self._tasks:
                try:
                    while open_members := [member for member in self.members if not member.over]:
                        self._expire(open_members)
                        await self._until_changed(open_members)
                except asyncio.CancelledError:
                    self._cancelled = True
                    raise
            closed = [member for member in self.members if member.reward is not None]
            said = await self._conversations(closed)
            group = [_finished(member, said.get(member.session_id, [])) for member in closed]
            finished = True
            return group
        finally:
            for member in () if self.left else self.members:
                member.ended = member.ended or ("" if finished else "GROUP_ENDED")
                if not finished or member.reward is None:
                    self._conversation.release_routes_of(list(member.samples.rollouts.values()))
                    self._texts.tell_session(member.session_id, "close")

    def begin(self, member: Member, request: session_pb2.RunTurnRequest) -> Turn:
        """Start a turn."""
        if member.over or member.closing:
            raise _ended(member)
        if self.left:
            raise Draining("the session's runner is being started again")
        if self._cancelled:
            raise SessionEnded("the session ends with its group", session_reason="GROUP_ENDED")
        limits = self._limits
        if len(member.turns) >= limits.max_running_turns:
            limit = limits.max_running_turns
            raise SessionBusy(
                f"{limit} turns of this session run already (runner.sessions.max_running_turns)",
                name="runner.sessions.max_running_turns",
                limit=limit,
            )
        if member.samples.turn_count + len(member.turns) >= limits.max_turns:
            raise limit_reached("max_turns", limits.max_turns, "turns")
        told = {"max_samples": limits.max_samples, "max_text_bytes": limits.max_text_bytes}
        turn = Turn(member.samples, member.memory, request, told, self._log)
        member.turns.add(turn)
        member.asked_s = time.monotonic()

        def done() -> None:
            member.turns.discard(turn)
            member.asked_s = time.monotonic()

        assert self._tasks is not None
        turn.start(self._tasks, self.deadline_s, done)
        return turn

    async def end(self, member: Member, request: session_pb2.EndSessionRequest) -> None:
        """Close a member, or discard it."""
        async with member.ending:
            try:
                await self._end(member, request)
            finally:
                member.closing = False

    async def _end(self, member: Member, request: session_pb2.EndSessionRequest) -> None:
        if member.reward is not None or (request.discard and member.ended == "DISCARDED"):
            return
        if member.over:
            raise _ended(member)
        member.closing = True
        running = [turn.task for turn in member.turns if turn.task is not None]
        for turn in list(member.turns):
            turn.end(SessionEnded("the session was closed", session_reason="CLOSED"))
        if running:
            await asyncio.wait(running, timeout=END_TIMEOUT_S)
        if request.discard:
            self._give_up(member, "DISCARDED")
        elif not member.samples.sampled:
            self._give_up(member, "NO_TURNS")
            raise _ended(member)
        else:
            member.reward = request
            self._log.keep_end(member.samples.index, "", request)
            self._changed.set()

    def _expire(self, members: list[Member]) -> None:
        now = time.monotonic()
        for member in members:
            if now >= self.deadline_s:
                self._give_up(member, "DEADLINE")
            elif not member.turns and not member.closing and now >= member.asked_s + self._idle_s:
                self._give_up(member, "IDLE_TIMEOUT")

    def _give_up(self, member: Member, reason: str) -> None:
        member.ended = reason
        self._log.keep_end(member.samples.index, reason)
        log.info("session_ended", session_id=member.session_id, reason=reason)
        for turn in list(member.turns):
            turn.end(_ended(member))
        self._changed.set()

    async def _until_changed(self, members: list[Member]) -> None:
        self._changed.clear()
        if all(member.over for member in members):
            return
        idle_s = min((m.asked_s + self._idle_s for m in members if not m.turns and not m.over), default=self.deadline_s)
        # A turn that ends meanwhile begins an idle time: looked at again after a second at most.
        wait_s = min(idle_s, self.deadline_s, time.monotonic() + 1.0) - time.monotonic()
        try:
            async with asyncio.timeout(max(wait_s, 0.001)):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _conversations(self, members: list[Member]) -> dict[str, list[list[dict[str, Any]]]]:
        """What was said in each session, by its id, as far as its text comes in time: it is for people alone."""
        said: dict[str, list[list[dict[str, Any]]]] = {}

        async def close(member: Member) -> None:
            with suppress(SlipstreamError):
                epoch = await member.memory.ready()
                said[member.session_id] = (await member.memory.call(epoch, "close"))["conversations"]

        with suppress(TimeoutError):
            async with asyncio.timeout(TEXTS_TIMEOUT_S), asyncio.TaskGroup() as tasks:
                for member in members:
                    tasks.create_task(close(member))
        for member in members:
            if member.session_id not in said:
                log.info("session_text_unknown", session_id=member.session_id)
                self._texts.tell_session(member.session_id, "close")
        return said


class SessionRunner:
    """The session groups of a runner."""

    def __init__(
        self,
        texts: EnvironmentWorker,
        turns: TurnClient,
        spool: Spool,
        recorder: Recorder,
        write_rollouts: Callable[[list[dict[str, Any]]], None],
        address: str,
        limits: SessionLimits,
        teacher: TeacherClient | None = None,
    ) -> None:
        """`address`: where they are served. `limits`: of each. `teacher`: who judges what they sampled."""
        self.address = address
        self._limits = limits
        self._texts = texts
        self._turns = turns
        self._spool = spool
        self._recorder = recorder
        self._write_rollouts = write_rollouts
        self._teacher = teacher
        self._open: dict[str, tuple[SessionGroup, Member]] = {}
        self._groups: set[SessionGroup] = set()
        """Those that run, with those whose sessions are not open yet, or no longer."""
        self._wanted = asyncio.Event()
        self._news = asyncio.Event()
        telemetry.sessions_open.read_from(lambda: sum(not member.over for _, member in self._open.values()))

    async def texts_loop(self) -> None:
        """Keep the process that turns text into tokens, from the first session on: environments' code cannot end it."""
        await self._wanted.wait()
        await self._texts.run()

    async def run(
        self, assignment: runner_pb2.GroupAssignment, unfinished: Unfinished | None = None
    ) -> runner_pb2.GroupReport:
        """Run a group; `unfinished` is what an earlier process left of it.

        A finished one is in the spool when this returns.
        """
        self._wanted.set()
        group = SessionGroup(assignment, self._texts, self._turns, self._spool, self._limits, unfinished)
        self._groups.add(group)
        try:
            finished = await self._finished(group, taken_up=unfinished is not None)
            return await self._report_of(group, finished)
        finally:
            self._groups.discard(group)

    async def _finished(self, group: SessionGroup, *, taken_up: bool) -> list[Finished]:
        """Have a group's sessions open until all are over."""
        try:
            if taken_up:
                await group.take_up()
            self._open |= {member.session_id: (group, member) for member in group.members}
            self._news.set()
            self._news.clear()
            return await group.run()
        finally:
            for member in group.members:
                self._open.pop(member.session_id, None)

    async def _report_of(self, group: SessionGroup, finished: list[Finished]) -> runner_pb2.GroupReport:
        """What became of a group; rows of a finished one are in the spool when this returns."""
        assignment = group.assignment
        report = runner_pb2.GroupReport(
            group=runner_pb2.GroupAttempt(group_id=assignment.group_id, attempt=assignment.attempt)
        )
        if not finished:
            report.outcome = runner_pb2.GROUP_OUTCOME_FAILED
            report.reason = "NO_SESSION_CLOSED"
            report.detail = "none of its sessions was closed with a reward"
            return report
        try:
            await self._judge(group, finished)
        except SlipstreamError as error:
            report.outcome = runner_pb2.GROUP_OUTCOME_FAILED
            report.reason, report.detail = error.reason, error.message[:4096]
            return report
        rows: dict[str, Rows] = {}
        report.outcome = runner_pb2.GROUP_OUTCOME_FINISHED
        closed = {member.samples.index: member.reward for member in group.members}
        for each in finished:
            record = self._recorder.record(assignment, each, rows)
            closing = closed[each.index]
            if closing is not None and closing.HasField("advantage"):
                record.advantage = closing.advantage
            report.rollouts.append(record)
        telemetry.rollouts.labels(assignment.environment).inc(len(report.rollouts))
        duration_s = time.monotonic() - group.began_s
        report.duration_ms = int(duration_s * 1000)
        self._write_rollouts(records_of(assignment, finished, duration_s))
        try:
            await self._spool.keep(attempt_name(assignment), report, rows)
        except asyncio.CancelledError:
            self._release(group, [sample for each in finished for sample in each.samples])
            raise
        return report

    async def _judge(self, group: SessionGroup, finished: list[Finished]) -> None:
        """Have the teacher judge what was sampled. What agents did is not done again for a teacher that is away: it is
        waited for until the group's deadline."""
        if self._teacher is None:
            return
        samples = [sample for each in finished for sample in each.samples]
        try:
            await self._teacher.judge(samples, group.assignment.sampling.temperature, until_s=group.deadline_s)
        except SlipstreamError:
            self._turns.release_routes(samples)
            raise
        except BaseException:
            self._release(group, samples)
            raise

    def _release(self, group: SessionGroup, samples: list[Rollout]) -> None:
        """Nobody will ask for the routes of a group that was given up; the next process goes on with one that is left,
        and has it judged."""
        if not group.left:
            self._turns.release_routes(samples)

    def leave(self) -> None:
        """Let the next process of this runner go on with all of them."""
        for group in self._groups:
            group.leave()

    async def find(self, session_id: str) -> tuple[SessionGroup, Member]:
        """An open session. Waits a little for one that is not here yet. Raises `SessionUnknown`."""
        ends_s = time.monotonic() + (KNOWN_WAIT_S if _NAME.fullmatch(session_id) else 0.0)
        while session_id not in self._open:
            try:
                async with asyncio.timeout(ends_s - time.monotonic()):
                    await self._news.wait()
            except TimeoutError:
                raise SessionUnknown(f"session {session_id!r} is not here", session_id=session_id) from None
        return self._open[session_id]

    def ended(self) -> Iterator[runner_pb2.EndedSession]:
        """Sessions that ended without a reward, of groups that go on."""
        for session_id, (_, member) in self._open.items():
            if member.ended:
                yield runner_pb2.EndedSession(session_id=session_id, reason=member.ended)


def _finished(member: Member, said: list[list[dict[str, Any]]]) -> Finished:
    assert member.reward is not None
    score = ScoredSample(member.reward.reward, member.reward.reward > 0, said[0][-1]["content"] if said else "")
    return Finished(member.samples.index, member.samples.sampled, score, "", member.samples.turn_count, said)


def _ended(member: Member) -> SessionEnded:
    reason = member.ended or "CLOSED"
    return SessionEnded(f"the session has ended: {reason}", session_reason=reason)
