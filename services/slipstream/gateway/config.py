"""Configuration of the gateway."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from slipstream.common.config import ServiceConfig

MIB = 2**20


class GatewayConfig(ServiceConfig):
    """OpenAI-compatible HTTP for agents that drive sessions."""

    orchestrator_address: str = "127.0.0.1:0"
    """host:port of the orchestrator."""

    http_host: str = "127.0.0.1"
    """Address that HTTP listens on. Off loopback it speaks HTTPS, with the certificate of `tls`, and takes one."""

    http_port: int = Field(default=0, ge=0, le=65535)
    """Port of HTTP. 0: the launcher picks one."""

    max_connections: int = Field(default=1024, ge=1, le=65536)
    """Connections at once, half of the files that the process may open (ulimit -n) at most; one more is refused with
    status 503."""

    max_body_bytes: int = Field(default=4 * MIB, ge=1024, le=12 * MIB)
    """Bytes of a request's body."""

    max_all_bodies_bytes: int = Field(default=256 * MIB, ge=1024)
    """Bytes of the bodies of all requests that are read or answered at once; one more is refused with status 429."""

    header_timeout_s: float = Field(default=10.0, gt=0)
    """Longest time from a connection to its first request's last header."""

    body_timeout_s: float = Field(default=30.0, gt=0)
    """Longest time that a request's body may take to come."""

    keepalive_timeout_s: float = Field(default=75.0, gt=0)
    """A connection without a request is closed after this long."""

    write_timeout_s: float = Field(default=30.0, gt=0)
    """A client that takes nothing of an answer for this long is let go, and its turn aborted."""

    turn_timeout_s: float = Field(default=600.0, gt=0)
    """Longest time of a turn."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_body_bytes > self.max_all_bodies_bytes:
            raise ValueError("max_body_bytes: must not exceed max_all_bodies_bytes")
        return self
