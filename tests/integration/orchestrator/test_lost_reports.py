"""A trainer that dies between its checkpoint and its report: what it took counts, and the run goes on."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from slipstream.api.training.v1 import batch_pb2
from slipstream.common.errors import from_rpc_error
from slipstream.common.version import PolicyVersion
from slipstream.orchestrator.journal import read_journal
from slipstream.orchestrator.journal_check import check_records

Make = Callable[..., Any]


async def ask(world: Any, step: int, incarnation: int, checkpoint: int) -> batch_pb2.GetPlanResponse:
    request = batch_pb2.GetPlanRequest(incarnation=incarnation, step=step, wait_ms=20_000, checkpoint_step=checkpoint)
    return await world.batches.GetPlan(request, timeout=60)


async def told(world: Any, step: int, incarnation: int) -> None:
    version = PolicyVersion(incarnation, step)
    world.broadcaster.seal(version)
    request = batch_pb2.ReportStepRequest(request_id=uuid.uuid4().hex, version=version.to_proto())
    await world.batches.ReportStep(request, timeout=60)


def taken(world: Any) -> list[tuple[str, int, int]]:
    """Steps that were taken, as (kind, incarnation, step)."""
    records = read_journal(world.orchestrator.journal.path).records
    kinds = ("trained", "retrained", "restored")
    return [(r["kind"], r["incarnation"], r["step"]) for r in records if r["kind"] in kinds]


@pytest.mark.parametrize("ranks_race", [False, True])
async def test_steps_before_a_checkpoint_count_though_nobody_reported_them(
    make_world: Make, background: Make, ranks_race: bool
) -> None:
    """`ranks_race`: another rank asks for the next plan before the first one has reported where they stand."""
    async with make_world(total_steps=6, max_off_policy_steps=2) as world:
        world.publish(0)
        async with background(world.runner_loop(), world.heartbeat_loop()):
            for step in (1, 2, 3):
                assert (await ask(world, step, 1, 0)).HasField("plan")
                if step == 1:
                    await told(world, step, 1)
            # Publishing step 2 waits for a broadcaster that is away; step 3 is taken, and has a checkpoint.
            if ranks_race:
                assert not (await ask(world, 4, 2, 3)).HasField("ended")
            await told(world, 3, 2)
            assert (await ask(world, 4, 2, 3)).HasField("plan")
            await told(world, 4, 2)
            # Once more, as the next incarnation, that takes step 4 again and dies before it reports that.
            await told(world, 3, 3)
            assert (await ask(world, 4, 3, 3)).HasField("plan")
            await told(world, 4, 4)
            assert (await ask(world, 5, 4, 4)).HasField("plan")
            for step in (5, 6):
                assert (await ask(world, step, 4, 4)).HasField("plan")
                await told(world, step, 4)
            await world.until(lambda run: run.phase == "ended")
        assert taken(world) == [
            ("trained", 1, 1),
            ("trained", 1, 2),
            ("trained", 1 if ranks_race else 2, 3),
            ("restored", 2, 3),
            ("trained", 2, 4),
            ("restored", 3, 3),
            ("retrained", 3, 4),
            ("restored", 4, 4),
            ("trained", 4, 5),
            ("trained", 4, 6),
        ]
        checked = check_records(read_journal(world.orchestrator.journal.path).records)
        assert checked.trained_step == 6
        assert [record["step"] for record in world.metrics("step")] == [1, 2, 3, 4, 5, 6]


async def test_a_trainer_that_claims_a_step_which_was_never_sealed_is_refused(make_world: Make) -> None:
    async with make_world(total_steps=6) as world:
        for call in (ask(world, 3, 2, 2), told(world, 2, 2)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert from_rpc_error(refused.value).reason in ("STEP_NOT_NEXT", "STEP_NOT_SEALED")
        assert taken(world) == []
