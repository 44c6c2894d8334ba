"""The run's bearer token: read from a file, checked on every call but health."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable
from pathlib import Path

from slipstream.common.errors import Unauthenticated

HEADER = "authorization"
EXEMPT = ("/grpc.health.v1.Health/",)


def read_token(path: Path | None) -> str | None:
    """The token in `path`, or None without a path."""
    if path is None:
        return None
    token = path.read_text(encoding="ascii").strip()
    if not token:
        raise ValueError(f"{path} is empty; it must hold the run's token")
    return token


def write_token(path: Path) -> str:
    """Make a token of 32 random bytes, readable by its owner alone; one that is there is kept."""
    path.touch(mode=0o600)
    if not path.read_text(encoding="ascii").strip():
        path.write_text(secrets.token_hex(32) + "\n", encoding="ascii")
    return path.read_text(encoding="ascii").strip()


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
