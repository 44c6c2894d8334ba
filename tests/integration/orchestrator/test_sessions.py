"""Sessions of outside agents as groups of training, over gRPC, with a stand-in for their runner."""

from __future__ import annotations

import asyncio
import hashlib
import os
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from slipstream.api.rollout.v1 import rollout_pb2, runner_pb2, session_pb2, session_pb2_grpc
from slipstream.api.run.v1 import run_pb2
from slipstream.common.errors import (
    GatewayAbsent,
    InvalidRequest,
    RequestIdReused,
    RunEnded,
    SamplingBiased,
    SessionEnded,
    SessionKeyLost,
    SessionsFull,
    SessionUnknown,
    rpc_errors,
)
from slipstream.common.runtime import build_server
from slipstream.orchestrator.config import SessionsConfig
from slipstream.orchestrator.journal import read_journal
from slipstream.orchestrator.journal_check import check_records

Make = Callable[..., Any]
URL = "http://127.0.0.1:1/v1"
OPEN, CLOSED, TRAINED, ENDED = (
    rollout_pb2.SESSION_STATE_OPEN,
    rollout_pb2.SESSION_STATE_CLOSED,
    rollout_pb2.SESSION_STATE_TRAINED,
    rollout_pb2.SESSION_STATE_ENDED,
)


class SessionRunner(session_pb2_grpc.SessionServiceServicer):
    """Takes every reward, but for sessions that have `ended`."""

    def __init__(self) -> None:
        self.ends: dict[str, session_pb2.EndSessionRequest] = {}
        self.ended: dict[str, str] = {}

    async def EndSession(self, request: session_pb2.EndSessionRequest, context: Any) -> session_pb2.EndSessionResponse:
        if request.session_id in self.ended:
            reason = self.ended[request.session_id]
            raise SessionEnded(f"it has ended: {reason}", session_reason=reason)
        self.ends[request.session_id] = request
        return session_pb2.EndSessionResponse()


class Agent:
    """Opens and closes sessions, as a third party would."""

    def __init__(self, world: Any, runner: SessionRunner) -> None:
        self.world, self.runner = world, runner

    async def open(self, request_id: str = "", wait_ms: int = 20_000, **fields: Any) -> rollout_pb2.OpenSessionResponse:
        request = rollout_pb2.OpenSessionRequest(request_id=request_id or uuid.uuid4().hex, wait_ms=wait_ms, **fields)
        with rpc_errors():
            return await self.world.rollouts.OpenSession(request, timeout=60)

    async def close(self, session_id: str, reward: float = 0.0, **fields: Any) -> rollout_pb2.Session:
        request = rollout_pb2.CloseSessionRequest(
            request_id=uuid.uuid4().hex, session_id=session_id, reward=reward, **fields
        )
        with rpc_errors():
            return (await self.world.rollouts.CloseSession(request, timeout=60)).session

    async def get(self, session_id: str) -> rollout_pb2.Session:
        request = rollout_pb2.GetSessionRequest(session_id=session_id)
        with rpc_errors():
            return (await self.world.rollouts.GetSession(request, timeout=60)).session

    async def until(self, session_id: str, state: rollout_pb2.SessionState) -> rollout_pb2.Session:
        async with asyncio.timeout(60):
            while (session := await self.get(session_id)).state != state:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return session

    async def assigned(self, *opening: Any) -> tuple[runner_pb2.GroupAssignment, list[rollout_pb2.OpenSessionResponse]]:
        """The group that these openings make, as the runner gets it."""
        waiting = [asyncio.ensure_future(each) for each in opening]
        async with asyncio.timeout(60):
            while self._arrived < len(waiting):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (group,) = await self.world.acquire(count=1, wait_ms=20_000)
        return group, [await each for each in waiting]

    @property
    def _arrived(self) -> int:
        return sum(len(group.openings) for group in self.world.orchestrator.sequencer.line if group.trains)

    def report(self, group: runner_pb2.GroupAssignment) -> runner_pb2.GroupReport:
        """A report of the members that were closed, as their rewards say."""
        report = self.world.finished(group)
        kept = []
        for record in report.rollouts:
            end = self.runner.ends.get(f"{group.session_group.name}-{record.sample_index}")
            if end is not None and not end.discard:
                record.reward = end.reward
                if end.HasField("advantage"):
                    record.advantage = end.advantage
                kept.append(record)
        del report.rollouts[:]
        report.rollouts.extend(kept)
        return report


