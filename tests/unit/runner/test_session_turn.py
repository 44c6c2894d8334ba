"""A turn of a session, whose reader is told of its end in any case."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from slipstream.api.rollout.v1 import runner_pb2, session_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.errors import RequestAborted, SessionEnded, SlipstreamError
from slipstream.runner.session_turn import Samples, Turn

NOTHING = cast(Any, None)
"""Of what a turn that never begins does not use."""


@pytest.mark.parametrize("error", [SessionEnded("closed", session_reason="CLOSED"), None])
async def test_a_turn_that_is_ended_before_it_begins_tells_its_reader(error: SlipstreamError | None) -> None:
    assignment = runner_pb2.GroupAssignment(sample_count=1, sampling=types_pb2.Sampling(temperature=1.0))
    samples = Samples("s", 0, assignment, NOTHING)
    turn = Turn(samples, NOTHING, session_pb2.RunTurnRequest(session_id="s"), {}, NOTHING)
    done: list[bool] = []
    async with asyncio.timeout(60):
        async with asyncio.TaskGroup() as tasks:
            turn.start(tasks, 60.0, lambda: done.append(True))
            turn.end(error) if error is not None else turn.abandon()
        with pytest.raises(SessionEnded if error is not None else RequestAborted):
            _ = [piece async for piece in turn.pieces()]
    assert done == [True]
