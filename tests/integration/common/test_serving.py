"""One real server on a free port: what the edge of every service does."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import REGISTRY

from slipstream.api.broadcast.v1 import broadcast_pb2, broadcast_pb2_grpc
from slipstream.api.routing.v1 import routing_pb2, routing_pb2_grpc
from slipstream.api.types.v1 import types_pb2
from slipstream.common import errors, open_files
from slipstream.common.auth import Access
from slipstream.common.channel import CHANNEL_OPTIONS, open_channel
from slipstream.common.config import ConfigError, ListenConfig
from slipstream.common.frames import (
    encode_header,
    iter_data,
    iter_frames,
    raw_requests,
    raw_responses,
    raw_stream_unary,
    raw_unary_stream,
    read_all,
    read_header,
)
from slipstream.common.runtime import Service, ServiceFailed, build_server, ends_on_drain, serve
from slipstream_client.connection import CHANNEL_OPTIONS as CLIENT_OPTIONS

ROUTER = "slipstream.api.routing.v1.RouterService"
BROADCAST = "slipstream.api.broadcast.v1.BroadcastService"
PLACE = routing_pb2.PlaceRequest(request_id="r", group_id="g", prompt_token_count=1, sample_count=1, max_new_tokens=1)

VERSION = types_pb2.PolicyVersion(incarnation=1, step=2)
FETCH = broadcast_pb2.FetchSlicesRequest(version=VERSION, offset_bytes=100)
SLICE = broadcast_pb2.Slice(name="w", dtype="float32", size_bytes=5120, global_shape=[1280], shape=[1280])
SHARD = broadcast_pb2.ShardHeader(version=VERSION, slices=[SLICE])


class Router(routing_pb2_grpc.RouterServiceServicer):
    """Answers as `behaviour` says. ListWorkers is left out."""

    def __init__(self, behaviour=None):
        self.behaviour = behaviour
        self.open = asyncio.Event()
        self.closed = asyncio.Event()

    async def Place(self, request, context):
        if self.behaviour is not None:
            await self.behaviour()
        return routing_pb2.PlaceResponse(placement_id=request.group_id)

    @ends_on_drain
    async def Release(self, request, context):
        self.open.set()
        await asyncio.Event().wait()

    async def WatchWorkers(self, request, context):
        try:
            yield routing_pb2.WatchWorkersResponse()
            self.open.set()
            await asyncio.Event().wait()
        finally:
            self.closed.set()


class Broadcaster(broadcast_pb2_grpc.BroadcastServiceServicer):
    """Keeps the bytes of one shard and gives them back."""

    data = b""

    @raw_requests
    async def PublishShard(self, request_iterator, context):
        messages = aiter(request_iterator)
        header = await read_header(messages, broadcast_pb2.ShardHeader)
        self.data = b"".join([bytes(data) async for data in iter_data(messages)])
        return broadcast_pb2.PublishShardResponse(size_bytes=len(header.slices))

    async def FetchSlices(self, request, context):
        yield encode_header(broadcast_pb2.SlicesHeader(size_bytes=len(self.data)))
        for frame in iter_frames([self.data], request.offset_bytes, frame_bytes=1000):
            yield frame


@asynccontextmanager
async def running(config, *servicers):
    service = Service(config, servicers)
    await service.start()
    try:
        yield service, f"127.0.0.1:{service.port}"
    finally:
        await service.server.stop(grace=None)


def as_any(channel) -> Any:
    """The stubs of health and reflection are typed for the blocking channel alone."""
    return channel


async def place(channel):
    return await routing_pb2_grpc.RouterServiceStub(channel).Place(PLACE, timeout=5)


def router(servicer):
    return routing_pb2_grpc.add_RouterServiceServicer_to_server, servicer, ROUTER


@asynccontextmanager
async def calling(config, servicer, token=None):
    async with running(config, router(servicer)) as (service, address), open_channel(address, Access(token)) as channel:
        yield service, routing_pb2_grpc.RouterServiceStub(channel)


async def raised(call) -> errors.SlipstreamError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return errors.from_rpc_error(caught.value)


async def test_a_call_with_the_runs_token_is_answered(make_config):
    async with calling(make_config(token="secret"), Router(), "secret") as (_, stub):
        assert (await stub.Place(PLACE)).placement_id == "g"


@pytest.mark.parametrize("options", [CHANNEL_OPTIONS, CLIENT_OPTIONS], ids=["services", "client"])
async def test_a_first_call_waits_for_a_service_that_greets_late(make_config, between, options):
    """As one does that has much to do, or whose machine has; whatever waits for an attempt to connect fails with it."""
    async with running(make_config(), router(Router())) as (_, address):
        late = await between(address, delay_s=0.5)
        async with grpc.aio.insecure_channel(late, options=options) as channel:
            stub = routing_pb2_grpc.RouterServiceStub(channel)
            assert (await stub.Place(PLACE, timeout=60)).placement_id == "g"


async def test_callers_take_no_more_connections_than_allowed_and_room_comes_back(make_config, monkeypatch):
    """Without a token, too: they must not take the files that the service itself has to open."""
    monkeypatch.setattr(open_files, "MOST_CONNECTIONS", 5)
    async with running(make_config(), router(Router())) as (_, address):
        host, port = address.split(":")
        strangers = []
        async with open_channel(address, Access()) as first:
            await place(first)
            for number in range(6):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
                strangers.append(writer)
                async with asyncio.timeout(60):
                    answer = await reader.read(1)
                assert bool(answer) == (number < 4), number
            await place(first)
            # Channels to one address share a connection otherwise.
            own = (("grpc.use_local_subchannel_pool", 1), *CHANNEL_OPTIONS)
            async with grpc.aio.insecure_channel(address, options=own) as second:
                assert isinstance(await raised(place(second)), errors.Unreachable)
                for stranger in strangers:
                    stranger.close()
                async with asyncio.timeout(60):
                    while True:
                        try:
                            await place(second)
                            break
                        except grpc.aio.AioRpcError:
                            await asyncio.sleep(0.1)


STALLING = """
import asyncio, sys, time
from slipstream.api.routing.v1 import routing_pb2, routing_pb2_grpc
from slipstream.common.config import ServiceConfig
from slipstream.common.runtime import Service

