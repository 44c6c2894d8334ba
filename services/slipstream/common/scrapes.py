"""The HTTP server that shows Prometheus a process: few connections at once, none of them for long."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import prometheus_client

MAX_CONNECTIONS = 32
TIMEOUT_S = 10.0
"""Longest time of a connection, from its start to its end."""


class _Request(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what asks is a scraper, again and again."""


class ScrapeServer(ThreadingMixIn, WSGIServer):
    """Answers each connection on a thread of its own. One that is too many, or takes too long, is closed."""

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the machine has no room for another thread
            self._places.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        timer = threading.Timer(TIMEOUT_S, _cut, [request])
        timer.daemon = True
        timer.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            timer.cancel()
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: whoever breaks off, or speaks no TLS, says so by that."""


def start_scrapes(
    host: str, port: int, tls: tuple[Path, Path, Path] | None = None
) -> tuple[ScrapeServer, threading.Thread]:
    """Serve the process's metrics from a thread. `tls`: certificate, key, and the authority of who may ask.

    Raises `OSError`.
    """
    family = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0][0]
    kind = type("ScrapeServer", (ScrapeServer,), {"address_family": family})
    app = cast("Any", prometheus_client.make_wsgi_app())  # pyright: ignore[reportUnknownMemberType]
    server = make_server(host.strip("[]"), port, app, kind, handler_class=_Request)
    if tls is not None:
        certificate, key, authority = tls
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority))
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(certificate, key)
        # The handshake comes with the first byte read, on the connection's own thread: this one takes connections.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return server, thread


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # also of TLS: no farewell
