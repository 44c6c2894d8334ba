"""TrainerService: the trainer as others see it."""

from __future__ import annotations

import grpc

from slipstream.api.training.v1 import trainer_pb2, trainer_pb2_grpc
from slipstream.common.idempotency import RequestMemory
from slipstream.trainer.checkpointer import Checkpointer
from slipstream.trainer.status import Status


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Reads the status; decides nothing."""

    def __init__(self, status: Status, checkpoints: Checkpointer) -> None:
        self._status = status
        self._checkpoints = checkpoints
        self._answers = RequestMemory()

    async def GetStatus(
        self, request: trainer_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.GetStatusResponse:
        status = self._status
        return trainer_pb2.GetStatusResponse(
            version=status.version.to_proto() if status.version else None,
            activity=status.shown_activity,
            parameter_count=status.parameter_count,
            metrics=status.metrics,
        )

    async def SaveCheckpoint(
        self, request: trainer_pb2.SaveCheckpointRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.SaveCheckpointResponse:
        return await self._answers.once(request, self._save)

    async def _save(self) -> trainer_pb2.SaveCheckpointResponse:
        return trainer_pb2.SaveCheckpointResponse(version=(await self._checkpoints.save()).to_proto())

    async def Stop(
        self, request: trainer_pb2.StopRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.StopResponse:
        self._status.stop.set()
        return trainer_pb2.StopResponse()
