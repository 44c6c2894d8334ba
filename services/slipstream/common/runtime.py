"""Serving: one gRPC server and one TaskGroup a process, health, reflection, and an ordered stop.

    servicers = [(add_RouterServiceServicer_to_server, servicer, "slipstream.api.routing.v1.RouterService")]
    asyncio.run(serve(config, servicers, loops={"watch": pool.watch}))

| loop | takes | waits for | who unblocks it |
|---|---|---|---|
| the service's own | what it says | what it says | a loop that raises or returns ends the process non-zero |
| loop_lag | nothing | a timer | itself |
| certificate (over TLS) | nothing | its clock | time |

Stop order on SIGTERM or SIGINT: health says NOT_SERVING and new calls are refused; long polls and watches
end; `on_drain` hands work back; open calls finish within `drain_timeout_s`; loops are cancelled.
"""

# grpc's health and reflection packages are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from slipstream.common import metrics, telemetry, tracing
from slipstream.common.addresses import is_loopback
from slipstream.common.auth import Access, TokenCheck, exposed_secrets
from slipstream.common.channel import SERVER_OPTIONS
from slipstream.common.config import ConfigError, ServiceConfig, cli, host_port
from slipstream.common.disk import no_room
from slipstream.common.errors import SlipstreamError
from slipstream.common.exits import FAILED, REFUSED, ServiceFailed, cannot_listen, end
from slipstream.common.handlers import Drain, HandlerRegistrar, ends_on_drain
from slipstream.common.open_files import connection_limit, raise_limit
from slipstream.common.tls import try_certificates, watch_certificate

__all__ = [
    "Service",
    "ServiceFailed",
    "build_server",
    "die_with_parent",
    "ends_on_drain",
    "keep_freed_memory",
    "leave",
    "run_service",
    "serve",
]

log = structlog.get_logger()

Loop = Callable[[], Awaitable[Any]]
AddServicer = Callable[[Any, Any], None]
Servicers = Sequence[tuple[AddServicer, Any, str]]

Config = TypeVar("Config", bound=ServiceConfig)

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LAG_INTERVAL_S = 0.5
LAG_WARNING_S = 1.0
ABLE_INTERVAL_S = 0.2


class Service:
    """One gRPC server with its servicers, health and reflection, bound to a port and not yet started."""

    def __init__(self, config: ServiceConfig, servicers: Servicers) -> None:
        access = Access.from_config(config)
        _refuse_exposure(config, access)
        self.certificate_ends_s = try_certificates(config.tls)
        self.config = config
        self.drain = Drain()
        self.names = ["", *(name for _, _, name in servicers)]
        connections = ("grpc.max_allowed_incoming_connections", connection_limit())
        self.server = grpc.aio.server(options=(*SERVER_OPTIONS, connections))
        registrar: Any = HandlerRegistrar(self.server, TokenCheck(access.token), self.drain)
        for add, servicer, _ in servicers:
            add(servicer, registrar)
        self.health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        health_pb2_grpc.add_HealthServicer_to_server(self.health, registrar)
        shown = [*self.names[1:], health.SERVICE_NAME, reflection.SERVICE_NAME]
        shown_by = reflection.aio.ReflectionServicer(service_names=shown)  # pyright: ignore[reportAttributeAccessIssue]
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(shown_by, registrar)
        self.port = self._bind(access)
        self.guards = ("mutual TLS" if access.tls else "plain") + (", token" if access.token else ", no token")

    def _bind(self, access: Access) -> int:
        host, port = self.config.listen.host, self.config.listen.port
        address = host_port(host, port)
        try:
            _try_port(host, port)
        except OSError as error:
            raise cannot_listen(f"listen on {address}", error) from None
        try:
            if access.tls is None:
                return self.server.add_insecure_port(address)
            return self.server.add_secure_port(address, access.tls.server_credentials())
        except RuntimeError as error:
            raise ServiceFailed(f"cannot listen on {address}") from error

    async def set_health(self, serving: bool) -> None:
        for name in self.names:
            await self.health.set(name, _SERVING if serving else _NOT_SERVING)

    async def start(self, serving: bool = True) -> None:
        await self.set_health(serving)
        await self.server.start()
        log.info("service_started", host=self.config.listen.host, port=self.port, guards=self.guards, serving=serving)

    async def stop(self, on_drain: Loop | None = None) -> None:
        """Refuse new calls, end waiting ones, run `on_drain`, wait for the rest; all within `drain_timeout_s`."""
        started_s = time.monotonic()
        timeout_s = self.config.drain_timeout_s
        log.info("drain_started", timeout_s=timeout_s)
        await self.set_health(False)
        self.drain.start()
        if on_drain is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    await on_drain()
            except TimeoutError:
                log.warning("drain_cut_short", timeout_s=timeout_s)
        await self.server.stop(grace=max(0.0, timeout_s - (time.monotonic() - started_s)))
        log.info("drain_ended", duration_s=round(time.monotonic() - started_s, 3))


