"""Who a worker is to its peers."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

from slipstream.api.inference.v1 import worker_pb2
from slipstream.common.rank_groups import RankGroup


def new_epoch() -> str:
    """A name for one life of a process; later lives sort after earlier ones."""
    return f"{time.time_ns():016x}-{secrets.token_hex(3)}"


@dataclass
class WorkerIdentity:
    """Name, pool, epoch, address, and place in a data-parallel group. The address is known once the port is bound."""

    replica: str
    role: worker_pb2.WorkerRole
    address: str = ""
    group: RankGroup | None = None
    epoch: str = field(default_factory=new_epoch)
