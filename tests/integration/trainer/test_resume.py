"""A trainer that ends and goes on from its checkpoint: over real gRPC, with scripted peers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from slipstream.api.training.v1 import batch_pb2, trainer_pb2
from slipstream.common.errors import from_rpc_error
from slipstream.common.version import PolicyVersion
from slipstream.models.lora.config import LoraConfig
from slipstream.trainer.checkpoint_store import CheckpointStore
from slipstream.trainer.checkpointer import Checkpointer
from slipstream.trainer.config import CheckpointConfig, TrainerConfig
from slipstream.trainer.optim_config import OptimConfig
from slipstream.trainer.status import Status
from slipstream.trainer.torch_thread import TorchThread

from .test_training_loop import World, serve_trainer, training_loop

STEPS = 6


@pytest.fixture
def torch_thread() -> Iterator[TorchThread]:
    thread = TorchThread(1)
    yield thread
    thread.close()


def config_of(path: Path, algorithm: str = "adamw", **checkpoint: int) -> TrainerConfig:
    optim = OptimConfig.model_validate({"total_steps": STEPS, "algorithm": algorithm, "warmup_steps": 2})
    return TrainerConfig(run_dir=path, optim=optim, checkpoint=CheckpointConfig(**checkpoint))


async def trained(
    path: Path, thread: TorchThread, config: TrainerConfig, step_count: int, world: World | None = None
) -> World:
    """A trainer process's life: to the end of the plans that there are."""
    world = world or World()
    async with world.serve():
        world.orchestrator.plans = [world.plan(step) for step in range(1, step_count + 1)]
        for plan in world.orchestrator.plans:
            plan.last = False
        await training_loop(world, config, thread, Status()).train()
    return world


def losses(world: World) -> dict[int, tuple[float, float]]:
    return {
        r.version.step: (r.metrics["loss"], r.metrics["grad_norm"])
        for r in world.orchestrator.reports
        if r.version.step
    }


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
async def test_a_resumed_trainer_has_the_losses_of_one_that_never_ended(tmp_path, torch_thread, algorithm):
    whole = await trained(tmp_path / "whole", torch_thread, config_of(tmp_path / "whole", algorithm), STEPS)
    config = config_of(tmp_path / "cut", algorithm, interval_steps=3)
    first = await trained(tmp_path / "cut", torch_thread, config, 5)
    second = await trained(tmp_path / "cut", torch_thread, config, STEPS)

    assert whole.orchestrator.checkpoint_steps == [None] * len(whole.orchestrator.checkpoint_steps)
    assert first.orchestrator.checkpoint_steps[0] == 0
    assert losses(first) == {step: loss for step, loss in losses(whole).items() if step <= 5}
    # It stands at step 3, says so in the name of the next incarnation, and goes on.
    assert second.broadcaster.sealed == [PolicyVersion(2, step) for step in range(3, STEPS + 1)]
    assert losses(second) == {step: loss for step, loss in losses(whole).items() if step >= 3}
    for step in range(3, STEPS + 1):
        assert second.broadcaster.bytes[PolicyVersion(2, step)] == whole.broadcaster.bytes[PolicyVersion(1, step)]
    assert second.orchestrator.checkpoint_steps[0] == 3


async def test_adapters_are_resumed_on_the_weights_that_they_are_added_to(tmp_path, torch_thread):
    lora = LoraConfig(rank=2)
    whole_config = config_of(tmp_path / "whole").model_copy(update={"lora": lora})
    whole = await trained(tmp_path / "whole", torch_thread, whole_config, STEPS)
    config = config_of(tmp_path / "cut", interval_steps=3).model_copy(update={"lora": lora})
    await trained(tmp_path / "cut", torch_thread, config, 5)
    second = await trained(tmp_path / "cut", torch_thread, config, STEPS)
    assert losses(second) == {step: loss for step, loss in losses(whole).items() if step >= 3}
    bases = {adapter.base_version for adapter in second.broadcaster.adapters}
    assert bases == {PolicyVersion(2, 3)}  # whole once more, under its own name
    for step in range(4, STEPS + 1):
        assert second.broadcaster.bytes[PolicyVersion(2, step)] == whole.broadcaster.bytes[PolicyVersion(1, step)]


async def test_every_start_opens_an_incarnation_of_its_own_even_without_a_checkpoint(tmp_path, torch_thread):
    config = config_of(tmp_path, interval_steps=100)
    seen = [(await trained(tmp_path, torch_thread, config, 1)).broadcaster.sealed[0] for _ in range(3)]
    assert seen == [PolicyVersion(1, 0), PolicyVersion(2, 0), PolicyVersion(3, 0)]


