"""What the blocking and the asyncio client share: how they are made, and the stubs they call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Self

from slipstream.api.rollout.v1 import rollout_pb2_grpc
from slipstream.api.run.v1 import run_pb2_grpc
from slipstream_client.connection import Connection, Tls

DEFAULT_TIMEOUT_S = 30.0
WATCH_PATIENCE_S = 60.0


class BaseClient(ABC):
    """A channel to one orchestrator, with its stubs."""

    def __init__(self, connection: Connection, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._address = connection.address
        self._metadata = connection.metadata
        self._timeout_s = timeout_s
        self._channel = self._open(connection)
        self._rollouts: Any = rollout_pb2_grpc.RolloutServiceStub(self._channel)
        self._runs: Any = run_pb2_grpc.RunServiceStub(self._channel)

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        token: str | None = None,
        token_file: Path | str | None = None,
        tls: Tls | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Self:
        """A client of the orchestrator at `host:port`. The connection is made by the first call."""
        return cls(Connection.to(address, token, token_file, tls), timeout_s)

    @classmethod
    def of_run(cls, run_dir: Path | str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Self:
        """A client of the run in a directory, `runs/demo` say, with the token that lies there.

        Raises `FileNotFoundError` before the run has started, and `RunEnded` once its launcher is gone.
        """
        return cls(Connection.of_run(run_dir), timeout_s)

    @staticmethod
    @abstractmethod
    def _open(connection: Connection) -> Any:
        """The channel of this kind of client."""
