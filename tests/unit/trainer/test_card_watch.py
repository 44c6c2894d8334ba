"""A thread that waits for a card whose collective waits for a lost rank: woken, told who, or ended with its process.

There is no card here: a wait for an event stands for it, and giving collectives up sets the event.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import FileStore

from slipstream.trainer.parallel.roll import RankLost, Roll
from slipstream.trainer.parallel.watch import CardWatch

SILENCE_S = 3.0
DEADLINE_S = 60.0


@pytest.fixture
def rolls(tmp_path):
    made = [Roll(FileStore(str(tmp_path / "store"), 2), rank, 2, SILENCE_S) for rank in range(2)]
    yield made
    for roll in made:
        roll.close()


def test_a_silent_rank_wakes_who_waits_for_the_card(rolls):
    given_up = threading.Event()
    watch = CardWatch(rolls[0], failed=given_up.is_set, abort=given_up.set)
    rolls[1].close()
    with pytest.raises(RankLost) as caught, watch.watching():
        assert given_up.wait(DEADLINE_S)
    assert caught.value.ranks == [1]
    assert str(caught.value) == "rank 1 of the trainer does not answer"
    with pytest.raises(RankLost), watch.watching():  # what comes after is not to be believed either
        pass


def test_what_is_computed_after_a_collective_failed_is_not_believed(rolls):
    failed = threading.Event()
    watch = CardWatch(rolls[0], failed=failed.is_set, abort=lambda: None)
    rolls[0].arrive(5)
    rolls[1].arrive(4)
    with pytest.raises(RankLost) as caught, watch.watching():
        failed.set()
    assert str(caught.value) == "rank 1 of the trainer is stuck"


def test_an_error_of_the_card_is_blamed_on_a_dead_rank_and_on_no_living_one(rolls):
    watch = CardWatch(rolls[0], failed=lambda: False, abort=lambda: None)
    for error in (ValueError("ours"), torch.OutOfMemoryError("no room"), RuntimeError("CUDA error")):
        with pytest.raises(type(error), match=str(error)), watch.watching():
            raise error
    rolls[1].close()
    with pytest.raises(RankLost) as caught, watch.watching():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    assert caught.value.ranks == [1]


LEFT_WAITING = """
import sys, threading
from torch._C._distributed_c10d import FileStore
from slipstream.trainer.parallel.roll import Roll
from slipstream.trainer.parallel.watch import CardWatch

rolls = [Roll(FileStore(sys.argv[1], 2), rank, 2, 1.0) for rank in range(2)]
watch = CardWatch(rolls[0], failed=lambda: False, abort=lambda: None, grace_s=0.5)
rolls[1].close()
with watch.watching():
    threading.Event().wait()
"""


def test_a_process_whose_card_is_never_given_up_ends_and_says_why(tmp_path: Path):
    command = [sys.executable, "-c", LEFT_WAITING, str(tmp_path / "store")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 1
    assert "rank 1 of the trainer does not answer" in ended.stdout + ended.stderr
