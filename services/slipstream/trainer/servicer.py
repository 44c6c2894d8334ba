"""TrainerService: the trainer as others see it."""

from __future__ import annotations

import grpc

from slipstream.api.training.v1 import trainer_pb2, trainer_pb2_grpc
from slipstream.common.errors import Unsupported
from slipstream.trainer.status import Status


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Reads the status; decides nothing."""

    def __init__(self, status: Status) -> None:
        self._status = status

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
        raise Unsupported("this release writes final weights and no resumable checkpoints", method="SaveCheckpoint")

    async def Stop(
        self, request: trainer_pb2.StopRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.StopResponse:
        self._status.stop.set()
        return trainer_pb2.StopResponse()