class Router(routing_pb2_grpc.RouterServiceServicer):
    async def Place(self, request, context):
        if request.group_id == "stall":
            time.sleep(3)
        return routing_pb2.PlaceResponse()

async def main():
    service = Service(ServiceConfig(), [(routing_pb2_grpc.add_RouterServiceServicer_to_server, Router(), "")])
    await service.start()
    print("port", service.port, flush=True)
    await service.server.wait_for_termination()

asyncio.run(main())
"""


async def test_more_calls_than_grpc_lets_wait_wait_for_a_service_that_stands_still():
    server = subprocess.Popen([sys.executable, "-c", STALLING], stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    assert server.stdout is not None
    try:
        port = next(line.split()[1] for line in server.stdout if line.startswith("port "))
        async with open_channel(f"127.0.0.1:{port}", Access()) as channel:
            stub = routing_pb2_grpc.RouterServiceStub(channel)
            stall = routing_pb2.PlaceRequest()
            stall.CopyFrom(PLACE)
            stall.group_id = "stall"
            standing = asyncio.ensure_future(stub.Place(stall))
            await asyncio.sleep(0.5)
            await asyncio.gather(standing, *(stub.Place(PLACE) for _ in range(3000)))
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


@pytest.mark.parametrize(("limit", "connections"), [(256, 128), (1024, 512), (20000, 4096), (-1, 4096)])
def test_half_of_the_files_that_may_be_open_are_for_connections(limit, connections):
    assert open_files.connection_limit(limit) == connections


def test_a_low_soft_limit_of_open_files_is_raised_to_the_hard_one():
    code = (
        "import resource\nfrom slipstream.common.open_files import raise_limit\n"
        "raise_limit()\nprint(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    for shell, limit in (("ulimit -Sn 256; ulimit -Hn 3000", "3000"), ("ulimit -n 256", "256")):
        words = ["bash", "-c", f'{shell}; exec "$@"', "bash", sys.executable, "-c", code]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == limit


@pytest.mark.parametrize("token", [None, "other"])
async def test_a_call_without_the_token_is_refused_but_health_is_not(make_config, token):
    servicers = router(Router())
    async with (
        running(make_config(token="secret"), servicers) as (_, address),
        open_channel(address, Access(token)) as channel,
    ):
        error = await raised(routing_pb2_grpc.RouterServiceStub(channel).Place(PLACE))
        assert isinstance(error, errors.Unauthenticated)
        health: Any = health_pb2_grpc.HealthStub(as_any(channel))
        reply = await health.Check(health_pb2.HealthCheckRequest(service=ROUTER))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(as_any(channel))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [reply async for reply in reflection.ServerReflectionInfo(iter([_list_services()]))]
        assert isinstance(errors.from_rpc_error(caught.value), errors.Unauthenticated)


async def test_reflection_lists_the_services(make_config):
    async with running(make_config(), router(Router())) as (_, address), open_channel(address, Access()) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(as_any(channel))
        replies = [reply async for reply in stub.ServerReflectionInfo(iter([_list_services()]))]
        names = {service.name for service in replies[0].list_services_response.service}
        assert {ROUTER, "grpc.health.v1.Health"} <= names


async def test_a_request_against_its_proto_rules_names_field_rule_and_limit(make_config):
    async with calling(make_config(), Router()) as (_, stub):
        request = routing_pb2.PlaceRequest()
        request.CopyFrom(PLACE)
        request.sample_count = 5000
        error = await raised(stub.Place(request))
        assert isinstance(error, errors.InvalidRequest)
        assert error.metadata["field"] == "sample_count"
        assert error.metadata["rule"] == "int32.gte_lte"
        assert error.metadata["limit"].endswith("less than or equal to 4096")


async def test_an_error_arrives_as_the_class_that_was_raised_with_its_metadata(make_config):
    async def away():
        raise errors.StateUnavailable("Redis is away", url="unix:///x")

    async with calling(make_config(), Router(away)) as (_, stub):
        error = await raised(stub.Place(PLACE))
        assert type(error) is errors.StateUnavailable
        assert (error.message, error.metadata) == ("Redis is away", {"url": "unix:///x"})
        assert errors.to_status(error).details[1].type_url.endswith("RetryInfo")


async def test_an_error_from_a_peer_keeps_its_reason_on_the_way_through(make_config):
    async def lost():
        raise errors.NotFound("gone", name="x")

    async with calling(make_config(), Router(lost)) as (_, peer):

        async def forward():
            await peer.Place(PLACE)

        async with calling(make_config(), Router(forward)) as (_, stub):
            error = await raised(stub.Place(PLACE))
            assert isinstance(error, errors.NotFound)
            assert error.metadata == {"name": "x"}


async def test_a_bug_says_internal_error_and_nothing_else(make_config):
    async def bug():
        raise KeyError("a secret detail")

    async with calling(make_config(), Router(bug)) as (_, stub):
        error = await raised(stub.Place(PLACE))
        assert type(error) is errors.InternalError
        assert error.message == "internal error"


async def test_a_timeout_inside_a_handler_is_a_bug_and_not_the_callers_deadline(make_config):
    async def slow():
        async with asyncio.timeout(0.01):
            await asyncio.sleep(1)

    async with calling(make_config(), Router(slow)) as (_, stub):
        assert type(await raised(stub.Place(PLACE))) is errors.InternalError
        assert type(await raised(stub.Place(PLACE, timeout=0.001))) is errors.DeadlineExceeded


async def test_a_method_left_out_answers_unimplemented_with_a_reason(make_config):
    async with calling(make_config(), Router()) as (_, stub):
        error = await raised(stub.ListWorkers(routing_pb2.ListWorkersRequest()))
        assert isinstance(error, errors.Unsupported)
        assert error.metadata["method"] == f"/{ROUTER}/ListWorkers"


async def test_a_cancelled_stream_runs_its_cleanup_at_once(make_config):
    servicer = Router()
    async with calling(make_config(), servicer) as (_, stub):
        call = stub.WatchWorkers(routing_pb2.WatchWorkersRequest())
        await call.read()
        await servicer.open.wait()
        call.cancel()
        async with asyncio.timeout(60):
            await servicer.closed.wait()


async def test_a_drain_ends_watches_and_long_polls_and_waits_for_other_calls(make_config):
    finish = asyncio.Event()
    entered = asyncio.Event()

    async def working():
        entered.set()
        await finish.wait()

    servicer = Router(working)
    async with calling(make_config(drain_timeout_s=60.0), servicer) as (service, stub):
        watch = stub.WatchWorkers(routing_pb2.WatchWorkersRequest())
        await watch.read()
        poll = asyncio.ensure_future(stub.Release(routing_pb2.ReleaseRequest(request_id="r")))
        place = asyncio.ensure_future(stub.Place(PLACE))
        await entered.wait()
        await servicer.open.wait()
        stopping = asyncio.ensure_future(service.stop())
        assert isinstance(await raised(poll), errors.Draining)
        assert isinstance(await raised(watch.read()), errors.Draining)
        assert not place.done()
        finish.set()
        assert (await place).placement_id == "g"
        await stopping


async def test_a_drain_refuses_new_calls_while_work_is_handed_back(make_config):
    async with calling(make_config(), Router()) as (service, stub):
        await stub.Place(PLACE)
        refused = []

        async def hand_back():
            refused.append(await raised(stub.Place(PLACE)))

        await service.stop(hand_back)
        assert isinstance(refused[0], errors.Draining)


async def test_bytes_pass_both_ways_as_frames_and_resume_from_an_offset(make_config):
    add = broadcast_pb2_grpc.add_BroadcastServiceServicer_to_server
    data = bytes(range(256)) * 20
    servicers = add, Broadcaster(), BROADCAST
    async with running(make_config(), servicers) as (_, address), open_channel(address, Access()) as channel:
        publish = raw_stream_unary(channel, f"/{BROADCAST}/PublishShard", broadcast_pb2.PublishShardResponse)
        await publish(iter([encode_header(SHARD), *iter_frames([data], frame_bytes=999)]))
        fetch = raw_unary_stream(channel, f"/{BROADCAST}/FetchSlices")
        messages = raw_responses(fetch(FETCH))
        header = await read_header(messages, broadcast_pb2.SlicesHeader)
        assert header.size_bytes == len(data)
        assert await read_all(messages, len(data) - 100) == data[100:]


async def test_a_stream_without_its_header_is_refused(make_config):
    add = broadcast_pb2_grpc.add_BroadcastServiceServicer_to_server
    servicers = add, Broadcaster(), BROADCAST
    async with running(make_config(), servicers) as (_, address), open_channel(address, Access()) as channel:
        publish = raw_stream_unary(channel, f"/{BROADCAST}/PublishShard", broadcast_pb2.PublishShardResponse)
        error = await raised(publish(iter_frames([b"data"])))
        assert isinstance(error, errors.FrameInvalid)


async def test_a_taken_port_is_a_failure_that_may_pass(make_config):
    async with running(make_config(), router(Router())) as (service, _):
        with pytest.raises(ServiceFailed, match="address already in use"):
            build_server(make_config(listen=ListenConfig(port=service.port)), [])


def test_off_loopback_a_token_and_certificates_are_required(make_config):
    for token in (None, "secret"):
        with pytest.raises(ConfigError, match=r"auth.token_file and tls.cert_file.*slipstream certs"):
            build_server(make_config(token=token, listen=ListenConfig(host="0.0.0.0")), [])


def _list_services():
    return reflection_pb2.ServerReflectionRequest(list_services="")


@pytest.mark.parametrize("method", ["Place", "WatchWorkers", "ListWorkers"])
@pytest.mark.parametrize(("token", "code"), [("right", "INVALID_ARGUMENT"), ("wrong", "UNAUTHENTICATED")])
async def test_bytes_that_are_no_message_are_refused_after_the_token(make_config, method, token, code):
    config = make_config(token="right")
    async with running(config, router(Router())) as (_, address), open_channel(address, Access(token)) as channel:
        call = channel.unary_stream if method == "WatchWorkers" else channel.unary_unary
        done = call(f"/{ROUTER}/{method}")(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await (done.read() if method == "WatchWorkers" else done)
        assert error.value.code().name == code


async def test_calls_are_counted_by_method_and_by_the_code_they_ended_with(make_config):
    async def refuse_second():
        calls.append(1)
        if len(calls) == 2:
            raise errors.PoolSaturated("full")

    def count(code: str) -> float:
        labels = {"method": f"/{ROUTER}/Place", "code": code}
        return REGISTRY.get_sample_value("slipstream_rpcs_total", labels) or 0.0

    calls: list[int] = []
    before = {code: count(code) for code in ("OK", "RESOURCE_EXHAUSTED", "INVALID_ARGUMENT")}
    async with calling(make_config(), Router(refuse_second)) as (_, stub):
        await stub.Place(PLACE)
        for request in (PLACE, routing_pb2.PlaceRequest()):
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Place(request)
    assert {code: count(code) - n for code, n in before.items()} == dict.fromkeys(before, 1.0)
    latency = REGISTRY.get_sample_value("slipstream_rpc_latency_seconds_count", {"method": f"/{ROUTER}/Place"})
    assert latency is not None
    assert latency >= 3


async def test_health_follows_what_the_service_says_of_itself(make_config):
    able = True
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def bound(number: int) -> None:
        port.set_result(number)

    add = routing_pb2_grpc.add_RouterServiceServicer_to_server
    serving = serve(make_config(), [(add, Router(), ROUTER)], on_start=bound, able=lambda: able)
    service = asyncio.create_task(serving)
    try:
        async with open_channel(f"127.0.0.1:{await port}", Access()) as channel, asyncio.timeout(60):
            health: Any = health_pb2_grpc.HealthStub(as_any(channel))

            async def says(status: int) -> None:
                question = health_pb2.HealthCheckRequest(service=ROUTER)
                while (await health.Check(question)).status != status:  # noqa: ASYNC110 observed from outside
                    await asyncio.sleep(0.05)

            await says(health_pb2.HealthCheckResponse.SERVING)
            able = False
            await says(health_pb2.HealthCheckResponse.NOT_SERVING)
            able = True
            await says(health_pb2.HealthCheckResponse.SERVING)
    finally:
        service.cancel()
        await asyncio.wait([service])
