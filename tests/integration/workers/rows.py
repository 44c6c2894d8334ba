"""What the trainer's reader makes of rollouts whose rows workers hold."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prometheus_client import REGISTRY

from slipstream.api.rollout.v1 import rows_pb2_grpc, runner_pb2
from slipstream.api.training.v1 import batch_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.config import ServiceConfig
from slipstream.common.runtime import build_server
from slipstream.common.version import PolicyVersion
from slipstream.runner.servicer import RowsServicer
from slipstream.runner.spool import Rows, Spool
from slipstream.trainer.fetch import RowsClient
from slipstream.trainer.portions import PlanReader
from slipstream.trainer.rows import RowForm
from slipstream.trainer.sequence import TrainSequence
from slipstream.trainer.torch_thread import TorchThread

V1 = PolicyVersion(1, 1)
SMALL_WINDOW_BYTES = 2
"""A micro-batch at a time."""


class Tokens:
    """Tokens and log-probabilities of rollouts, as a runner holds them, without a process."""

    def __init__(self, directory: Path) -> None:
        self.spool = Spool(directory, 1 << 20)

    async def refs(self, address: str, name: str, tokens: Sequence[int]) -> dict[str, types_pb2.RowsRef]:
        refs, rows = {}, {}
        for field, dtype in (("token_ids", np.int32), ("logprobs", np.float32)):
            values = np.array(tokens if field == "token_ids" else [-1] * len(tokens), dtype)
            key = f"{field}/{name}"
            rows[key] = Rows(values.tobytes())
            span = types_pb2.RowRange(start=0, end=len(tokens))
            refs[field] = types_pb2.RowsRef(
                holder=address, key=key, dtype=values.dtype.name, ranges=[span], size_bytes=values.nbytes
            )
        await self.spool.keep(name, runner_pb2.GroupReport(), rows)
        return refs


def moved_bytes_so_far() -> float:
    return REGISTRY.get_sample_value("slipstream_worker_rows_sent_bytes_total") or 0.0


async def read(
    cluster: Any, rollouts: list[tuple[list[int], list[types_pb2.RowsRef]]]
) -> tuple[list[TrainSequence], int]:
    """The sequences of rollouts (tokens, route references), a micro-batch each, and the bytes of routes moved."""
    directory = tempfile.TemporaryDirectory()
    tokens, torch_thread = Tokens(Path(directory.name)), TorchThread(1)
    service = "slipstream.api.rollout.v1.RowsService"
    add = rows_pb2_grpc.add_RowsServiceServicer_to_server
    server, port = build_server(ServiceConfig(), [(add, RowsServicer(tokens.spool), service)])
    await server.start()
    client = RowsClient(lambda address: open_channel(address, Access()), 10.0)
    reader = PlanReader(client, torch_thread, SMALL_WINDOW_BYTES)
    planned = []
    for number, (ids, routes) in enumerate(rollouts):
        refs = await tokens.refs(f"127.0.0.1:{port}", str(number), ids)
        planned.append(
            batch_pb2.PlannedSequence(
                token_count=len(ids), token_ids=refs["token_ids"], logprobs=refs["logprobs"], routes=routes
            )
        )
    plan = batch_pb2.Plan(micro_batches=[batch_pb2.MicroBatch(sequences=[each]) for each in planned])
    before = moved_bytes_so_far()
    form = RowForm.of(cluster.model(V1), PolicyVersion(1, 1))
    sequences: list[TrainSequence] = []
    try:
        async with asyncio.TaskGroup() as group:
            async for portion in reader.read(plan, form, group):
                for sequence in itertools.chain.from_iterable(portion.micro_batches):
                    assert isinstance(sequence, TrainSequence), "its rows are lost"
                    sequences.append(sequence)
    finally:
        await client.close()
        await server.stop(None)
        torch_thread.close()
        tokens.spool.close()
        directory.cleanup()
    return sequences, int(moved_bytes_so_far() - before)


def oracle_rows(cluster: Any, tokens: Sequence[int]) -> np.ndarray:
    """The experts of a full forward pass, of all tokens but the last."""
    model = cluster.model(V1)
    model.routes.begin(capture=True)
    model(torch.tensor([list(tokens)]))
    return np.sort(model.routes.captured().numpy()[:-1], -1)
