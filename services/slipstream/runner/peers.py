"""The runner's channels to its peers, one a process, and what is given back to them in batches."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from uuid import uuid4

import grpc
import structlog

from slipstream.api.inference.v1 import decode_pb2_grpc, prefill_pb2_grpc, teacher_pb2_grpc
from slipstream.api.rollout.v1 import rows_pb2, rows_pb2_grpc, runner_pb2_grpc
from slipstream.api.routing.v1 import routing_pb2, routing_pb2_grpc
from slipstream.api.types.v1 import types_pb2
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel

log = structlog.get_logger()

GIVE_BACK_PERIOD_S = 0.1
GIVE_BACK_TIMEOUT_S = 10.0
START_PERIOD_S = 0.5
"""Until the router has heard once."""
MAX_GIVE_BACK_ITEMS = 65536
"""Placements or keys waiting to be given back; beyond, the lease or the holder's byte bound frees them."""


class Peers:
    """Opens each channel once. Addresses of workers come from placements, the rest from the configuration."""

    def __init__(
        self, orchestrator: str, router: str, access: Access, runner_id: str = "", runner_epoch: str = ""
    ) -> None:
        self.runner_id = runner_id
        """Who holds what is placed."""
        self.runner_epoch = runner_epoch
        self._access = access
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.orchestrator = runner_pb2_grpc.RunnerServiceStub(self._channel(orchestrator))
        self.router = routing_pb2_grpc.RouterServiceStub(self._channel(router))
        self._prefill: dict[str, prefill_pb2_grpc.PrefillServiceStub] = {}
        self._decode: dict[str, decode_pb2_grpc.DecodeServiceStub] = {}
        self._teacher: dict[str, teacher_pb2_grpc.TeacherServiceStub] = {}
        self._placing: set[asyncio.Future[routing_pb2.PlaceResponse]] = set()
        self._placements: list[str] = []
        self._route_keys: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)
        """Of a holder and its epoch."""

    def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address, self._access)
        return channel

    def prefill(self, address: str) -> prefill_pb2_grpc.PrefillServiceStub:
        stub = self._prefill.get(address)
        if stub is None:
            stub = self._prefill[address] = prefill_pb2_grpc.PrefillServiceStub(self._channel(address))
        return stub

    def decode(self, address: str) -> decode_pb2_grpc.DecodeServiceStub:
        stub = self._decode.get(address)
        if stub is None:
            stub = self._decode[address] = decode_pb2_grpc.DecodeServiceStub(self._channel(address))
        return stub

    def teacher(self, address: str) -> teacher_pb2_grpc.TeacherServiceStub:
        stub = self._teacher.get(address)
        if stub is None:
            stub = self._teacher[address] = teacher_pb2_grpc.TeacherServiceStub(self._channel(address))
        return stub

    async def place(self, request: routing_pb2.PlaceRequest, timeout_s: float) -> routing_pb2.PlaceResponse:
        """Have a turn placed. Whoever is cancelled meanwhile holds nothing: the answer is awaited without it, and what
        it names released. A router cannot tell that nobody heard it, and would count the placement until its TTL.
        """
        placing = asyncio.ensure_future(self.router.Place(request, timeout=timeout_s))
        self._placing.add(placing)
        placing.add_done_callback(self._placing.discard)
        try:
            return await asyncio.shield(placing)
        except asyncio.CancelledError:
            placing.add_done_callback(self._release_unheard)
            raise

    def _release_unheard(self, placing: asyncio.Future[routing_pb2.PlaceResponse]) -> None:
        if not placing.cancelled() and placing.exception() is None:
            self.release_placement(placing.result().placement_id)

    def release_placement(self, placement_id: str) -> None:
        """Queue a placement lease for the next batch. A full queue leaves it to its TTL."""
        if len(self._placements) < MAX_GIVE_BACK_ITEMS:
            self._placements.append(placement_id)

    def release_routes(self, refs: list[types_pb2.RowsRef]) -> None:
        """Queue routes that nobody will train on. A full queue leaves them to the holder's bound."""
        for ref in refs:
            keys = self._route_keys[ref.holder, ref.holder_epoch]
            if len(keys) < MAX_GIVE_BACK_ITEMS:
                keys[ref.key] = None

    async def give_back_loop(self) -> None:
        """Send what is queued. Waits on nothing but its own clock; a failed call is left to TTLs and bounds.

        Also, once, what earlier processes of this runner held: a worker counts as full until that is given back.
        """
        ended = False
        while True:
            await asyncio.sleep(GIVE_BACK_PERIOD_S if ended else START_PERIOD_S)
            ended = ended or await self.end_earlier_placements()
            await self.give_back()

    async def end_earlier_placements(self) -> bool:
        """Whether the router has heard that this process comes after others of the same name."""
        if not self.runner_id:
            return True
        request = routing_pb2.ReleaseRequest(
            request_id=str(uuid4()), runner_id=self.runner_id, runner_epoch=self.runner_epoch
        )
        try:
            await self.router.Release(request, timeout=GIVE_BACK_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.info("give_back_failed", code=error.code().name)
            return False
        return True

    async def give_back(self) -> None:
        placements, self._placements = self._placements, []
        routes, self._route_keys = self._route_keys, defaultdict(dict)
        calls = []
        if placements:
            request = routing_pb2.ReleaseRequest(request_id=str(uuid4()), placement_ids=placements)
            calls.append(self.router.Release(request, timeout=GIVE_BACK_TIMEOUT_S))
        for (holder, epoch), keys in routes.items():
            stub = rows_pb2_grpc.RowsServiceStub(self._channel(holder))
            release = rows_pb2.ReleaseRowsRequest(request_id=str(uuid4()), keys=keys, holder_epoch=epoch)
            calls.append(stub.ReleaseRows(release, timeout=GIVE_BACK_TIMEOUT_S))
        for call in calls:
            try:
                await call
            except grpc.aio.AioRpcError as error:
                log.info("give_back_failed", code=error.code().name)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
