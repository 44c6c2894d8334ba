"""Which checkpoint all ranks go on from: rank 0 looks through them, once for all, and the others take its word."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.common.version import PolicyVersion
from slipstream.trainer.checkpoint_store import CheckpointStore, Saved
from slipstream.trainer.parallel.world import World

FOUND = "found"
"""The version that rank 0 found, on the board."""
NOTHING = "nothing"


def newest_of_all(store: CheckpointStore, world: World, stopped: Callable[[], bool] = lambda: False) -> Saved | None:
    """The newest complete checkpoint. Raises `CheckpointFailed` where a rank does not see what rank 0 found."""
    if world.rank == 0:
        saved = store.newest()
        if not world.alone:
            world.board.put(FOUND, str(saved.version) if saved else NOTHING)
        return saved
    word = world.board.wait_for(FOUND, stopped) or NOTHING
    return None if word == NOTHING else store.at(PolicyVersion.parse(word))
