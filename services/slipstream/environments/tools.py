"""What scorers may use: code runs in the sandbox executor and nowhere else."""

from __future__ import annotations

from typing import Protocol

from slipstream.common.sandbox_client import ExecResult, SandboxLimits


class Sandbox(Protocol):
    """Runs a program where it can harm nobody. `SandboxClient` is one."""

    async def run_python(
        self, source: str, stdin: bytes = b"", limits: SandboxLimits | None = None, timeout_s: float | None = None
    ) -> ExecResult: ...


class SandboxNotConfigured(Exception):
    """An environment wants to run code and the runner knows no sandbox executor."""


class Tools:
    """The tools of one call of `score`; counts what it used."""

    def __init__(self, sandbox: Sandbox | None) -> None:
        self._sandbox = sandbox
        self.sandbox_executions = 0

    async def run_python(self, source: str, stdin: bytes, limits: SandboxLimits) -> ExecResult:
        """One execution in the sandbox. Raises `SandboxNotConfigured`, or what the executor refuses with."""
        if self._sandbox is None:
            raise SandboxNotConfigured("this environment executes code: set sandbox_address")
        self.sandbox_executions += 1
        return await self._sandbox.run_python(source, stdin, limits)
