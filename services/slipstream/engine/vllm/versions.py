"""The versions of vLLM that the modules of this folder were tested with, and how they differ in what is used here.

They use parts of vLLM that are not public, so any other version is refused. Imports neither torch nor vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Version:
    """One version's names and abilities."""

    waiting_queues: tuple[str, str]
    """The scheduler's queues of new requests, and of those that wait for something else."""
    running_limit: str
    """The scheduler's bound on the requests that run."""
    routes_by_slot: bool
    """vLLM keeps expert routes by slot of its block pool, on all devices. Else it keeps them by content, on a GPU only
    and beside no connector: then `step_rows.py` and `slots.py` do what it did before."""
    mooncake: bool
    """Its Mooncake connector, and our tier in a Mooncake store, were tried."""


VERSIONS = {
    "0.30.0": Version(("waiting", "skipped_waiting"), "max_num_running_reqs", routes_by_slot=True, mooncake=True),
    "0.32.0": Version(("waiting", "kv_holding_waiting"), "max_num_active_reqs", routes_by_slot=False, mooncake=False),
}
"""The first is the one that is installed by default."""


def version_of(name: str) -> Version:
    """For the name that vLLM gives itself, which may end in that of a build."""
    return VERSIONS[name.partition("+")[0]]
