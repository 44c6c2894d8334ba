"""Bytes of a sealed version change on the broadcaster's disk: no worker serves them, and the next version heals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from uuid import uuid4

import pytest
from run_process import DEADLINE_S, GROUPS_PER_STEP, RunProcess, living_paths, open_positions

from slipstream.api.run.v1 import run_pb2, run_pb2_grpc
from slipstream.common.auth import Access, read_token
from slipstream.common.channel import open_channel

pytestmark = pytest.mark.timeout(590, func_only=False)


def damage(path: Path) -> None:
    """Turn over every byte of the second half of a file, in place."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        rest = file.read()
        file.seek(size // 2)
        file.write(bytes(byte ^ 0xFF for byte in rest))


async def rest(run: RunProcess) -> None:
    """Pause until all workers have what was published: where it is damaged on its way to all, nobody could go on."""
    async with orchestrator_of(run) as runs:
        await runs.PauseRun(run_pb2.PauseRunRequest(request_id=str(uuid4())), timeout=60)
        deadline_s = time.monotonic() + DEADLINE_S
        while not at_rest(run, now := (await runs.GetRun(run_pb2.GetRunRequest(), timeout=60)).run):
            assert time.monotonic() < deadline_s, now
            await asyncio.sleep(0.1)


def at_rest(run: RunProcess, now: run_pb2.Run) -> bool:
    """Whether a paused run has nothing left to train, and all workers have what it trained last."""
    journal = run.journal()
    sealed = max(record["step"] for record in journal if record["kind"] == "sealed")
    too_few = not now.running_group_count and len(open_positions(journal)) < GROUPS_PER_STEP
    same = all(worker.version == now.published for worker in now.workers)
    return too_few and same and sealed == now.step == now.published.step


async def resume(run: RunProcess) -> None:
    async with orchestrator_of(run) as runs:
        await runs.ResumeRun(run_pb2.ResumeRunRequest(request_id=str(uuid4())), timeout=60)


@contextlib.asynccontextmanager
async def orchestrator_of(run: RunProcess) -> AsyncIterator[run_pb2_grpc.RunServiceStub]:
    address = f"127.0.0.1:{run.setting('orchestrator', 'listen', 'port')}"
    async with open_channel(address, Access(read_token(run.path / "token"))) as channel:
        yield run_pb2_grpc.RunServiceStub(channel)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def test_a_worker_that_refits_from_damaged_bytes_waits_for_the_next_version(launch):
    run = launch(
        "run", "--decode.replicas", "2", "--orchestrator.total-steps", "100000", "--launcher.restart", "on_failure"
    )
    run.wait_step(3)
    assert run.slipstream("status", "run").returncode == 0
    for fault in (damage, cut_short):
        refits_from_damaged_bytes(run, fault)


def refits_from_damaged_bytes(run: RunProcess, fault: Callable[[Path], None]) -> None:
    asyncio.run(rest(run))
    damaged = 0
    for path in living_paths(run.path / "versions", "1.*/*.safetensors"):
        with contextlib.suppress(FileNotFoundError):  # beyond its retention meanwhile
            fault(path)
            damaged += 1
    assert damaged > 0
    pid, failures = run.pid("decode-2"), failed_prefetches(run)
    os.kill(pid, signal.SIGKILL)
    before, updates = len(run.metrics("step")), len(run.metrics("update"))
    run.wait_until(lambda: failed_prefetches(run) > failures)  # it has tried
    asyncio.run(resume(run))
    run.wait_until(lambda: len(run.metrics("step")) >= before + 3)
    run.wait_until(lambda: any(u["replica"] == "decode-2" for u in run.metrics("update")[updates:]))
    assert run.process.poll() is None
    assert run.pid("decode-2") != pid


def failed_prefetches(run: RunProcess) -> int:
    return (run.path / "logs" / "decode-2.log").read_text().count("prefetch_failed")
