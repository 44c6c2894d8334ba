"""Where a run is and what it takes to be let in."""

from __future__ import annotations

import fcntl
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc

from slipstream_client.errors import RunEnded

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A connection that went dead without a word is noticed within 30 s, also while a watch is silent.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # how long an attempt may take: a busy service greets late
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),  # `attempts.py` decides what is tried again
    ("grpc.use_local_subchannel_pool", 1),  # one connection a client: nobody waits behind another's back-off
)


@dataclass(frozen=True)
class Tls:
    """Mutual TLS: files of this client's certificate and key, and of the run's authority, all PEM."""

    cert_file: Path | str
    key_file: Path | str
    ca_file: Path | str

    def credentials(self) -> grpc.ChannelCredentials:
        certificate, key, authority = (Path(f).read_bytes() for f in (self.cert_file, self.key_file, self.ca_file))
        return grpc.ssl_channel_credentials(authority, key, certificate)


@dataclass(frozen=True)
class Connection:
    """An address with token and certificates."""

    address: str
    token: str | None = field(default=None, repr=False)
    tls: Tls | None = None

    @classmethod
    def to(cls, address: str, token: str | None, token_file: Path | str | None, tls: Tls | None) -> Self:
        """A token as text or in a file. Raises `ValueError` for both."""
        if token_file is not None:
            if token is not None:
                raise ValueError("give token or token_file, not both")
            token = Path(token_file).read_text(encoding="ascii").strip()
        return cls(address, token, tls)

    @classmethod
    def of_run(cls, run_dir: Path | str) -> Self:
        """What a run directory says: `endpoints.toml`, `token`, and `[tls]` of `config.toml`.

        Raises `FileNotFoundError` before the run has started, and `RunEnded` once its launcher is gone.
        """
        run_dir = Path(run_dir)
        endpoints = run_dir / "endpoints.toml"
        if not endpoints.exists():
            raise FileNotFoundError(f"{run_dir} is no run directory, or its run has not started: no endpoints.toml")
        if _is_over(run_dir):
            raise RunEnded(f"the run in {run_dir} is over, its services are gone; `slipstream up` starts another")
        address = tomllib.loads(endpoints.read_text())["endpoints"]["orchestrator"]
        token_file, config_file = run_dir / "token", run_dir / "config.toml"
        configured = tomllib.loads(config_file.read_text()).get("tls", {}) if config_file.exists() else {}
        files = {name: configured[name] for name in ("cert_file", "key_file", "ca_file") if configured.get(name)}
        tls = Tls(**files) if len(files) == 3 else None
        return cls.to(address, None, token_file if token_file.exists() else None, tls)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Headers of every call."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    def open(self) -> grpc.Channel:
        """A channel for blocking code; it connects at the first call."""
        if self.tls is None:
            return grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        return grpc.secure_channel(self.address, self.tls.credentials(), options=CHANNEL_OPTIONS)

    def open_aio(self) -> grpc.aio.Channel:
        """The same for asyncio code."""
        if self.tls is None:
            return grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(self.address, self.tls.credentials(), options=CHANNEL_OPTIONS)


def _is_over(run_dir: Path) -> bool:
    """The launcher locks its file for as long as it runs. A run that was started without one has no such file."""
    try:
        with (run_dir / "launcher.lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # locked; or there is none, or it is not ours to read: the first call will tell
        return False
    return True
