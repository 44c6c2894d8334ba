"""What scorers may use: code runs in the sandbox executor and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from slipstream.common import tracing
from slipstream.common.sandbox_client import ExecResult, SandboxClient, SandboxLimits


class Sandbox(Protocol):
    """Runs a program where it can harm nobody. `SandboxClient` is one."""

    async def run_python(
        self, source: str, stdin: bytes = b"", limits: SandboxLimits | None = None, timeout_s: float | None = None
    ) -> ExecResult: ...


class SandboxSession(Protocol):
    """A sandbox of one's own, with files that programs see under /files. Closing it ends what runs in it."""

    async def write_files(self, files: Mapping[str, bytes]) -> None: ...

    async def read_files(self, paths: Sequence[str]) -> list[bytes]: ...

    async def run(self, argv: Sequence[str], stdin: bytes = b"", limits: SandboxLimits | None = None) -> ExecResult: ...

    async def close(self) -> None: ...


class SandboxNotConfigured(Exception):
    """An environment wants to run code and the runner knows no sandbox executor."""


class Tools:
    """The tools of one call of `score`, or of one episode; counts what it used."""

    def __init__(self, sandbox: Sandbox | None) -> None:
        self._sandbox = sandbox
        self._clients = [sandbox] if isinstance(sandbox, SandboxClient) else []
        self.sandbox_executions = 0

    @property
    def sandbox_away(self) -> bool:
        """Whether an executor did not answer when it was asked last."""
        return any(client.away for client in self._clients)

    def span(self, name: str, **attributes: Any) -> AbstractContextManager[Any]:
        """A block that the rollout's trace shows below the call of the environment it is in; nothing if it has none."""
        for name_of_ours in ("of", "copies"):  # say below what, there
            if name_of_ours in attributes:
                attributes[f"{name_of_ours}_"] = attributes.pop(name_of_ours)
        return tracing.span(name, **attributes)

    async def run_python(self, source: str, stdin: bytes, limits: SandboxLimits) -> ExecResult:
        """One execution in the sandbox. Raises `SandboxNotConfigured`, or what the executor refuses with."""
        if self._sandbox is None:
            raise SandboxNotConfigured("this environment executes code: set sandbox_address")
        self.sandbox_executions += 1
        return await self._sandbox.run_python(source, stdin, limits)

    def open_session(self) -> SandboxSession:
        """A sandbox of the caller's own, which it closes. Raises `SandboxNotConfigured`."""
        if not isinstance(self._sandbox, SandboxClient):
            raise SandboxNotConfigured("this environment works in a sandbox: set sandbox_address")
        self._clients.append(self._sandbox.session())
        return self._clients[-1]
