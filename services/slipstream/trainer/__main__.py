"""Run the trainer: `slipstream-trainer @ config.toml`. The loops are in README.md."""

from __future__ import annotations

from typing import Any

from slipstream.api.broadcast.v1 import broadcast_pb2_grpc
from slipstream.api.training.v1 import batch_pb2_grpc, trainer_pb2_grpc
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.runtime import keep_freed_memory, leave, run_service, serve
from slipstream.trainer import telemetry
from slipstream.trainer.checkpointer import Checkpointer
from slipstream.trainer.config import TrainerConfig
from slipstream.trainer.fetch import RowsClient
from slipstream.trainer.loop import TrainingLoop
from slipstream.trainer.model_dir import prepare_model_dir_when_room
from slipstream.trainer.place import placed
from slipstream.trainer.portions import PlanReader
from slipstream.trainer.servicer import TrainerServicer
from slipstream.trainer.start import start
from slipstream.trainer.status import ActivityReporter, Status
from slipstream.trainer.torch_thread import TorchThread
from slipstream.weights.straight.lending import Lending
from slipstream.weights.straight.source import SERVICE as SOURCE_SERVICE
from slipstream.weights.transport import GrpcWeightTransport


async def run(config: TrainerConfig) -> None:
    """Serve until SIGTERM."""
    keep_freed_memory()
    access = Access.from_config(config)
    if config.group.rank == 0:
        prepare_model_dir_when_room(config)
    status = Status()
    telemetry.observe(status)
    batches = batch_pb2_grpc.BatchServiceStub(open_channel(config.orchestrator, access))
    torch = TorchThread(config.torch_threads)
    rows = RowsClient(lambda address: open_channel(address, access), config.rows_timeout_s, config.routes_silence_s)
    checkpoints = Checkpointer(config, torch, status)
    lending = Lending(config.weights) if config.weights.straight else None
    training = TrainingLoop(
        config,
        batches=batches,
        transport=GrpcWeightTransport(open_channel(config.broadcaster, access)),
        rows=PlanReader(rows, torch, config.rows_window_bytes),
        status=status,
        torch=torch,
        start=start,
        checkpoints=checkpoints,
        lending=lending,
    )

    reporter = ActivityReporter(batches, status)

    async def on_drain() -> None:
        status.stop.set()
        await training.saved.wait()

    async def bound(port: int) -> None:
        if lending is not None:
            lending.address = config.listen.address(port)

    servicers: list[tuple[Any, Any, str]] = [
        (
            trainer_pb2_grpc.add_TrainerServiceServicer_to_server,
            TrainerServicer(status, checkpoints),
            "slipstream.api.training.v1.TrainerService",
        )
    ]
    if lending is not None:
        add = broadcast_pb2_grpc.add_WeightSourceServiceServicer_to_server
        servicers.append((add, lending.servicer, SOURCE_SERVICE))
    try:
        await serve(
            config,
            servicers,
            loops={"training": training.run, **({} if config.group.rank else {"activity": reporter.run})},
            on_drain=on_drain,
            on_start=bound,
        )
    finally:
        if lending is not None:
            lending.close()


def main() -> None:
    run_service("trainer", TrainerConfig, run, placed)
    leave()


if __name__ == "__main__":
    main()
