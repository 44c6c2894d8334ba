"""Mutual TLS and the token at the edge of a service: who gets in, and what is said to whom who does not."""

from __future__ import annotations

import asyncio
import datetime
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from slipstream.api.routing.v1 import routing_pb2, routing_pb2_grpc
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.config import ConfigError, ListenConfig, TlsConfig
from slipstream.common.runtime import Service
from slipstream.common.tls import TlsMaterial, try_certificates, watch_certificate
from slipstream.launcher.certs import make_certificates, run_certs
from slipstream.launcher.errors import LauncherError

ROUTER = "slipstream.api.routing.v1.RouterService"
TOKEN = "secret"
SERVICES = Path(__file__).resolve().parents[3] / "services"


class Router(routing_pb2_grpc.RouterServiceServicer):
    """Answers two calls, one of each kind."""

    async def ListWorkers(self, request, context):
        return routing_pb2.ListWorkersResponse()

    async def WatchWorkers(self, request, context):
        yield routing_pb2.WatchWorkersResponse()


@pytest.fixture(scope="module")
def authorities(tmp_path_factory):
    """Certificates of the run, and of another authority."""
    directory = tmp_path_factory.mktemp("certs")
    return [make_certificates(directory / name, [], 1).tls for name in ("ours", "theirs")]


@asynccontextmanager
async def running(config):
    service = Service(config, [(routing_pb2_grpc.add_RouterServiceServicer_to_server, Router(), ROUTER)])
    await service.start()
    try:
        yield f"127.0.0.1:{service.port}"
    finally:
        await service.server.stop(grace=None)


async def outcome(address, access) -> str:
    """OK, or the code of the refusal."""
    async with open_channel(address, access) as channel:
        try:
            stub = routing_pb2_grpc.RouterServiceStub(channel)
            await stub.ListWorkers(routing_pb2.ListWorkersRequest(), timeout=60)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "OK"


async def test_over_tls_only_a_certificate_of_the_runs_authority_gets_in(make_config, authorities):
    ours, theirs = map(TlsMaterial.load, authorities)
    assert ours is not None
    anonymous = TlsMaterial(b"", b"", ours.authority)
    async with running(make_config(token=TOKEN, tls=authorities[0])) as address:
        assert await outcome(address, Access(TOKEN, ours)) == "OK"
        assert await outcome(address, Access(TOKEN, theirs)) == "UNAVAILABLE"
        assert await outcome(address, Access(TOKEN)) == "UNAVAILABLE"
        # Trusts the server, but has no certificate to show.
        credentials = grpc.ssl_channel_credentials(anonymous.authority)
        async with grpc.aio.secure_channel(address, credentials) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await routing_pb2_grpc.RouterServiceStub(channel).ListWorkers(routing_pb2.ListWorkersRequest())
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_client_does_not_take_a_server_of_another_authority_for_a_peer(make_config, authorities):
    async with running(make_config(tls=authorities[1])) as address:
        assert await outcome(address, Access(None, TlsMaterial.load(authorities[0]))) == "UNAVAILABLE"


@pytest.mark.parametrize("token", [None, "wrong"])
async def test_over_tls_every_rpc_but_health_needs_the_token_too(make_config, authorities, token):
    access = Access(token, TlsMaterial.load(authorities[0]))
    async with (
        running(make_config(token=TOKEN, tls=authorities[0])) as address,
        open_channel(address, access) as opened,
    ):
        channel: Any = opened
        service = routing_pb2.DESCRIPTOR.services_by_name["RouterService"]
        calls = []
        for method in service.methods:
            kind = channel.unary_stream if method.server_streaming else channel.unary_unary
            done = kind(f"/{ROUTER}/{method.name}")(b"", timeout=60)
            calls.append(done.read() if method.server_streaming else done)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        calls.append(reflection.ServerReflectionInfo(iter([asked])).read())
        assert len(calls) > 3
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        health: Any = health_pb2_grpc.HealthStub(channel)
        reply = await health.Check(health_pb2.HealthCheckRequest(service=ROUTER), timeout=60)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(("token", "over_tls"), [(None, False), (TOKEN, False), (None, True)])
async def test_off_loopback_nothing_is_bound_without_both_token_and_tls(make_config, authorities, token, over_tls):
    tls = authorities[0] if over_tls else TlsConfig()
    config = make_config(token=token, tls=tls, listen=ListenConfig(host="0.0.0.0"))
    with pytest.raises(ConfigError, match=r"auth\.token_file and tls\.cert_file.*slipstream certs"):
        Service(config, [])


async def test_off_loopback_a_service_with_both_is_reached(make_config, authorities):
    config = make_config(token=TOKEN, tls=authorities[0], listen=ListenConfig(host="0.0.0.0"))
    async with running(config) as address:
        assert await outcome(address, Access.from_config(config)) == "OK"


