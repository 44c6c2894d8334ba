"""A group of sessions that are all over, and a process of texts that does not answer."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import pytest

from slipstream.api.rollout.v1 import runner_pb2, session_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.runner import envclient, sessions
from slipstream.runner.config import SessionLimits
from slipstream.runner.envclient import EnvironmentWorker
from slipstream.runner.rollout import Rollout, Segment
from slipstream.runner.sessions import SessionGroup
from slipstream.runner.spool import Spool

COUNT = 40
WAIT_S = 0.5
DEADLINE_S = 60.0


class NoEngines:
    """Conversations whose turns have all ended."""

    def begin_apart(self, assignment: runner_pb2.GroupAssignment, taken_up: int = 0) -> Any:
        return self

    def release_routes_of(self, rollouts: Any) -> None:
        pass


class Texts(EnvironmentWorker):
    """A process that answers for the first session alone. `starts`: else it is not even up."""

    def __init__(self, *, starts: bool) -> None:
        super().__init__([], 60.0, [])
        self._starts = starts
        self.told: list[str] = []

    async def up(self) -> int:
        return 1 if self._starts else await super().up()

    def serves(self, epoch: int) -> bool:
        return self._starts

    async def session(self, session_id: str, call: str, **fields: Any) -> dict[str, Any]:
        if not session_id.endswith("-0"):
            await asyncio.Event().wait()
        return {"conversations": [[{"role": "assistant", "content": "yes"}]]}

    def tell_session(self, session_id: str, call: str, **fields: Any) -> None:
        assert call == "close"
        self.told.append(session_id)


def ended_group(texts: Texts, directory: Path) -> SessionGroup:
    """Whose members have sampled, and were closed with a reward."""
    name = "session-" + "0" * 32
    assignment = runner_pb2.GroupAssignment(
        group_id=name,
        attempt=1,
        sample_count=COUNT,
        deadline_ms=60_000,
        sampling=types_pb2.Sampling(temperature=1.0),
        session_group=runner_pb2.SessionGroup(name=name, idle_timeout_ms=60_000),
    )
    group = SessionGroup(
        assignment, texts, cast(Any, NoEngines()), Spool(directory, 1 << 20), SessionLimits(), unfinished=None
    )
    for member in group.members:
        rollout = member.samples.rollouts[0] = Rollout([1, 2])
        rollout.take(Segment([3], [-0.5], finish_reason=types_pb2.FINISH_REASON_STOP), None, types_pb2.Sampling())
        member.reward = session_pb2.EndSessionRequest(session_id=member.session_id, reward=1.0)
        member.memory.epoch = 1
    return group


@pytest.mark.parametrize("starts", [False, True], ids=["it does not come up", "it holds its answers"])
async def test_all_sessions_of_a_group_wait_for_their_texts_once(tmp_path, monkeypatch, starts: bool) -> None:
    monkeypatch.setattr(envclient, "START_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(sessions, "TEXTS_TIMEOUT_S", WAIT_S, raising=False)
    texts = Texts(starts=starts)
    group = ended_group(texts, tmp_path)
    began_s = time.monotonic()
    async with asyncio.timeout(DEADLINE_S):
        finished = await group.run()
    assert time.monotonic() - began_s < (COUNT - 1) * WAIT_S
    assert [each.score.reward for each in finished] == [1.0] * COUNT
    known = int(starts)
    assert [each.score.text for each in finished] == ["yes"] * known + [""] * (COUNT - known)
    assert texts.told == [member.session_id for member in group.members[known:]], "whoever comes up has none of them"
