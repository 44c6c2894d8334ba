"""How a process proves who it is, and how it checks others: the run's bearer token, and certificates over TLS.

    access = Access.from_config(config)
    async with open_channel("127.0.0.1:7000", access) as channel: ...

Every RPC but health needs the token. With TLS both ends show a certificate of the run's own authority, so that a
stranger does not get as far as a call.
"""

from __future__ import annotations

import hmac
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from slipstream.common.config import ConfigError, ServiceConfig
from slipstream.common.errors import Unauthenticated
from slipstream.common.tls import TlsMaterial, read_file

HEADER = "authorization"
EXEMPT = ("/grpc.health.v1.Health/",)


@dataclass(frozen=True)
class Access:
    """What one process needs to call and to serve the others of its run. Without anything: plain, no token."""

    token: str | None = field(default=None, repr=False)
    tls: TlsMaterial | None = None

    @classmethod
    def from_config(cls, config: ServiceConfig) -> Self:
        """Read the files that `config` names. Raises `ConfigError` for one that cannot be used."""
        return cls(read_token(config.auth.token_file), TlsMaterial.load(config.tls))


def read_token(path: Path | None) -> str | None:
    """The token in `path`, or None without a path. Raises `ConfigError`."""
    if path is None:
        return None
    try:
        token = read_file(path, "auth.token_file").decode("ascii").strip()
    except UnicodeDecodeError:
        raise ConfigError(f"auth.token_file: {path} holds more than ASCII text, so no token") from None
    if not token:
        raise ConfigError(f"auth.token_file: {path} is empty; it must hold the run's token")
    return token


def write_token(path: Path) -> str:
    """Make a token of 32 random bytes, readable by its owner alone; one that is there is kept."""
    path.touch(mode=0o600)
    if not path.read_text(encoding="ascii").strip():
        path.write_text(secrets.token_hex(32) + "\n", encoding="ascii")
    return path.read_text(encoding="ascii").strip()


def exposed_secrets(config: ServiceConfig) -> list[Path]:
    """Files with a secret that others than their owner and its group can read."""
    named = [path for path in (config.auth.token_file, config.tls.key_file) if path is not None]
    return [path for path in named if path.stat().st_mode & stat.S_IROTH]


class TokenCheck:
    """Compares the header of a call with the run's token, in constant time. Without a token all calls pass."""

    def __init__(self, token: str | None) -> None:
        self._expected = None if token is None else f"Bearer {token}".encode()

    def exempt(self, method: str) -> bool:
        """Whether `method` is answered to anyone, at any time."""
        return method.startswith(EXEMPT)

    def check(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Raise `Unauthenticated` unless `metadata` carries the token."""
        if self._expected is None:
            return
        for key, value in metadata:
            if key == HEADER:
                given = value if isinstance(value, bytes) else value.encode()
                if hmac.compare_digest(given, self._expected):
                    return
                raise Unauthenticated("the bearer token is wrong")
        raise Unauthenticated("a bearer token is required: 'authorization: Bearer TOKEN'")