def build_server(config: ServiceConfig, servicers: Servicers) -> tuple[grpc.aio.Server, int]:
    """A server bound to its port, not started; for tests that start and stop it themselves. See `serve`."""
    service = Service(config, servicers)
    return service.server, service.port


def run_service(
    name: str,
    config_class: type[Config],
    run: Callable[[Config], Coroutine[Any, Any, None]],
    adapt: Callable[[Config], Config] = lambda config: config,
) -> None:
    """What `slipstream-NAME` does: read the command line, run until SIGTERM.

    `adapt` makes of a configuration that several processes share that of this one.
    Exits with one line on standard error where it fails, and with a code of `exits.py`.
    """
    config = adapt(cli(config_class))
    raise_limit()
    try:
        telemetry.setup_logging(config, name)
    except OSError as error:
        end(FAILED if no_room(error) else REFUSED, f"log.file: {config.log.file}: {_reason(error)}")
    if config.log.file is not None and sys.stderr.isatty():  # by hand: nothing else is seen of it
        print(f"log: {config.log.file}; SIGTERM or Ctrl-C ends it", file=sys.stderr, flush=True)
    code, sentence = REFUSED, ""
    try:
        tracing.setup(config, name)
        try:
            asyncio.run(run(config))
        finally:
            tracing.close()
        return
    except ConfigError as error:
        sentence = str(error)
    except (ServiceFailed, SlipstreamError) as error:
        code, sentence = FAILED, str(error)
    if config.log.file is not None:
        log.error("service_ended", reason=sentence, exit_code=code)
    end(code, sentence)


async def serve(
    config: ServiceConfig,
    servicers: Servicers,
    loops: Mapping[str, Loop] | None = None,
    on_drain: Loop | None = None,
    on_start: Callable[[int], Awaitable[Any]] | None = None,
    ready: asyncio.Event | None = None,
    able: Callable[[], bool] | None = None,
) -> None:
    """Run a service until SIGTERM, then drain. Raises `ServiceFailed` when a loop raises or returns, and what a loop
    raises as `ConfigError`.

    `on_start` gets the bound port before the loops begin. With `ready`, health says NOT_SERVING until it is set;
    with `able`, while it is False.
    """
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    service = Service(config, servicers)
    end_metrics = metrics.serve_metrics(config)
    await service.start(serving=ready is None)
    if config.log.file is None:  # started by hand: say at once where it can be reached
        print(f"listening on {host_port(config.listen.host, service.port)} ({service.guards})", flush=True)
    try:
        if on_start is not None:
            await on_start(service.port)
        async with asyncio.TaskGroup() as group:
            everything = {**(loops or {}), "loop_lag": _watch_loop_lag}
            if service.certificate_ends_s is not None:
                everything["certificate"] = partial(watch_certificate, service.certificate_ends_s)
            tasks = [group.create_task(_never_return(name, loop), name=name) for name, loop in everything.items()]
            if able is not None:
                tasks.append(group.create_task(_report_able(service, able), name="able"))
            if ready is not None:
                tasks.append(group.create_task(_report_ready(service, ready), name="ready"))
            await stop.wait()
            await service.stop(on_drain)
            for task in tasks:
                task.cancel()
    except* (ConfigError, ServiceFailed) as failures:
        first = min(failures.exceptions, key=lambda error: not isinstance(error, ConfigError))
        raise first from first.__cause__
    finally:
        await service.server.stop(grace=None)
        end_metrics()