@pytest.fixture
def make_agent(make_world: Make, make_config: Make) -> Make:
    """`async with make_agent(total_steps=3) as agent:`; the base model is served, and nothing has been handed out."""

    @asynccontextmanager
    async def make(published: int = 0, **fields: Any) -> AsyncIterator[Agent]:
        runner = SessionRunner()
        add = session_pb2_grpc.add_SessionServiceServicer_to_server
        server, port = build_server(make_config(), [(add, runner, "SessionService")])
        await server.start()
        try:
            async with make_world(**{"gateway_url": URL, "groups_per_step": 1, **fields}) as world:
                world.session_address = f"127.0.0.1:{port}"
                world.publish(published)
                await world.until(lambda run: run.phase == "training")
                yield Agent(world, runner)
        finally:
            await server.stop(None)

    return make


async def test_sessions_of_a_key_are_a_group_and_train_with_its_advantages(make_agent: Make) -> None:
    async with make_agent() as agent:
        group, opened = await agent.assigned(*(agent.open(group_key="task-7", group_size=2) for _ in range(2)))
        assert (group.position, group.sample_count, group.purpose) == (0, 2, runner_pb2.GROUP_PURPOSE_TRAINING)
        ids = [answer.session_id for answer in opened]
        assert sorted(ids) == [f"{group.session_group.name}-{index}" for index in range(2)]
        assert {answer.session.base_url for answer in opened} == {URL}
        assert {answer.address for answer in opened} == {agent.world.session_address}
        assert all(answer.session.state == OPEN for answer in opened)
        assert len({answer.key for answer in opened}) == 2

        for session_id, reward in zip(sorted(ids), (1.0, 0.0), strict=True):
            assert (await agent.close(session_id, reward)).state == CLOSED
        assert (await agent.close(ids[0], 9.0)).reward != 9.0, "it was closed already"
        await agent.world.report(agent.report(group))
        plan = (await agent.world.plan(1)).plan
        sequences = [sequence for batch in plan.micro_batches for sequence in batch.sequences]
        assert [sequence.reward for sequence in sequences] == [1.0, 0.0]
        assert sequences[0].advantage > 0 > sequences[1].advantage
        await agent.world.train(plan)
        session = await agent.until(ids[0], TRAINED)
        assert session.step == 1
        assert {sequence.environment for sequence in sequences} == {"session"}
        (step,) = agent.world.metrics("step")
        assert step["groups_by_environment"] == {"session": 1}
        assert step["reward_by_environment"] == {"session": 0.5}
        assert set(step["oldest_group_s_by_environment"]) == {"words", "numbers", "session"}
        assert (await agent.world.run()).trained_group_counts == {"session": 1}
        records = read_journal(agent.world.orchestrator.journal.path).records
        assert [r.get("sessions") for r in records if r["kind"] == "acquired"] == [True]


async def test_a_session_alone_trains_with_the_advantage_that_its_caller_gives(make_agent: Make) -> None:
    async with make_agent() as agent:
        group, (opened,) = await agent.assigned(agent.open())
        with pytest.raises(InvalidRequest) as refused:
            await agent.close(opened.session_id, 1.0)
        assert refused.value.metadata["field"] == "advantage"
        await agent.close(opened.session_id, 1.0, advantage=0.25)
        await agent.world.report(agent.report(group))
        plan = (await agent.world.plan(1)).plan
        (sequence,) = [sequence for batch in plan.micro_batches for sequence in batch.sequences]
        assert (sequence.advantage, sequence.reward) == (0.25, 1.0)
        await agent.world.train(plan)
        await agent.until(opened.session_id, TRAINED)


async def test_only_the_key_finds_its_session_and_only_its_hash_is_kept(make_agent: Make) -> None:
    async with make_agent() as agent:
        _, opened = await agent.assigned(*(agent.open(group_key="t", group_size=2) for _ in range(2)))
        for answer in opened:
            found = await agent.world.rollouts.FindSession(
                rollout_pb2.FindSessionRequest(key_sha256=hashlib.sha256(answer.key.encode()).digest()), timeout=60
            )
            assert (found.session.session_id, found.address) == (answer.session_id, agent.world.session_address)
        with pytest.raises(SessionUnknown), rpc_errors():
            await agent.world.rollouts.FindSession(rollout_pb2.FindSessionRequest(key_sha256=b"x" * 32), timeout=60)
        with pytest.raises(InvalidRequest), rpc_errors():
            await agent.world.rollouts.FindSession(rollout_pb2.FindSessionRequest(key_sha256=b"x"), timeout=60)
        kept = repr(list(agent.world.orchestrator.sequencer.sessions.ledger))
        assert not any(answer.key in kept for answer in opened)


