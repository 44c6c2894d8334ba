"""What an Exec costs: processor and wall time of one, through gRPC and client, against bubblewrap started by hand.

    python loadtests/sandbox_exec.py

Fails when an Exec takes more than 25 ms of processor time in all (client, executor, jail, interpreter).
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "services"))

from slipstream.api.sandbox.v1 import sandbox_pb2_grpc
from slipstream.common.auth import Access
from slipstream.common.runtime import build_server
from slipstream.common.sandbox_client import SandboxClient
from slipstream.sandbox.__main__ import SERVICE
from slipstream.sandbox.config import SandboxConfig
from slipstream.sandbox.executor import Executor, open_executor
from slipstream.sandbox.jail import bind_arguments, find_bubblewrap, host_python

COUNT = 200
BUDGET_CPU_MS = 25.0
SOURCE = "print(eval('12*(3+4)'))"


def processor_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


async def measure(name: str, run: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """(processor ms, wall ms) of one."""
    started_s, used_s = time.perf_counter(), processor_s()
    for _ in range(COUNT):
        await run()
    wall_ms = (time.perf_counter() - started_s) / COUNT * 1000
    cpu_ms = (processor_s() - used_s) / COUNT * 1000
    print(f"{name:28} {cpu_ms:6.1f} ms cpu  {wall_ms:6.1f} ms wall")
    return cpu_ms, wall_ms


async def bare() -> None:
    """bubblewrap as one would type it."""
    tree = host_python()
    command = [
        str(find_bubblewrap().program),
        "--unshare-all",
        "--die-with-parent",
        "--as-pid-1",
        *bind_arguments(tree),
    ]
    command += ["--tmpfs", "/tmp", "--", "python3", "-I", "-S", "-c", SOURCE]
    subprocess.run(command, check=True, capture_output=True, env={"PATH": tree.path})  # noqa: ASYNC221


async def through_service(executor: Executor, config: SandboxConfig) -> tuple[float, float]:
    add = sandbox_pb2_grpc.add_SandboxServiceServicer_to_server
    server, port = build_server(config, [(add, executor.servicer, SERVICE)])
    await server.start()
    async with SandboxClient(f"127.0.0.1:{port}", Access()) as client:

        async def run() -> None:
            result = await client.run_python(SOURCE)
            assert result.stdout == b"84\n", result

        await run()
        figures = await measure(f"Exec ({executor.accounting})", run)
    await server.stop(grace=1.0)
    return figures


async def main() -> int:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    print(f"{COUNT} runs of python3 -I -S -c, one after another, {os.cpu_count()} processors")
    bare_cpu_ms, _ = await measure("bubblewrap by hand", bare)
    worst_ms = 0.0
    for accounting in ("auto", "supervisor"):
        with tempfile.TemporaryDirectory() as folder:
            config = SandboxConfig.model_validate({"run_dir": folder, "accounting": accounting})
            with open_executor(config) as executor:
                cpu_ms, _ = await through_service(executor, config)
        print(f"{'':28} {cpu_ms / bare_cpu_ms:6.2f} times the processor time of bubblewrap by hand")
        worst_ms = max(worst_ms, cpu_ms)
    passed = worst_ms <= BUDGET_CPU_MS
    print(f"{'passed' if passed else 'FAILED'}: {worst_ms:.1f} ms of {BUDGET_CPU_MS:.0f} ms")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