def _cause(error: Exception) -> Exception:
    """What went wrong first, where a task group wraps it: of the group itself there is nothing to say."""
    while isinstance(error, ExceptionGroup):
        error = cast("ExceptionGroup[Exception]", error).exceptions[0]
    return error


async def _never_return(name: str, loop: Loop) -> None:
    try:
        await loop()
    except Exception as error:
        cause = _cause(error)
        if isinstance(cause, ConfigError):
            raise cause from None
        log.exception("loop_failed", loop=name)
        raise ServiceFailed(f"loop {name!r} failed: {cause}") from error
    log.error("loop_returned", loop=name)
    raise ServiceFailed(f"loop {name!r} returned; it must run for the life of the process")


async def _report_ready(service: Service, ready: asyncio.Event) -> None:
    await ready.wait()
    if not service.drain.started.is_set():
        await service.set_health(True)
        log.info("service_ready")


async def _report_able(service: Service, able: Callable[[], bool]) -> NoReturn:
    told = True
    while True:
        await asyncio.sleep(ABLE_INTERVAL_S)
        if able() != told and not service.drain.started.is_set():
            told = not told
            await service.set_health(told)


async def _watch_loop_lag() -> NoReturn:
    most_s = 0.0
    while True:
        due_s = time.monotonic() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        lag_s = max(0.0, time.monotonic() - due_s)
        metrics.loop_lag.observe(lag_s)
        metrics.loop_tasks.set(len(asyncio.all_tasks()))
        if lag_s > most_s:
            most_s = lag_s
            metrics.loop_lag_max.set(most_s)
        if lag_s > LAG_WARNING_S:
            log.warning("event_loop_lagged", lag_s=round(lag_s, 3))


def leave(code: object = 0) -> NoReturn:
    """End this process, which has closed all it had, without taking the interpreter apart.

    With torch loaded that takes a second of processor time, on a busy machine longer than a stop may last; other
    libraries wait for their servers. `code` is that of a `SystemExit`.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def keep_freed_memory() -> None:
    """Have the C library reuse freed buffers of up to 32 MiB, and 128 MiB in all, instead of giving them back.

    Each byte of a stream of frames is paged in anew otherwise, which takes as long as reading it from the socket.
    """
    trim_threshold, mmap_threshold = -1, -3
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc's
        libc.mallopt(mmap_threshold, 32 << 20)
        libc.mallopt(trim_threshold, 128 << 20)


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends. Call it in the child, first of all.

    Say who the parent is where it may have ended already.
    """
    parent = os.getppid() if parent is None else parent
    libc = ctypes.CDLL(None, use_errno=True)
    pr_set_pdeathsig = 1
    if libc.prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended in between: no signal will come
        os._exit(1)


def _try_port(host: str, port: int) -> None:
    """Bind as grpc will, which keeps the reason for a failure to itself and prints lines of its own."""
    family, kind, protocol, _, place = socket.getaddrinfo(host.strip("[]") or None, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(place)


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _refuse_exposure(config: ServiceConfig, access: Access) -> None:
    """Strangers must not be able to call, nor to read what the run's processes tell each other."""
    host = config.listen.host
    if not is_loopback(host) and (access.token is None or access.tls is None):
        raise ConfigError(
            f"listen.host is {host!r}, which is not loopback: that takes auth.token_file and tls.cert_file, "
            "tls.key_file, tls.ca_file; `slipstream certs` makes the certificates"
        )
    for path in exposed_secrets(config):
        log.warning("secret_readable_by_all", path=str(path), remedy=f"chmod 600 {path}")
