"""Certificates: the bytes that grpc is given, a trial of them before anything relies on them, and a watch on their end.

grpc says of a certificate it cannot use no more than "handshake failed", at the first call. So a process first shakes
hands with itself, through Python's own TLS: what is wrong is then said in one sentence, at start.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Self

import grpc
import structlog

from slipstream.common.config import ConfigError, TlsConfig

log = structlog.get_logger()

DAY_S = 24 * 3600.0
WARNED_BEFORE_S = 7 * DAY_S
NEW_CERTIFICATES = "`slipstream certs` makes new ones"
MAX_FLIGHTS = 10
"""Turns of a handshake; it takes three."""


@dataclass(frozen=True)
class TlsMaterial:
    """PEM bytes of one process's certificate, its key, and the authority that both ends trust."""

    certificate: bytes
    key: bytes = field(repr=False)
    authority: bytes

    @classmethod
    def load(cls, config: TlsConfig) -> Self | None:
        """What the files hold, or None where none is configured. Raises `ConfigError`."""
        if config.cert_file is None or config.key_file is None or config.ca_file is None:
            return None
        try:
            return cls(
                read_file(config.cert_file, "tls.cert_file"),
                read_file(config.key_file, "tls.key_file"),
                read_file(config.ca_file, "tls.ca_file"),
            )
        except ConfigError as error:
            raise _unusable(str(error)) from None

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)

    def server_credentials(self) -> grpc.ServerCredentials:
        pairs = [(self.key, self.certificate)]
        return grpc.ssl_server_credentials(pairs, self.authority, require_client_auth=True)


def read_file(path: Path, key: str) -> bytes:
    """The bytes of a file that the configuration names at `key`. Raises `ConfigError`."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {path}: {(error.strerror or str(error)).lower()}") from None


def _unusable(what: str) -> ConfigError:
    return ConfigError(f"{what}; {NEW_CERTIFICATES}")


def try_certificates(config: TlsConfig) -> float | None:
    """Shake hands with ourselves. When the certificate ends, in seconds since 1970; None where none is configured.

    Raises `ConfigError` when no peer of this run would accept it: expired, of another authority, not of this key.
    """
    if TlsMaterial.load(config) is None:
        return None
    try:
        client = _context(config, ssl.PROTOCOL_TLS_CLIENT)
        server = _context(config, ssl.PROTOCOL_TLS_SERVER)
    except (ssl.SSLError, OSError) as error:
        reason = (error.reason or "").lower().replace("_", " ") if isinstance(error, ssl.SSLError) else ""
        reason = reason or "no certificate or no key in PEM"
        raise _unusable(f"tls: {config.cert_file}, {config.key_file} and {config.ca_file}: {reason}") from None
    try:
        certificate = _handshake(client, server)
    except ssl.SSLCertVerificationError as error:
        raise _unusable(f"tls.cert_file: {config.cert_file}: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise _unusable(f"tls.cert_file: {config.cert_file}: {error}") from None
    return ssl.cert_time_to_seconds(certificate["notAfter"])


def _context(config: TlsConfig, protocol: Any) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False  # which name a peer is called by is known when it is called
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(str(config.cert_file), str(config.key_file))
    context.load_verify_locations(str(config.ca_file))
    return context


def _handshake(client: ssl.SSLContext, server: ssl.SSLContext) -> dict[str, Any]:
    """The server's certificate, as the client sees it."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)]
    for flight in range(MAX_FLIGHTS):
        try:
            ends[flight % 2].do_handshake()
        except ssl.SSLWantReadError:
            continue
    certificate: Any = ends[0].getpeercert()
    return certificate


async def watch_certificate(ends_s: float) -> NoReturn:
    """Say in the log, once a day, that the certificate ends soon or has ended. Waits on its clock alone."""
    while True:
        left_s = ends_s - time.time()
        if left_s <= 0:
            log.error("certificate_expired", remedy="make new ones with `slipstream certs --force` and start again")
        elif left_s <= WARNED_BEFORE_S:
            log.warning("certificate_expires_soon", left_s=round(left_s))
        until_s = left_s if 0 < left_s <= WARNED_BEFORE_S else left_s - WARNED_BEFORE_S
        await asyncio.sleep(min(DAY_S, until_s + 1.0) if until_s > 0 else DAY_S)
