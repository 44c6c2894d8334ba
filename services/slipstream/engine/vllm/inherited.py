"""What holds in each process of vLLM's: set up in ours, applied in theirs.

Processes that are forked off inherit it. Those that are spawned, as on a GPU, begin anew: vLLM loads our plug-in
(`plugin.py`) into them, and it applies what `set_up` left in the environment.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import torch

from slipstream.common.config import ENVIRONMENT
from slipstream.engine.vllm.nixl_rest import rest_progress_thread
from slipstream.engine.vllm.process import die_as_forked, keep_stores_in

VARIABLE = "SLIPSTREAM_VLLM_PROCESSES"


def set_up(stores: Path, threads: int, nixl: bool) -> None:
    """For this process, which is to start vLLM, and for those that vLLM starts from now on.

    `threads`: of operators; those forked have to be told otherwise (`threads_of_operators`). `nixl`: it is used.
    """
    ENVIRONMENT[VARIABLE] = json.dumps([os.getpid(), str(stores), threads, nixl])
    _apply(stores, nixl)


def apply_in_spawned() -> None:
    """What was set up, if this process was spawned by one that did; else nothing."""
    parent, said = multiprocessing.parent_process(), ENVIRONMENT.get(VARIABLE)
    if parent is None or parent.pid is None or said is None:
        return
    owner, stores, threads, nixl = json.loads(said)
    if owner == os.getpid():
        return
    die_as_forked(parent.pid)
    torch.set_num_threads(threads)
    _apply(Path(stores), nixl)


def _apply(stores: Path, nixl: bool) -> None:
    keep_stores_in(stores)
    if nixl:
        rest_progress_thread()
