"""How the processes of the trainer find each other and become ranks of one world. Blocks; on the torch thread.

Started by the launcher, they meet in a store that rank 0 keeps, at an address that all were told. Started by torchrun,
in that of its agents. What fails is named by rank, through signs in the same store (`roll.py`).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from slipstream.common.config import ConfigError
from slipstream.common.exits import ServiceFailed
from slipstream.trainer.compute import device_of
from slipstream.trainer.config import ComputeConfig, ParallelConfig, RankConfig
from slipstream.trainer.parallel.backend import backend_of, prepare
from slipstream.trainer.parallel.board import Board
from slipstream.trainer.parallel.roll import Roll
from slipstream.trainer.parallel.world import World

START_TIMEOUT_S = 180.0
"""Until all ranks are there."""

SILENCE_PART = 0.25
"""Of `timeout_s`, after which a rank that gives no sign is lost to those that wait outside of collectives."""


def meet(place: RankConfig, parallel: ParallelConfig, compute: ComputeConfig) -> World:
    """The world of all ranks, once they are there; of this one where it is alone.

    Raises:
        ConfigError: the address is none, or this machine lacks the device.
        ServiceFailed: the ranks did not meet in time.
    """
    device = device_of(compute, place.place)
    layout = parallel.layout(place.rank_count)
    if place.rank_count == 1:
        return World(layout, device=device)
    start = timedelta(seconds=START_TIMEOUT_S)
    try:
        store, rank, count = next(
            iter(rendezvous(place.rendezvous, rank=place.rank, world_size=place.rank_count, timeout=start))
        )
    except ValueError as error:
        raise ConfigError(f"group.rendezvous is {place.rendezvous!r}: {error}") from None
    except RuntimeError as error:  # one of them is late, or died and starts again
        raise ServiceFailed(f"rank {place.rank}: the ranks did not meet at {place.rendezvous}: {error}") from None
    timeout = timedelta(seconds=parallel.timeout_s)
    prepare(device)
    dist.init_process_group(
        backend_of(device), store=PrefixStore("group", store), rank=rank, world_size=count, timeout=timeout
    )
    shared: Any = store  # a type without `clone`
    own = shared.clone()  # a connection of its own: the backend holds the other while it waits
    own.set_timeout(timeout)
    roll = Roll(PrefixStore("roll", own), rank, count, silence_s=SILENCE_PART * parallel.timeout_s)
    return World(layout, roll, Board(PrefixStore("board", own), roll), device)
