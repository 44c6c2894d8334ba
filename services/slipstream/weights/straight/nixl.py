"""Memory registered with a NIXL agent, read by another: over NVLink, InfiniBand or sockets, whatever UCX finds.

A transfer that is released before its end writes on as soon as its peer does (seen over TCP; NIXL does not complain).
It has ended only when it says so, or when its agent, which owns what carries it, is gone.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

import torch
from nixl._api import nixl_agent, nixl_agent_config
from torch import Tensor

from slipstream.api.broadcast.v1 import broadcast_pb2
from slipstream.common.errors import DeadlineExceeded, Unreachable
from slipstream.weights.straight.links import Run
from slipstream.weights.straight.memory import DeviceMemory, Memory

POLL_S = 0.0005


class Agent:
    """A NIXL agent, its threads, and what is registered with it."""

    def __init__(self) -> None:
        self.nixl: Any = nixl_agent(uuid4().hex, nixl_agent_config(backends=["UCX"]))
        self._registered: dict[tuple[int, int], Any] = {}

    def register(self, data: Tensor) -> None:
        key = (data.data_ptr(), data.numel())
        if key not in self._registered:
            self._registered[key] = self.nixl.register_memory([_described(data)], _kind(data))

    def deregister(self, data: Tensor) -> None:
        """Nothing is left to do once the agent has ended."""
        registered = self._registered.pop((data.data_ptr(), data.numel()), None)
        if registered is not None:
            self.nixl.deregister_memory(registered)

    def end(self) -> bool:
        """End its threads, and with them every transfer; False if somebody still holds it."""
        for registered in self._registered.values():
            with suppress(Exception):  # NIXL's own; the agent takes it along
                self.nixl.deregister_memory(registered)
        self._registered.clear()
        held, self.nixl.agent = weakref.ref(self.nixl.agent), None  # its last reference; not when it is collected
        return held() is None


class RegisteredMemory:
    """Memory that an agent lets others read."""

    def __init__(self, memory: Memory, agent: Agent) -> None:
        self._memory = memory
        self._agent = agent
        agent.register(memory.data)

    @property
    def data(self) -> Tensor:
        return self._memory.data

    def close(self) -> None:
        self._agent.deregister(self._memory.data)
        self._memory.close()


class NixlLender:
    """Registers memory of the trainer's device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._agent = Agent()

    def allocate(self, size_bytes: int) -> Memory:
        if self._device.type == "cuda":
            from slipstream.weights.straight.cuda_driver import DriverMemory

            return RegisteredMemory(DriverMemory(size_bytes, self._device), self._agent)
        return RegisteredMemory(DeviceMemory(size_bytes, self._device), self._agent)

    def offer(self, memory: Memory, size_bytes: int, reader: str) -> broadcast_pb2.BorrowShardResponse:
        data = memory.data
        nixl = broadcast_pb2.NixlMemory(
            agent=self._agent.nixl.get_agent_metadata(),
            address=data.data_ptr(),
            device=max(data.get_device(), 0),
            kind=_kind(data),
        )
        return broadcast_pb2.BorrowShardResponse(size_bytes=size_bytes, nixl=nixl)

    def close(self) -> None:
        self._agent.end()


class NixlReader:
    """Reads into registered memory of its own device, one version at a time."""

    def __init__(self, device: torch.device) -> None:
        self._reading = threading.Lock()
        self._agent: Agent | None = None
        self._peers: dict[bytes, str] = {}
        self._writes_on = False
        """A transfer that was given up has not ended: whatever it writes to is never read into again."""

    def read(
        self,
        loan: broadcast_pb2.BorrowShardResponse,
        runs: Sequence[Run],
        target: Tensor,
        reader: str,
        deadline_s: float,
    ) -> None:
        if not self._reading.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise DeadlineExceeded("another version was read until the deadline")
        try:
            if self._writes_on:
                raise Unreachable("a transfer that was given up cannot be ended: this process must be started again")
            self._read(loan.nixl, runs, target, deadline_s)
        except (DeadlineExceeded, Unreachable):
            self._forget(loan.nixl.agent)
            raise
        except Exception as error:  # NIXL's own, of many classes
            self._forget(loan.nixl.agent)
            raise Unreachable(f"the trainer's memory cannot be read: {type(error).__name__}: {error}") from error
        finally:
            self._reading.release()

    def _read(self, lent: broadcast_pb2.NixlMemory, runs: Sequence[Run], target: Tensor, deadline_s: float) -> None:
        """Returns, or raises, once nothing is written to `target` any more."""
        self._agent = self._agent or Agent()
        self._agent.register(target)
        nixl, peer = self._agent.nixl, self._peer(self._agent, lent.agent)
        base, device = target.data_ptr(), max(target.get_device(), 0)
        local = [(base + run.target, run.size_bytes, device) for run in runs]
        remote = [(lent.address + run.source, run.size_bytes, lent.device) for run in runs]
        handle = nixl.initialize_xfer(
            "READ", nixl.get_xfer_descs(local, _kind(target)), nixl.get_xfer_descs(remote, lent.kind), peer
        )
        state = "PROC"
        try:
            state = nixl.transfer(handle)
            while state == "PROC":
                if time.monotonic() > deadline_s:
                    raise DeadlineExceeded("the weights were not read in time")
                time.sleep(POLL_S)
                state = nixl.check_xfer_state(handle)
        finally:
            with suppress(Exception):  # of a transfer that is still going on: it ends with the agent
                nixl.release_xfer_handle(handle)
            del handle, nixl  # each holds the agent
            if state != "DONE":
                self._end()
        if state != "DONE":
            raise Unreachable(f"NIXL's transfer ended as {state}")

    def close(self) -> None:
        """Waits for what is being read, which has a deadline."""
        with self._reading:
            self._end()

    def _end(self) -> None:
        self._peers.clear()
        agent, self._agent = self._agent, None
        if agent is not None and not agent.end():
            self._writes_on = True

    def _peer(self, agent: Agent, metadata: bytes) -> str:
        if metadata not in self._peers:
            name = agent.nixl.add_remote_agent(metadata)
            self._peers[metadata] = name.decode() if isinstance(name, bytes) else name
        return self._peers[metadata]

    def _forget(self, metadata: bytes) -> None:
        name = self._peers.pop(metadata, None)
        if self._agent is not None and name is not None and name not in self._peers.values():
            self._agent.nixl.remove_remote_agent(name)


def _kind(data: Tensor) -> str:
    return "VRAM" if data.device.type == "cuda" else "DRAM"


def _described(data: Tensor) -> tuple[int, int, int, str]:
    return data.data_ptr(), data.numel(), max(data.get_device(), 0), ""
