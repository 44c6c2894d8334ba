"""Open sandboxes and their leases."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NoReturn
from uuid import uuid4

import structlog
from prometheus_client import Gauge

from slipstream.common.errors import InvalidRequest, SandboxesFull, SandboxFilesFull, SandboxFileUnknown, SandboxUnknown
from slipstream.sandbox.execution import Execution
from slipstream.sandbox.program import Limits, Outcome

log = structlog.get_logger()

open_sandboxes = Gauge("slipstream_sandbox_open_sandboxes", "Sandboxes whose lease runs.")

MAX_FILES = 256


@dataclass
class Sandbox:
    """Limits, files and programs under one lease."""

    sandbox_id: str
    directory: str
    default_limits: Limits
    """What a program gets that names nothing."""
    max_limits: Limits
    lease_ttl_s: float
    expires_s: float
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    files_bytes: int = 0
    executions: set[Execution] = field(default_factory=set[Execution])

    def renew(self) -> None:
        self.expires_s = time.monotonic() + self.lease_ttl_s

    def lease_left_s(self) -> float:
        return max(0.0, self.expires_s - time.monotonic())

    def write_files(self, files: Mapping[str, bytes], max_bytes: int, left_bytes: int) -> None:
        """All or none. Programs that run already keep what they have. `left_bytes`: by the files of all others."""
        merged = {**self.files, **files}
        if len(merged) > MAX_FILES:
            raise SandboxFilesFull(f"more than {MAX_FILES} files", limit=MAX_FILES, unit="files")
        files_bytes = sum(len(data) for data in merged.values())
        if files_bytes > max_bytes:
            raise SandboxFilesFull(
                f"more than {max_bytes} bytes of files (sandbox.max_files_bytes)",
                name="sandbox.max_files_bytes",
                limit=max_bytes,
                unit="bytes",
            )
        if files_bytes > left_bytes:
            raise SandboxFilesFull(
                f"{files_bytes} bytes of files, and other sandboxes leave {left_bytes} (sandbox.max_all_files_bytes)",
                name="sandbox.max_all_files_bytes",
                limit=left_bytes,
                unit="bytes",
            )
        for path in merged:
            for parent in PurePosixPath(path).parents:
                if str(parent) in merged:
                    raise InvalidRequest(f"{parent} is a file and cannot hold {path}", field="files", path=path)
        self.files, self.files_bytes = merged, files_bytes

    def read_file(self, path: str) -> bytes:
        if path not in self.files:
            raise SandboxFileUnknown(f"no file {path}", path=path)
        return self.files[path]


class SandboxTable:
    """All open sandboxes. One past its lease is gone at once for callers, and swept soon after."""

    def __init__(self, max_sandboxes: int, sweep_interval_s: float, max_files_bytes: int = 256 << 20) -> None:
        """`max_files_bytes`: of all sandboxes together."""
        self.max_sandboxes = max_sandboxes
        self.max_files_bytes = max_files_bytes
        self._sweep_interval_s = sweep_interval_s
        self._sandboxes: dict[str, Sandbox] = {}

    def __len__(self) -> int:
        return len(self._sandboxes)

    def create(self, directory: str, default: Limits, most: Limits, lease_ttl_s: float) -> Sandbox:
        if len(self._sandboxes) >= self.max_sandboxes:
            self.sweep_now()
        if len(self._sandboxes) >= self.max_sandboxes:
            raise SandboxesFull(
                f"{self.max_sandboxes} sandboxes are open (sandbox.max_sandboxes)",
                name="sandbox.max_sandboxes",
                limit=self.max_sandboxes,
            )
        sandbox = Sandbox(uuid4().hex, directory, default, most, lease_ttl_s, time.monotonic() + lease_ttl_s)
        self._sandboxes[sandbox.sandbox_id] = sandbox
        open_sandboxes.set(len(self))
        return sandbox

    def get(self, sandbox_id: str) -> Sandbox:
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is None or sandbox.expires_s <= time.monotonic():
            raise SandboxUnknown("this sandbox expired, was deleted, or never was", sandbox_id=sandbox_id)
        return sandbox

    def write_files(self, sandbox: Sandbox, files: Mapping[str, bytes], max_bytes: int) -> None:
        """Give a sandbox files: at most `max_bytes`, and what the others leave of the bound of all."""
        others_bytes = sum(other.files_bytes for other in self._sandboxes.values() if other is not sandbox)
        sandbox.write_files(files, max_bytes, max(0, self.max_files_bytes - others_bytes))

    def delete(self, sandbox_id: str) -> bool:
        """Forget a sandbox and kill what runs in it."""
        sandbox = self._sandboxes.pop(sandbox_id, None)
        if sandbox is None:
            return False
        for execution in list(sandbox.executions):
            execution.stop(Outcome.EXPIRED)
        open_sandboxes.set(len(self))
        return True

    def page(self, after: str, size: int) -> list[Sandbox]:
        """The next sandboxes by id, one more than `size` if there are as many."""
        now_s = time.monotonic()
        ids = sorted(key for key, sandbox in self._sandboxes.items() if key > after and sandbox.expires_s > now_s)
        return [self._sandboxes[key] for key in ids[: size + 1]]

    def sweep_now(self) -> None:
        now_s = time.monotonic()
        for sandbox_id in [key for key, sandbox in self._sandboxes.items() if sandbox.expires_s <= now_s]:
            executions = len(self._sandboxes[sandbox_id].executions)
            self.delete(sandbox_id)
            log.info("sandbox_expired", sandbox_id=sandbox_id, execution_count=executions)

    async def sweep(self) -> NoReturn:
        """Loop: end sandboxes whose lease ran out."""
        while True:
            await asyncio.sleep(self._sweep_interval_s)
            self.sweep_now()
