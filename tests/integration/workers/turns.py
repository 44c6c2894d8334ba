"""Workers behind a router, and the runner's inference client that asks them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.routing.v1 import routing_pb2, routing_pb2_grpc
from slipstream.api.types.v1 import types_pb2
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.config import ListenConfig, WorkerEndpoint
from slipstream.common.errors import SlipstreamError, StateUnavailable, rpc_errors
from slipstream.common.version import PolicyVersion
from slipstream.engine.hashing import block_hashes
from slipstream.router.__main__ import run
from slipstream.router.config import RouterConfig
from slipstream.runner.attempt import TurnAttempt, Wish
from slipstream.runner.peers import Peers
from slipstream.runner.turns import Conversation, TurnClient
from slipstream.runner.watch import WorkerWatch
from tests.ports import free_ports

BLOCK_TOKENS = 4
ANSWER_S = 30.0
"""Of calls that take milliseconds where nothing else runs."""
V1 = PolicyVersion(1, 1)


class Turns:
    """Asks a cluster's workers for turns of groups, as a runner does."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.router: Any = None
        self.attempts: list[TurnAttempt] = []
        """All requests of all turns, in the order in which they were made."""
        self._client: TurnClient
        self._peers: Peers

    async def start(
        self, stack: AsyncExitStack, redis_url: str, prefillers: Sequence[WorkerEndpoint] = (), **fields: Any
    ) -> None:
        """`prefillers`: beside those of the cluster. The other fields are the router's."""
        pools: dict[str, list[WorkerEndpoint]] = {"prefill": [*prefillers], "decode": []}
        for member in self.cluster.members:
            replica = member.worker.identity.replica
            pools[replica.partition("-")[0]].append(WorkerEndpoint(replica=replica, address=member.address))
        fields = {"prefill_workers": pools["prefill"], "decode_workers": pools["decode"], **fields}
        (port,) = free_ports(1)
        config = self.cluster.make_config(
            RouterConfig,
            redis_url=redis_url,
            listen=ListenConfig(port=port),
            **fields,
        )
        process = asyncio.create_task(run(config))
        stack.push_async_callback(self._end, process)
        address = f"127.0.0.1:{port}"
        channel = await stack.enter_async_context(open_channel(address, Access()))
        self.router = routing_pb2_grpc.RouterServiceStub(channel)
        self._peers = Peers("127.0.0.1:1", address, Access())
        stack.push_async_callback(self._peers.close)
        watch = WorkerWatch(self._peers.router)
        stack.push_async_callback(self._end, asyncio.create_task(watch.follow()))
        self._client = TurnClient(self._peers, watch, BLOCK_TOKENS, prefill_timeout_s=30.0)
        async with asyncio.timeout(30):
            await channel.channel_ready()
            while not await self._placeable():  # noqa: ASYNC110 observed from outside
                await asyncio.sleep(0.02)

    async def ask(
        self, prompt: Sequence[int], group_id: str = "g", deadline_s: float = 30.0, **fields: Any
    ) -> Conversation:
        """The first turn of a group; what is given beside is as in `begin`."""
        conversation = self.begin(prompt, group_id, **fields)
        try:
            await conversation.answer(time.monotonic() + deadline_s)
        finally:
            await self._peers.give_back()
        return conversation

    def begin(
        self,
        prompt: Sequence[int],
        group_id: str = "g",
        samples: int = 2,
        version: PolicyVersion = V1,
        **sampling: Any,
    ) -> Conversation:
        """A group before its first turn, greedy unless told."""
        assignment = runner_pb2.GroupAssignment(
            group_id=group_id,
            attempt=1,
            purpose=runner_pb2.GROUP_PURPOSE_TRAINING,
            sample_count=samples,
            sampling=types_pb2.Sampling(**{"max_new_tokens": 8, **sampling}),
            dispatch_version=version.to_proto(),
            salt=f"run/{version}/float32",
        )
        conversation = self._client.begin(assignment, prompt)
        make = conversation._attempt

        def kept(indexes: Sequence[int]) -> TurnAttempt:
            self.attempts.append(make(indexes))
            return self.attempts[-1]

        conversation._attempt = kept
        return conversation

    async def reply(self, conversation: Conversation, index: int, token_ids: Sequence[int]) -> None:
        """The next turn of one rollout."""
        try:
            await conversation.reply(index, token_ids, time.monotonic() + 30.0)
        finally:
            await self._peers.give_back()

    async def sample(self, conversation: Conversation, *indexes: int, wish: Wish | None = None) -> None:
        """A turn of rollouts that were added, or have the same tokens."""
        try:
            await conversation.sample(indexes, time.monotonic() + 30.0, wish)
        finally:
            await self._peers.give_back()

    async def workers(self) -> dict[str, routing_pb2.RoutedWorker]:
        """What the router knows."""
        response = await self.router.ListWorkers(routing_pb2.ListWorkersRequest(), timeout=ANSWER_S)
        return {worker.ref.replica: worker for worker in response.workers}

    async def at_work(self) -> str:
        """The first worker that is seen to sample."""
        async with asyncio.timeout(ANSWER_S):
            while True:
                for replica, worker in (await self.workers()).items():
                    if worker.load.tokens_in_flight_count:
                        return replica
                await asyncio.sleep(0.02)

    async def until_warm(self, prompt: Sequence[int], version: PolicyVersion = V1) -> None:
        """Wait until the router has heard that a decode worker holds enough of a prompt to need no prefill worker."""
        async with asyncio.timeout(30):
            while (await self._place(prompt, version)).HasField("prefill"):  # noqa: ASYNC110 observed from outside
                await asyncio.sleep(0.02)

    async def nothing_left(self) -> None:
        """Wait until no living worker holds a block, and the router no placement."""
        for member in self.cluster.members:
            await member.freed()
        async with asyncio.timeout(30):
            while any(worker.placement_count for worker in (await self.workers()).values()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def _placeable(self) -> bool:
        """Whether all workers and Redis are there."""
        if not all(worker.routable for worker in (await self.workers()).values()):
            return False
        try:
            await self._place([0], PolicyVersion(0, 0))
        except StateUnavailable:
            return False
        return True

    async def _place(self, prompt: Sequence[int], version: PolicyVersion) -> routing_pb2.PlaceResponse:
        """Where a turn would go; nothing is asked of the workers."""
        request = routing_pb2.PlaceRequest(
            request_id=f"where-{time.monotonic()}",
            group_id="where",
            block_hashes=block_hashes(f"run/{version}/float32", prompt[:-1], BLOCK_TOKENS),
            prompt_token_count=len(prompt),
            sample_count=1,
            max_new_tokens=1,
        )
        with rpc_errors():
            placed = await self.router.Place(request, timeout=ANSWER_S)
        await self.router.Release(
            routing_pb2.ReleaseRequest(request_id="where", placement_ids=[placed.placement_id]), timeout=ANSWER_S
        )
        return placed

    async def _end(self, process: asyncio.Task[None]) -> None:
        process.cancel()
        await asyncio.wait([process])
        assert process.cancelled(), process.exception()


async def refused(turn: Any) -> SlipstreamError:
    """What a turn fails with."""
    try:
        await turn
    except SlipstreamError as error:
        return error
    raise AssertionError("the turn came to an end")