async def test_a_repeat_opens_nothing_and_answers_the_same_key(make_agent: Make) -> None:
    async with make_agent() as agent:
        _, (first,) = await agent.assigned(agent.open(request_id="once"))
        assert await agent.open(request_id="once") == first
        listed = await agent.world.rollouts.ListSessions(rollout_pb2.ListSessionsRequest(), timeout=60)
        assert [session.session_id for session in listed.sessions] == [first.session_id]


async def test_sessions_are_listed_in_pages_and_by_label(make_agent: Make) -> None:
    async with make_agent(groups_per_step=4) as agent:
        for number in range(3):
            await agent.assigned(agent.open(labels={"odd": str(number % 2)}))
        token, seen = "", []
        while True:
            request = rollout_pb2.ListSessionsRequest(page_size=2, page_token=token)
            page = await agent.world.rollouts.ListSessions(request, timeout=60)
            seen += [session.labels["odd"] for session in page.sessions]
            token = page.next_page_token
            if not token:
                break
        assert seen == ["0", "1", "0"]
        filtered = rollout_pb2.ListSessionsRequest(filter=rollout_pb2.LabelFilter(labels={"odd": "1"}))
        assert len((await agent.world.rollouts.ListSessions(filtered, timeout=60)).sessions) == 1


async def test_without_a_slot_in_time_the_caller_is_told_and_nothing_waits_on(make_agent: Make) -> None:
    async with make_agent(sessions=SessionsConfig(max_open=1)) as agent:
        with pytest.raises(SessionsFull):
            await agent.open(wait_ms=50)
        assert not any(agent.world.orchestrator.sequencer.line.counts.values())
        await agent.assigned(agent.open())
        with pytest.raises(SessionsFull) as full:
            await agent.open(wait_ms=50)
        assert full.value.metadata["limit"] == "1"


async def test_a_session_too_old_ends_so_and_its_position_gets_an_ordinary_attempt(make_agent: Make) -> None:
    async with make_agent(max_off_policy_steps=0, over_sampling=2.0) as agent:
        group, (opened,) = await agent.assigned(agent.open())
        (other,) = await agent.world.acquire(count=1)
        await agent.world.report(agent.world.finished(other))
        await agent.world.train((await agent.world.plan(1)).plan)
        session = await agent.close(opened.session_id, 1.0, advantage=1.0)
        assert (session.state, session.reason) == (ENDED, "AGED_OUT")
        given_up = [(r["environment"], r["groups"], r["count"]) for r in agent.world.metrics("cancelled")]
        assert given_up == [("session", 1, 1)], "one session, whatever a group of the run's own has"
        cancelled = (await agent.world.heartbeat()).cancellations
        assert [c.group.group_id for c in cancelled] == [group.group_id]
        again = await agent.world.acquire(count=1, wait_ms=20_000)
        assert (again[0].position, again[0].attempt, again[0].HasField("session_group")) == (0, 2, False)


async def test_the_session_of_a_lost_runner_ends_and_says_so(make_agent: Make) -> None:
    async with make_agent() as agent:
        _, (opened,) = await agent.assigned(agent.open())
        told = ""
        for _ in range(2):  # a process of the runner that has taken up nothing
            beat = runner_pb2.HeartbeatRequest(runner_id="runner-1", runner_epoch="2", reported_to_epoch=told)
            told = (await agent.world.runners.Heartbeat(beat, timeout=60)).orchestrator_epoch
        assert (await agent.get(opened.session_id)).reason == "RUNNER_LOST"


async def test_what_the_runner_says_of_a_session_is_what_its_client_hears(make_agent: Make) -> None:
    async with make_agent(groups_per_step=2) as agent:
        group, opened = await agent.assigned(*(agent.open(group_key="t", group_size=3) for _ in range(2)))
        first, second = sorted(answer.session_id for answer in opened)
        agent.runner.ended[first] = "IDLE_TIMEOUT"
        assert (await agent.close(first, 1.0)).reason == "IDLE_TIMEOUT"
        ended = [
            runner_pb2.EndedSession(session_id=second, reason="NO_TURNS"),
            runner_pb2.EndedSession(session_id=f"{group.session_group.name}-2", reason="IDLE_TIMEOUT"),
        ]
        await agent.world.runners.Heartbeat(
            runner_pb2.HeartbeatRequest(runner_id="runner-1", runner_epoch="1", ended_sessions=ended), timeout=60
        )
        assert (await agent.get(second)).reason == "NO_TURNS"
        another, _ = await agent.assigned(agent.open(group_key="t", group_size=3))
        assert another.position != group.position, "a place that was given up is no place"