def test_an_expired_certificate_is_refused_at_start_by_name(make_config, tmp_path):
    three_days_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=3)
    expired = make_certificates(tmp_path / "expired", [], 1, now=three_days_ago).tls
    with pytest.raises(ConfigError, match=r"expired/service.pem: certificate has expired"):
        Service(make_config(token=TOKEN, tls=expired), [])


@pytest.mark.parametrize(("left_s", "event"), [(3600.0, "certificate_expires_soon"), (-1.0, "certificate_expired")])
async def test_a_certificate_that_ends_while_a_service_runs_is_logged(left_s, event):
    with capture_logs() as lines:
        watch = asyncio.ensure_future(watch_certificate(time.time() + left_s))
        await asyncio.sleep(0.01)
        watch.cancel()
    assert [line["event"] for line in lines] == [event]


def test_certificates_that_do_not_belong_together_are_refused_in_one_sentence(authorities, tmp_path):
    ours, theirs = authorities
    with pytest.raises(ConfigError, match="key values mismatch"):
        try_certificates(ours.model_copy(update={"key_file": theirs.key_file}))
    with pytest.raises(ConfigError, match=r"service.pem: unable to get local issuer certificate"):
        try_certificates(ours.model_copy(update={"ca_file": theirs.ca_file}))
    (tmp_path / "text").write_text("no certificate")
    with pytest.raises(ConfigError, match="no certificate or no key in PEM"):
        try_certificates(ours.model_copy(update={"cert_file": tmp_path / "text"}))


def test_only_some_of_the_three_files_are_refused_by_name():
    with pytest.raises(ValueError, match="key_file and ca_file not set"):
        TlsConfig(cert_file=Path("x"))


def test_keys_are_their_owners_alone_and_nothing_is_overwritten_without_force(tmp_path):
    files = make_certificates(tmp_path, ["somewhere"], 1)
    modes = {path.name: path.stat().st_mode & 0o777 for path in files.all}
    assert modes == {"ca.pem": 0o644, "ca-key.pem": 0o600, "service.pem": 0o644, "service-key.pem": 0o600}
    before = files.all[0].read_bytes()
    with pytest.raises(LauncherError, match="--force"):
        make_certificates(tmp_path, [], 1)
    assert files.all[0].read_bytes() == before
    make_certificates(tmp_path, [], 1, force=True)
    assert files.all[0].read_bytes() != before


async def test_a_secret_that_all_can_read_is_warned_about(make_config):
    config = make_config(token=TOKEN)
    config.auth.token_file.chmod(0o644)
    with capture_logs() as lines:
        Service(config, [])
    assert [line["remedy"] for line in lines] == [f"chmod 600 {config.auth.token_file}"]


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(SERVICES)}
    command = [sys.executable, "-m", "slipstream.router", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **pipes, **options)


def test_a_service_that_cannot_start_says_why_in_one_line_and_by_its_code_whether_to_try_again(authorities, tmp_path):
    (tmp_path / "empty").touch()
    listening = start()
    assert listening.stdout is not None
    said = listening.stdout.readline()
    assert said.startswith("listening on 127.0.0.1:")
    assert said.endswith("(plain, no token)\n")
    cases = {
        "address already in use": (1, [f"--listen.port={said.split(':')[1].split()[0]}"]),
        "auth.token_file: missing: no such file or directory": (2, ["--auth.token-file=missing"]),
        "is empty; it must hold the run's token": (2, [f"--auth.token-file={tmp_path / 'empty'}"]),
        "tls.cert_file: missing: no such file": (2, [f"--tls.{name}-file=missing" for name in ("cert", "key", "ca")]),
    }
    try:
        started = {message: (code, start(*flags, cwd=tmp_path)) for message, (code, flags) in cases.items()}
        for message, (code, process) in started.items():
            _, errors = process.communicate(timeout=60)
            assert process.returncode == code, errors
            assert message in errors
            assert len(errors.splitlines()) == 1, errors
    finally:
        listening.send_signal(signal.SIGTERM)
        listening.communicate(timeout=60)


@pytest.mark.parametrize("host", ["a b", "", "-a", "a..b", "a/b", "https://a", "a" * 64, "*.", "a*", "\u00e4.example"])
def test_a_host_that_no_peer_can_have_is_refused(tmp_path, host, capsys):
    with pytest.raises(ConfigError, match="expected a host name or an address"):
        run_certs([str(tmp_path / "certs"), "--host", host])
    assert not (tmp_path / "certs").exists()


@pytest.mark.parametrize("host", ["trainer-1.example", "*.example", "10.0.0.7", "fe80::1", "node_3", "a"])
def test_a_host_that_a_peer_can_have_is_in_the_certificate(tmp_path, host):
    assert run_certs([str(tmp_path / "certs"), f"--host={host}"]) == 0
