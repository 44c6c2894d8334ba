"""The HTTP server: as many connections as are allowed, none of which may take its time for ever."""

from __future__ import annotations

import asyncio
import json
import ssl
import traceback
from pathlib import Path
from typing import Any

import structlog
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, BadStatusLine, InvalidHeader, LineTooLong
from aiohttp.web_protocol import RequestHandler

from slipstream.common.addresses import is_loopback
from slipstream.common.config import ConfigError
from slipstream.common.exits import cannot_listen
from slipstream.common.open_files import connection_limit
from slipstream.gateway import telemetry
from slipstream.gateway.config import GatewayConfig
from slipstream.gateway.handlers import Handlers, in_openai_shape, refused
from slipstream.gateway.refusals import Refusal

log = structlog.get_logger()

MAX_HEADERS = 64
MAX_HEADER_BYTES = 8192
BACKLOG = 128
STOP_TIMEOUT_S = 5.0


def full(limit: int) -> bytes:
    """The answer to a connection that is one too many."""
    message = f"{limit} connections are open, as many as may be (gateway.max_connections)"
    body = json.dumps(Refusal(503, message, code="connections_full", kind="server_error").as_json()).encode()
    return (
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )


class BoundedHandler(RequestHandler):  # pyright: ignore[reportMissingTypeArgument, reportUntypedBaseClass]
    """A connection. One that is too many is told so; one that says nothing is closed."""

    __slots__ = ("_http", "_silence", "_slot")

    def __init__(self, http: HttpServer, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._http = http
        self._slot = False
        self._silence: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert isinstance(transport, asyncio.WriteTransport)
        transport.set_write_buffer_limits(0)  # who waits for a write waits until the system has all of it
        if self._http.connection_count >= self._http.max_connections:
            telemetry.connections_refused.inc()
            transport.write(full(self._http.max_connections))
            self.force_close()
            return
        self._slot = True
        self._http.connection_count += 1
        self._silence = self._loop.call_later(self._http.config.header_timeout_s, self.force_close)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.heard()
        if self._slot:
            self._slot = False
            self._http.connection_count -= 1
        super().connection_lost(exc)

    async def finish_response(self, request: Any, resp: web.StreamResponse, start_time: float | None) -> Any:
        """Send the rest of an answer. Whoever takes none of it loses the connection, and others get its place."""
        transport = self.transport
        if isinstance(resp, web.HTTPException):  # of an expectation, before any of our own code
            resp = refused(Refusal(resp.status, resp.reason, code="bad_request"))
        try:
            async with asyncio.timeout(self._http.config.write_timeout_s):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            if transport is not None:
                transport.abort()
            return resp, True

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """What aiohttp logs has the bytes that it could not read: they may be a key, or all of a conversation."""
        log.warning("http_broke_off", error=_named(kwargs.get("exc_info")))

    def handle_error(
        self, request: Any, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer what is no HTTP."""
        log.info("http_refused", status=status, error=_named(exc))
        if request.writer.output_size > 0:
            raise ConnectionResetError("an answer has begun already")
        refusal = Refusal(status, "internal error", code="internal_error", kind="server_error")
        response = refused(_unreadable(exc) if status == 400 else refusal)
        response.force_close()
        return response

    def heard(self) -> None:
        """A request came."""
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None


class BoundedServer(web.Server):
    """Makes a `BoundedHandler` of each connection."""

    http: HttpServer

    def __call__(self) -> RequestHandler:  # pyright: ignore[reportMissingTypeArgument]
        return BoundedHandler(self.http, self, loop=self._loop, **self._kwargs)


class HttpServer:
    """Serves `Handlers` from `start` to `stop`."""

    def __init__(self, config: GatewayConfig, handlers: Handlers) -> None:
        self.config = config
        self.connection_count = 0
        self.max_connections = min(config.max_connections, connection_limit())
        self.port = 0
        self._handlers = handlers
        self._tls = _tls(config)
        telemetry.connections.read_from(lambda: self.connection_count)

    async def start(self) -> None:
        """Listen. Raises `ConfigError` where that is not possible, and `ServiceFailed` where the port is taken."""
        if self.max_connections < self.config.max_connections:
            log.warning(
                "connections_bounded_by_open_files",
                max_connections=self.config.max_connections,
                limit=self.max_connections,
                remedy="raise the limit of open files (ulimit -n)",
            )
        app = web.Application(middlewares=[_heard, in_openai_shape], client_max_size=self.config.max_body_bytes)
        app.add_routes(self._handlers.routes())
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        app_server = self._runner.server
        assert app_server is not None
        self._server = BoundedServer(
            app_server.request_handler,
            request_factory=app_server.request_factory,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=self.config.keepalive_timeout_s,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
            lingering_time=1.0,
        )
        self._server.http = self
        host, port = self.config.http_host, self.config.http_port
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                self._server,
                host,
                port,
                ssl=self._tls,
                ssl_handshake_timeout=self.config.header_timeout_s if self._tls is not None else None,
                backlog=BACKLOG,
            )
        except OSError as error:
            raise cannot_listen(f"listen on {host}:{port}", error) from None
        self.port = self._listener.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Take no more connections, and give what runs a little time."""
        self._listener.close()
        await self._server.shutdown(STOP_TIMEOUT_S)
        await self._runner.cleanup()


def _unreadable(error: BaseException | None) -> Refusal:
    """What is wrong with a head that cannot be read; none of its own bytes, which may be a key."""
    match error:
        case LineTooLong():
            return Refusal(431, f"the request line, or a header, is longer than {MAX_HEADER_BYTES} bytes",
                           code="headers_too_large")  # fmt: skip
        case BadHttpMessage(message="Too many headers received"):
            return Refusal(431, f"more than {MAX_HEADERS} headers", code="headers_too_large")
        case InvalidHeader():
            return Refusal(400, "a header of the request is none that HTTP has", code="bad_header")
        case BadStatusLine():
            return Refusal(400, "the request line is none of HTTP: a method, a path, and HTTP/1.1", code="bad_request")
        case _:
            return Refusal(400, "this is no HTTP request that can be read", code="bad_request")


def _named(error: object) -> str:
    """An error without its words: its class, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__) if isinstance(error, BaseException) else []
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}"


@web.middleware
async def _heard(request: web.Request, handler: Any) -> web.StreamResponse:
    protocol = request.protocol
    if isinstance(protocol, BoundedHandler):
        protocol.heard()
    return await handler(request)


def _tls(config: GatewayConfig) -> ssl.SSLContext | None:
    if is_loopback(config.http_host):
        return None
    if config.tls.cert_file is None or config.tls.key_file is None:
        raise ConfigError(
            f"http_host is {config.http_host!r}, which is not loopback: keys would be seen on the way. That takes "
            "tls.cert_file and tls.key_file; `slipstream certs` makes them"
        )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(config.tls.cert_file, config.tls.key_file)
    return context
