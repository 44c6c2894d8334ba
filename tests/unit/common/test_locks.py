"""Files that one process at a time holds."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading

import pytest

from slipstream.common.locks import FileLock, holder_of

HOLDER = """
import sys, time
from pathlib import Path
from slipstream.common.locks import FileLock
lock = FileLock(Path(sys.argv[1]), "the other")
print("held", flush=True)
time.sleep(60)
"""


def test_one_holds_a_file_and_the_next_one_does_once_it_is_released(tmp_path):
    file = tmp_path / "lock"
    assert holder_of(file) is None
    first = FileLock(file, "the first of all")
    assert holder_of(file) == "the first of all"
    with pytest.raises(BlockingIOError):
        FileLock(file, "the second")
    assert holder_of(file) == "the first of all"
    first.release()
    assert holder_of(file) is None
    second = FileLock(file, "the second")
    assert holder_of(file) == "the second"
    second.release()


def test_a_file_that_its_holder_says_nothing_of_keeps_what_was_said(tmp_path):
    file = tmp_path / "lock"
    FileLock(file, "the first").release()
    lock = FileLock(file)
    assert holder_of(file) == "the first"
    lock.say("")
    assert holder_of(file) == ""
    lock.release()


def test_the_death_of_its_holder_frees_a_file(tmp_path):
    file = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(file)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert holder_of(file) == "the other"
        other.kill()
    assert holder_of(file) is None
    FileLock(file).release()


def test_who_only_asks_holds_nobody_up(tmp_path):
    file = tmp_path / "lock"
    FileLock(file, "one").release()
    with file.open() as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        assert holder_of(file) is None
        with pytest.raises(BlockingIOError):
            FileLock(file, "two", patience_s=0.05)
        later = threading.Timer(0.05, lambda: fcntl.flock(asking, fcntl.LOCK_UN))
        later.start()
        FileLock(file, "two", patience_s=60).release()
        later.join()
    assert file.read_text() == "two"
