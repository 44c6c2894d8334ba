"""A trainer's process that publishes random weights straight: the real lender, its server, and no training.

    python straight_trainer.py BROADCASTER TRANSPORT

Takes lines `keep STEP` and answers `kept STEP` once the version is sealed, with the weights of `tensors(STEP)`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import torch

from slipstream.api.broadcast.v1 import broadcast_pb2_grpc
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.config import ListenConfig, ServiceConfig
from slipstream.common.runtime import build_server
from slipstream.common.version import PolicyVersion
from slipstream.trainer.kept import in_engine_order, whole_boxes
from slipstream.weights.config import WeightsConfig
from slipstream.weights.manifest import Manifest, Probe
from slipstream.weights.straight.lending import Lending
from slipstream.weights.straight.packing import TensorBox
from slipstream.weights.straight.source import SERVICE
from slipstream.weights.transport import GrpcWeightTransport

PROBE = Probe((1, 2), (-0.5,), 0.001)
ROWS = 3000


def tensors(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    names = [f"model.layers.0.mlp.experts.{i}.{part}_proj.weight" for i in range(4) for part in ("gate", "up", "down")]
    return {name: random.standard_normal((ROWS, 100), dtype=np.float32) for name in names}


class Trainer:
    """One rank that lends what it publishes."""

    def __init__(self, transport: str, publisher: GrpcWeightTransport, lease_s: float = 30.0) -> None:
        config = WeightsConfig.model_validate({"transport": transport, "lease_s": lease_s})
        self.lending = Lending(config)
        self.publisher = publisher

    async def start(self, config: ServiceConfig) -> None:
        add = broadcast_pb2_grpc.add_WeightSourceServiceServicer_to_server
        self.server, port = build_server(config, [(add, self.lending.servicer, SERVICE)])
        await self.server.start()
        self.lending.address = f"127.0.0.1:{port}"
        self.lender = self.lending.begin(torch.device("cpu"))

    async def publish(self, version: PolicyVersion, boxes: list[TensorBox] | None = None) -> Manifest:
        boxes = boxes or whole_boxes({name: torch.from_numpy(t) for name, t in tensors(version.step).items()})
        kept = await asyncio.to_thread(self.lender.keep, version, in_engine_order(boxes))
        return await self.publisher.publish_slices(version, kept.slices, [], PROBE, source=kept.source)

    async def stop(self) -> None:
        await self.server.stop(None)
        await asyncio.to_thread(self.lending.close)


async def serve(broadcaster: str, transport: str) -> None:
    trainer = Trainer(transport, GrpcWeightTransport(open_channel(broadcaster, Access())))
    await trainer.start(ServiceConfig(listen=ListenConfig(port=0), run_dir=Path("/nonexistent")))
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        step = int(line.split()[1])
        await trainer.publish(PolicyVersion(1, step))
        print("kept", step, flush=True)


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
