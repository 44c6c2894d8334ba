"""Memory registered with a NIXL agent, read by another: over NVLink, InfiniBand or sockets, whatever UCX finds."""

from __future__ import annotations

import time
from collections.abc import Sequence
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


class RegisteredMemory:
    """Memory that an agent lets others read."""

    def __init__(self, memory: Memory, agent: Any) -> None:
        self._memory = memory
        self._agent = agent
        self._registered = agent.register_memory([_described(memory.data)], _kind(memory.data))

    @property
    def data(self) -> Tensor:
        return self._memory.data

    def close(self) -> None:
        self._agent.deregister_memory(self._registered)
        self._memory.close()


class NixlLender:
    """Registers memory of the trainer's device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._agent = _agent(device)

    def allocate(self, size_bytes: int) -> Memory:
        if self._device.type == "cuda":
            from slipstream.weights.straight.cuda_driver import DriverMemory

            return RegisteredMemory(DriverMemory(size_bytes, self._device), self._agent)
        return RegisteredMemory(DeviceMemory(size_bytes, self._device), self._agent)

    def offer(self, memory: Memory, size_bytes: int, reader: str) -> broadcast_pb2.BorrowShardResponse:
        data = memory.data
        nixl = broadcast_pb2.NixlMemory(
            agent=self._agent.get_agent_metadata(),
            address=data.data_ptr(),
            device=max(data.get_device(), 0),
            kind=_kind(data),
        )
        return broadcast_pb2.BorrowShardResponse(size_bytes=size_bytes, nixl=nixl)

    def close(self) -> None:
        """The agent goes with its last memory."""


class NixlReader:
    """Reads into registered memory of its own device."""

    def __init__(self, device: torch.device) -> None:
        self._agent = _agent(device)
        self._registered: dict[tuple[int, int], Any] = {}
        self._peers: dict[bytes, str] = {}

    def read(
        self,
        loan: broadcast_pb2.BorrowShardResponse,
        runs: Sequence[Run],
        target: Tensor,
        reader: str,
        deadline_s: float,
    ) -> None:
        lent = loan.nixl
        handle: Any = None
        try:
            self._register(target)
            peer = self._peer(lent.agent)
            base, device = target.data_ptr(), max(target.get_device(), 0)
            local = [(base + run.target, run.size_bytes, device) for run in runs]
            remote = [(lent.address + run.source, run.size_bytes, lent.device) for run in runs]
            handle = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(local, _kind(target)),
                self._agent.get_xfer_descs(remote, lent.kind),
                peer,
            )
            state = self._agent.transfer(handle)
            while state == "PROC":
                if time.monotonic() > deadline_s:
                    raise DeadlineExceeded("the weights were not read in time")
                time.sleep(POLL_S)
                state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise Unreachable(f"NIXL's transfer ended as {state}")
        except (DeadlineExceeded, Unreachable):
            self._forget(lent.agent)
            raise
        except Exception as error:  # NIXL's own, of many classes
            self._forget(lent.agent)
            raise Unreachable(f"the trainer's memory cannot be read: {type(error).__name__}: {error}") from error
        finally:
            if handle is not None:
                _release(self._agent, handle)

    def close(self) -> None:
        for agent in list(self._peers):
            self._forget(agent)
        for registered in self._registered.values():
            self._agent.deregister_memory(registered)
        self._registered.clear()

    def _register(self, target: Tensor) -> None:
        key = (target.data_ptr(), target.numel())
        if key not in self._registered:
            self._registered[key] = self._agent.register_memory([_described(target)], _kind(target))

    def _peer(self, metadata: bytes) -> str:
        if metadata not in self._peers:
            name = self._agent.add_remote_agent(metadata)
            self._peers[metadata] = name.decode() if isinstance(name, bytes) else name
        return self._peers[metadata]

    def _forget(self, metadata: bytes) -> None:
        name = self._peers.pop(metadata, None)
        if name is not None and name not in self._peers.values():
            self._agent.remove_remote_agent(name)


def _release(agent: Any, handle: Any) -> None:
    try:
        agent.release_xfer_handle(handle)
    except Exception:  # of a transfer that is still going on: NIXL drops it with the agent
        return


def _agent(device: torch.device) -> Any:
    return nixl_agent(uuid4().hex, nixl_agent_config(backends=["UCX"]))


def _kind(data: Tensor) -> str:
    return "VRAM" if data.device.type == "cuda" else "DRAM"


def _described(data: Tensor) -> tuple[int, int, int, str]:
    return data.data_ptr(), data.numel(), max(data.get_device(), 0), ""