async def test_discarded_sessions_are_not_trained(make_agent: Make) -> None:
    async with make_agent() as agent:
        group, opened = await agent.assigned(*(agent.open(group_key="t", group_size=2) for _ in range(2)))
        for answer in opened:
            assert (await agent.close(answer.session_id, discard=True)).reason == "DISCARDED"
        await agent.world.report(agent.report(group))
        records = read_journal(agent.world.orchestrator.journal.path).records
        assert [(r["position"], r["outcome"]) for r in records if r["kind"] == "ended"] == [(0, "failed")]
        assert not agent.world.orchestrator.sequencer.failures.streaks, "an agent that gives up must not end the run"


async def test_in_a_run_of_sessions_alone_no_task_is_run(make_agent: Make) -> None:
    async with make_agent(sessions=SessionsConfig(only=True)) as agent:
        assert await agent.world.acquire(count=4, wait_ms=100) == []
        group, _ = await agent.assigned(agent.open())
        assert group.HasField("session_group")


async def test_who_waits_longest_of_those_that_may_go_goes_first_of_whichever_kind(make_agent: Make) -> None:
    async with make_agent(groups_per_step=1, max_off_policy_steps=0) as agent:
        world = agent.world

        async def create() -> str:
            request = rollout_pb2.CreateRolloutRequest(request_id=uuid.uuid4().hex, prompt="hello", sample_count=1)
            return (await world.rollouts.CreateRollout(request, timeout=60)).rollout.group_id

        async def wait_for(count: int) -> None:
            async with asyncio.timeout(60):
                while world.orchestrator.sequencer.line.counts["session"] < count:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

        first = await create()
        openings = [asyncio.ensure_future(agent.open())]
        await wait_for(1)
        second = await create()
        openings.append(asyncio.ensure_future(agent.open()))
        await wait_for(2)
        third = await create()
        assert world.orchestrator.sequencer.line.counts == {"session": 2, "external": 3}
        # The one slot is the first session's; the other, which may not go, holds up nobody behind it.
        groups = await world.acquire(count=8, wait_ms=20_000)
        assert [each.group_id for each in groups] == [first, "train-0", second, third]
        opened = await openings[0]
        assert opened.session_id.startswith(groups[1].session_group.name)
        await agent.close(opened.session_id, 1.0, advantage=1.0)
        await world.report(agent.report(groups[1]))
        await world.train((await world.plan(1)).plan)
        (group,) = await world.acquire(count=8, wait_ms=20_000)
        assert (await openings[1]).session_id.startswith(group.session_group.name)


async def test_sampling_that_cuts_tokens_off_is_refused(make_agent: Make) -> None:
    async with make_agent() as agent:
        for fields in ({"temperature": 1, "top_p": 0.9}, {"temperature": 0}, {"temperature": 1, "top_k": 5}):
            with pytest.raises(SamplingBiased):
                await agent.open(sampling={"max_new_tokens": 8, **fields})
        group, _ = await agent.assigned(agent.open(sampling={"max_new_tokens": 8, "temperature": 0.5}))
        assert (group.sampling.temperature, group.sampling.max_new_tokens) == (0.5, 8)


async def test_a_run_without_a_gateway_opens_none(make_agent: Make) -> None:
    async with make_agent(gateway_url="") as agent:
        with pytest.raises(GatewayAbsent):
            await agent.open()


async def test_sessions_end_with_the_run(make_agent: Make) -> None:
    async with make_agent() as agent:
        _, (opened,) = await agent.assigned(agent.open())
        waiting = asyncio.ensure_future(agent.open())
        await agent.world.runs.StopRun(run_pb2.StopRunRequest(request_id="stop", reason="enough"), timeout=60)
        assert (await agent.get(opened.session_id)).reason == "RUN_STOPPED"
        with pytest.raises(RunEnded):
            await waiting


