"""Workers as processes of their own, started as the launcher starts them: ranks of a group, or one alone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import grpc

from slipstream.api.inference.v1 import decode_pb2_grpc, worker_pb2, worker_pb2_grpc
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.config import ListenConfig, dump_toml
from slipstream.common.version import PolicyVersion
from slipstream.decode.config import DecodeConfig
from slipstream.engine.worker.config import RankGroupConfig
from slipstream.launcher.child import guarded
from slipstream.prefill.config import PrefillConfig
from tests import standstill
from tests.integration.workers.conftest import Cluster
from tests.ports import free_ports

START_TIMEOUT_S = 120.0


class WorkerProcess:
    """One worker: its process and stubs."""

    def __init__(self, cluster: Cluster, config: PrefillConfig | DecodeConfig, address: str) -> None:
        self.config = config
        self.address = address
        self.file = cluster.run_dir / f"{config.replica}.toml"
        self.file.write_text(dump_toml(config))
        self.log = cluster.run_dir / f"{config.replica}.log"
        self.process: subprocess.Popen[bytes]
        self.epoch = ""

    def start(self) -> None:
        with self.log.open("ab") as log:
            service = "slipstream.prefill" if isinstance(self.config, PrefillConfig) else "slipstream.decode"
            words = guarded((sys.executable, "-m", service, "@", str(self.file)))
            # A session of its own, so that what it started can be found.
            self.process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
        self.channel = open_channel(self.address, Access())
        self.control = worker_pb2_grpc.WorkerServiceStub(self.channel)
        self.decode = decode_pb2_grpc.DecodeServiceStub(self.channel)

    async def describe(self) -> worker_pb2.GetWorkerResponse | None:
        try:
            answer = await self.control.GetWorker(worker_pb2.GetWorkerRequest(), timeout=10)
        except grpc.aio.AioRpcError:
            return None
        self.epoch = answer.epoch
        return answer

    async def up(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while await self.describe() is None:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline_s, self.log.read_text()[-3000:]
            await asyncio.sleep(0.1)

    def signal(self, number: signal.Signals) -> None:
        """To the process alone, as a kernel or a person would send it."""
        self.process.send_signal(number)

    def stand_still(self) -> None:
        """Until it gets SIGCONT."""
        standstill.stop(self.process.pid)

    async def ended(self, timeout_s: float) -> int:
        return await asyncio.to_thread(self.process.wait, timeout_s)

    async def stop(self) -> None:
        await self.channel.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                await asyncio.to_thread(self.process.wait, 15)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


async def start_prefiller(cluster: Cluster, replica: str, valkey_url: str, **fields: Any) -> WorkerProcess:
    """A prefill worker that answers."""
    cluster.model_dir()
    (port,) = free_ports(1)
    values = {"replica": replica, "listen": ListenConfig(port=port), "broadcaster": f"127.0.0.1:{cluster.port}"}
    config = cluster.make_config(PrefillConfig, **values, redis_url=valkey_url, **fields)
    process = WorkerProcess(cluster, config, f"127.0.0.1:{port}")
    cluster.other_prefill_addresses.add(process.address)
    process.start()
    await process.up()
    return process


async def start_group(cluster: Cluster, size: int, valkey_url: str, **fields: Any) -> list[WorkerProcess]:
    """A decode group whose ranks answer."""
    cluster.model_dir()
    *ports, meeting = free_ports(size + 1)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    ranks = []
    for rank, port in enumerate(ports):
        group = RankGroupConfig(
            group_id="decode-1",
            rank=rank,
            addresses=addresses,
            rendezvous=f"127.0.0.1:{meeting}",
            vote_timeout_s=20.0,
        )
        values = {"replica": f"decode-1-{rank}", "listen": ListenConfig(port=port), "group": group}
        values |= {"broadcaster": f"127.0.0.1:{cluster.port}", "redis_url": valkey_url, **fields}
        ranks.append(WorkerProcess(cluster, cluster.make_config(DecodeConfig, **values), addresses[rank]))
    for rank in ranks:
        rank.start()
    for rank in ranks:
        await rank.up()
    return ranks


async def states(ranks: Sequence[WorkerProcess]) -> list[tuple[PolicyVersion, int] | None]:
    """Version and state of each; None of one that does not answer."""
    answers = await asyncio.gather(*(rank.describe() for rank in ranks))
    return [answer and (PolicyVersion.from_proto(answer.version), answer.state) for answer in answers]


async def until(ranks: Sequence[WorkerProcess], expected: list[Any], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while (now := await states(ranks)) != expected:
        assert time.monotonic() < deadline_s, f"{now}, not {expected}\n" + ranks[0].log.read_text()[-3000:]
        await asyncio.sleep(0.1)


def begin(version: PolicyVersion, update_id: str) -> worker_pb2.BeginUpdateRequest:
    return worker_pb2.BeginUpdateRequest(
        update_id=update_id, holder="keeper", version=version.to_proto(), lease_ttl_ms=30_000
    )


async def update(leader: WorkerProcess, version: PolicyVersion) -> worker_pb2.ApplyUpdateResponse:
    """What the version keeper does."""
    update_id = f"to {version}"
    await leader.control.BeginUpdate(begin(version, update_id), timeout=60)
    applied = await leader.control.ApplyUpdate(worker_pb2.ApplyUpdateRequest(update_id=update_id), timeout=60)
    await leader.control.FinishUpdate(worker_pb2.FinishUpdateRequest(update_id=update_id), timeout=60)
    return applied
