"""The backends of a process group, by where its ranks compute: gloo on CPUs, NCCL for what lies on cards.

Numbers and words that ranks agree on are on their CPUs in any case, and go by gloo: they do not wait for a card, and
what fails there fails at once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from slipstream.common.config import ENVIRONMENT

ON_FAILURE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
CLEAN_UP = "2"
"""Of a collective that failed or took too long: give it up, and leave the process alone. By default torch ends the
process from a thread of its own, and nobody learns whose fault it was."""

_CUDA = torch.device("cuda")


def backend_of(device: torch.device) -> str:
    """As `init_process_group` takes it."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def prepare(device: torch.device) -> None:
    """To be called before there is a process group."""
    if device.type == "cuda":
        ENVIRONMENT.setdefault(ON_FAILURE, CLEAN_UP)


def failed() -> bool:
    """Whether a collective on this process's card has failed, or took too long."""
    return any(backend.get_error() != ErrorType.SUCCESS for backend in _backends())


def abort() -> None:
    """Give up all collectives on this process's card, so that whoever waits for the card goes on. May block."""
    backends = _backends()
    if not backends:
        return
    # As one: giving up a communicator may wait for the kernels of another.
    backends[0]._group_start()
    for backend in backends:
        backend.abort()
    backends[0]._group_end()


def _backends() -> list[Any]:
    """NCCL's, one for each group that this rank is in."""
    if not dist.is_nccl_available():
        return []
    groups: Any = dist.distributed_c10d._world.pg_map
    found = [group._get_backend(_CUDA) for group in list(groups) if _CUDA in group._device_types]
    return [backend for backend in found if isinstance(backend, dist.ProcessGroupNCCL)]
