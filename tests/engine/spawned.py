"""What is found in a process that was spawned off one with an engine, as vLLM's is on a GPU."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

_PR_GET_PDEATHSIG = 2


@dataclass
class Found:
    """Once vLLM has loaded its plug-ins."""

    stores: list[str]
    """Where it meets its own."""
    death_signal: int
    """What comes when its parent ends."""
    threads: int
    nixl_wait_us: int | None
    """Of an agent whose caller asks for 0; None where NIXL is not imported."""


def tell_found(answer: Connection) -> None:
    """Load vLLM's plug-ins and send `Found`."""
    from vllm.plugins import load_general_plugins
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    load_general_plugins()
    executors: list[Any] = [uniproc_executor, multiproc_executor]
    signal = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(signal), 0, 0, 0)
    wait_us: int | None = None
    if (nixl := sys.modules.get("nixl._api")) is not None:
        agent = nixl.nixlBind.nixlAgentConfig()
        agent.pthrDelay = 0
        wait_us = agent.pthrDelay
    stores = [executor.get_file_store_init_method() for executor in executors]
    answer.send(Found(stores, signal.value, torch.get_num_threads(), wait_us))