async def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path, torch_thread):
    await trained(tmp_path, torch_thread, config_of(tmp_path, interval_steps=1), 2)
    files = [path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file() and "final" not in path.parts]
    assert {path.suffix for path in files} == {".safetensors", ".json", ""}
    assert not any(path.read_bytes()[:2] in (b"\x80\x02", b"\x80\x04", b"PK") for path in files)


async def test_save_checkpoint_writes_one_while_the_trainer_waits_and_a_repeat_writes_none(tmp_path, torch_thread):
    world, status = World(), Status()
    config = config_of(tmp_path, interval_steps=100)
    checkpoints = Checkpointer(config, torch_thread, status)
    given = world.orchestrator.GetPlan

    async def get_plan(request, context):
        return await (given if request.step == 1 else world.orchestrator.wait)(request, context)

    world.orchestrator.GetPlan = get_plan
    async with world.serve(), serve_trainer(world, status, checkpoints) as stub:
        world.orchestrator.plans = [world.plan(1)]
        world.orchestrator.plans[0].last = False
        loop = training_loop(world, config, torch_thread, status, checkpoints)
        async with asyncio.TaskGroup() as group:
            training = group.create_task(loop.train())
            await world.orchestrator.waiting.wait()
            saved = [
                await stub.SaveCheckpoint(trainer_pb2.SaveCheckpointRequest(request_id=name), timeout=30)
                for name in ("one", "one", "two")
            ]
            assert {PolicyVersion.from_proto(each.version) for each in saved} == {PolicyVersion(1, 1)}
            newest = CheckpointStore(tmp_path / "checkpoints").newest()
            assert newest is not None
            assert newest.version == PolicyVersion(1, 1)
            status.stop.set()
            await asyncio.wait_for(training, 30)


async def test_a_checkpoint_that_others_wait_for_is_written_before_its_time(tmp_path, torch_thread):
    world = World()
    world.orchestrator.checkpoint_due = True
    await trained(tmp_path, torch_thread, config_of(tmp_path, interval_steps=100), 3, world)
    assert world.orchestrator.checkpoint_steps == [0, 0, 0, 1, 1, 2]  # each plan is pending when it is first asked for


async def test_a_checkpoint_that_is_asked_for_with_a_plan_is_of_the_step_before_it(tmp_path, torch_thread):
    world = World()
    world.orchestrator.checkpoint_asked = {3}
    await trained(tmp_path, torch_thread, config_of(tmp_path, interval_steps=100), 3, world)
    newest = CheckpointStore(tmp_path / "checkpoints").newest()
    assert newest is not None
    assert newest.version == PolicyVersion(1, 2)


async def test_a_checkpoint_that_cannot_be_written_costs_nothing_and_is_tried_again(tmp_path, torch_thread):
    world, status = World(), Status()
    config = config_of(tmp_path, interval_steps=100)
    checkpoints = Checkpointer(config, torch_thread, status)
    async with world.serve(), serve_trainer(world, status, checkpoints) as stub:
        world.orchestrator.plans = [world.plan(1)]
        world.orchestrator.plans[0].last = False
        await training_loop(world, config, torch_thread, status, checkpoints).train()
        in_the_way = tmp_path / "checkpoints" / ".saving-1.1"
        in_the_way.write_text("a file where a directory is to be")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.SaveCheckpoint(trainer_pb2.SaveCheckpointRequest(request_id="one"), timeout=30)
        assert from_rpc_error(refused.value).reason == "CHECKPOINT_FAILED"
        assert checkpoints.durable == PolicyVersion(1, 0)
        in_the_way.unlink()
        answer = await stub.SaveCheckpoint(trainer_pb2.SaveCheckpointRequest(request_id="one"), timeout=30)
        assert PolicyVersion.from_proto(answer.version) == PolicyVersion(1, 1)


async def test_a_plan_of_another_version_is_asked_for_again_and_then_refused_by_its_field(tmp_path, torch_thread):
    world = World()

    async def wrong(request, context):
        world.orchestrator.asked[request.step] += 1
        return batch_pb2.GetPlanResponse(plan=batch_pb2.Plan(version={"incarnation": 1, "step": 2}))

    world.orchestrator.GetPlan = wrong
    async with world.serve():
        with pytest.raises(ExceptionGroup) as refused:
            await training_loop(world, TrainerConfig(run_dir=tmp_path), torch_thread, Status()).train()
    assert refused.group_contains(ValueError, match=r"version: the plan of step 1 is for 1\.2, not for 1\.1")
    assert world.orchestrator.asked[1] == 3