async def test_a_restarted_orchestrator_knows_its_sessions_and_goes_on_with_them(make_agent: Make) -> None:
    fields = {"total_steps": 3, "runner_lease_ttl_s": 60.0, "max_off_policy_steps": 2}
    async with make_agent(**fields) as agent:
        sampling = {"temperature": 0.5, "max_new_tokens": 7}
        first, opened = await agent.assigned(
            *(agent.open(name, group_key="t", group_size=3, sampling=sampling) for name in ("once", ""))
        )
        one, other = sorted(opened, key=lambda answer: answer.session_id)
        done, (trained,) = await agent.assigned(agent.open(labels={"which": "trained"}))
        await agent.close(trained.session_id, 1.0, advantage=1.0)
        await agent.world.report(agent.report(done))
        await agent.world.train((await agent.world.plan(1)).plan)
        await agent.until(trained.session_id, TRAINED)
        await agent.close(one.session_id, 1.0)
        lost, (gone,) = await agent.assigned(agent.open())
        before = await agent.world.rollouts.ListSessions(rollout_pb2.ListSessionsRequest(), timeout=60)
    async with make_agent(published=1, **fields) as agent:
        again = await agent.open(request_id="once", group_key="t", group_size=3, sampling=sampling)
        first_answer = next(answer for answer in opened if answer.session_id == again.session_id)
        assert (again.key, again.address) == (first_answer.key, first_answer.address), "told by an earlier process"
        with pytest.raises(RequestIdReused):
            await agent.open(request_id="once", group_key="t")
        listed = await agent.world.rollouts.ListSessions(rollout_pb2.ListSessionsRequest(), timeout=60)
        assert listed == before
        found = await agent.world.rollouts.FindSession(
            rollout_pb2.FindSessionRequest(key_sha256=hashlib.sha256(other.key.encode()).digest()), timeout=60
        )
        assert (found.session.session_id, found.address) == (other.session_id, other.address)
        # The runner has the one group still, and lost the other while nobody heard it.
        running = [runner_pb2.GroupAttempt(group_id=first.group_id, attempt=first.attempt)]
        told = ""
        for _ in range(2):
            beat = runner_pb2.HeartbeatRequest(
                runner_id="runner-1", runner_epoch="1", running=running, reported_to_epoch=told
            )
            told = (await agent.world.runners.Heartbeat(beat, timeout=60)).orchestrator_epoch
        assert (await agent.get(gone.session_id)).reason == "RUNNER_LOST"
        joined = await agent.open(group_key="t", group_size=3)
        assert joined.session_id == f"{first.session_group.name}-2", "a place of the group was left"
        agent.world.orchestrator.sequencer.sessions.get(other.session_id).group.address = agent.world.session_address
        for answer, reward in ((other, 0.0), (joined, 0.5)):
            assert (await agent.close(answer.session_id, reward)).state == CLOSED
        agent.runner.ends[one.session_id] = session_pb2.EndSessionRequest(reward=1.0)
        await agent.world.report(agent.report(first))
        plan = (await agent.world.plan(2)).plan
        assert [s.reward for batch in plan.micro_batches for s in batch.sequences] == [1.0, 0.0, 0.5]
        await agent.world.train(plan)
        assert (await agent.until(one.session_id, TRAINED)).step == 2
        path = agent.world.orchestrator.journal.path
    assert lost.position == 2
    assert check_records(read_journal(path).records).processes == 2


async def test_a_session_and_its_reward_are_on_disk_before_its_agent_hears_of_them(
    make_agent: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: dict[int, int] = {}
    fsync = os.fsync

    def noting_fsync(descriptor: int) -> None:
        about = os.fstat(descriptor)
        fsync(descriptor)
        synced[about.st_ino] = about.st_size

    monkeypatch.setattr(os, "fsync", noting_fsync)
    async with make_agent() as agent:
        path = agent.world.orchestrator.journal.path

        def records_on_disk(session_id: str) -> int:
            data = path.read_bytes()[: synced[path.stat().st_ino]]
            return data.count(f'"session_id":"{session_id}"'.encode())

        await agent.assigned(agent.open(group_key="t", group_size=2))
        joined = await agent.open(group_key="t", group_size=2)
        assert records_on_disk(joined.session_id) == 1
        await agent.close(joined.session_id, 1.0)
        assert records_on_disk(joined.session_id) == 2


@pytest.mark.parametrize("secret", [None, b"cut short", bytes(32)])
async def test_a_repeat_under_another_secret_is_refused_and_opens_no_second_session(
    make_agent: Make, secret: bytes | None
) -> None:
    async with make_agent() as agent:
        _, (opened,) = await agent.assigned(agent.open("once"))
        path = agent.world.orchestrator.sequencer.config.run_dir / "session-secret"
    path.unlink()
    if secret is not None:
        path.write_bytes(secret)
    async with make_agent() as agent:
        for _ in range(2):
            with pytest.raises(SessionKeyLost) as refused:
                await agent.open("once")
            assert refused.value.metadata == {"path": str(path), "session_id": opened.session_id}
        listed = await agent.world.rollouts.ListSessions(rollout_pb2.ListSessionsRequest(), timeout=60)
        assert [session.session_id for session in listed.sessions] == [opened.session_id]
