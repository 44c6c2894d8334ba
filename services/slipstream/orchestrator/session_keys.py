"""Keys of sessions: made from a secret of the run and a random number that the journal keeps.

So a key can be told once more to whoever repeats an OpenSession after the orchestrator was started again, though the
journal, which people read and copy, has neither it nor what it is made of alone.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

import structlog

from slipstream.common.config import ConfigError
from slipstream.common.disk import no_room, sync_directory
from slipstream.common.exits import ServiceFailed

log = structlog.get_logger()

SECRET_BYTES = 32
NONCE_BYTES = 16


class SessionKeys:
    """Makes keys. The secret is a file of the run directory that its owner alone can read."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` for what cannot be read, or made, and `ServiceFailed` on a full disk."""
        self.path = path
        try:
            self._secret = _read(path) or _create(path)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            kind = ServiceFailed if no_room(error) else ConfigError
            raise kind(f"{path}, the secret of sessions' keys, cannot be read or made: {reason}") from None
        if path.stat().st_mode & stat.S_IROTH:
            log.warning("secret_readable_by_all", path=str(path), remedy=f"chmod 600 {path}")

    def nonce(self) -> bytes:
        """A number for a session that is new."""
        return secrets.token_bytes(NONCE_BYTES)

    def key(self, nonce: bytes) -> str:
        """The key of a session."""
        digest = hmac.new(self._secret, nonce, hashlib.sha256).digest()
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def sha256(key: str) -> bytes:
    """What is kept of a key, and searched by."""
    return hashlib.sha256(key.encode()).digest()


def _read(path: Path) -> bytes:
    """The secret of an earlier process; nothing where there is none, or a process died as it wrote it."""
    try:
        secret = path.read_bytes()
    except FileNotFoundError:
        return b""
    if len(secret) == SECRET_BYTES:
        return secret
    log.warning("session_secret_replaced", path=str(path), size_bytes=len(secret), expected_bytes=SECRET_BYTES)
    return b""


def _create(path: Path) -> bytes:
    """Whole or not at all: no key is told before it is on disk."""
    secret = secrets.token_bytes(SECRET_BYTES)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, secret)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    fresh.replace(path)
    sync_directory(path.parent)
    return secret
