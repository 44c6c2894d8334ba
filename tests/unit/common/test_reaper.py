"""What a program started ends with it, whichever way it ends, and the reaper ends as the program did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from slipstream.common.reaper import END_NOW, guarded

LEAVES = """
import os, subprocess, sys, time
script = f"sleep 3600 & echo $! > {sys.argv[1]}.part && mv {sys.argv[1]}.part {sys.argv[1]}"
subprocess.run(["/bin/sh", "-c", script], start_new_session=True, check=True)
"""
DEADLINE_S = 30.0


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Path]:
    """The number of the process that the program left; whatever came of it, it is gone after the test."""
    file = tmp_path / "left"
    yield file
    if file.exists() and lives(pid := int(file.read_text())):
        os.kill(pid, signal.SIGKILL)


def run(program: str, left: Path) -> subprocess.Popen[bytes]:
    command = guarded([sys.executable, "-c", program, str(left)])
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("os._exit(7)", 7),
        ("os.kill(os.getpid(), 9)", -9),
        ("os.kill(os.getpid(), 15)", -15),
        ("os.killpg(0, 9)", -9),
        ("import signal; signal.signal(2, signal.SIG_DFL); os.killpg(0, 2); time.sleep(3600)", -2),
        ("os.kill(os.getppid(), 2); os._exit(7)", 7),
        ("os.kill(os.getppid(), 9); time.sleep(3600)", -9),
        ("os.kill(os.getppid(), 19); os._exit(7)", 7),
    ],
)
def test_what_a_program_left_ends_with_it_and_its_own_end_is_told(left: Path, end: str, code: int) -> None:
    process = run(LEAVES + end, left)
    assert process.wait(DEADLINE_S) == code
    assert not lives(int(left.read_text()))


def test_a_program_that_is_ended_at_once_takes_what_it_left_with_it(left: Path) -> None:
    process = run(LEAVES + "time.sleep(3600)", left)
    until(left.exists)
    process.send_signal(END_NOW)
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    assert not lives(int(left.read_text()))


STOPS_BOTH = """
with open(f"/proc/{os.getppid()}/stat") as file:
    keeper = int(file.read().rpartition(")")[2].split()[1])
os.kill(keeper, 19)
os.kill(os.getppid(), 19)
time.sleep(3600)
"""


def test_a_program_that_stops_both_of_those_that_guard_it_is_ended_all_the_same(left: Path) -> None:
    process = run(LEAVES + STOPS_BOTH, left)
    until(left.exists)
    reaper = psutil.Process(process.pid).children()[0]
    until(lambda: reaper.status() == psutil.STATUS_STOPPED)
    process.send_signal(END_NOW)
    process.send_signal(signal.SIGCONT)
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    assert not lives(int(left.read_text()))


def test_all_of_it_ends_when_the_keeper_alone_is_killed(left: Path) -> None:
    process = run(LEAVES + "time.sleep(3600)", left)
    until(left.exists)
    pids = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    process.kill()
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    until(lambda: not any(map(lives, [*pids, int(left.read_text())])))


def test_a_program_may_end_in_its_own_way_when_asked_to(left: Path) -> None:
    heeds = "import signal\nsignal.signal(15, lambda *_: sys.exit(5))\n"
    process = run(heeds + LEAVES + "time.sleep(3600)", left)
    until(left.exists)
    process.terminate()
    assert process.wait(DEADLINE_S) == 5
    assert not lives(int(left.read_text()))


def test_what_a_program_left_while_it_runs_does_not_end(left: Path) -> None:
    process = run(LEAVES + "sys.stdin.close(); time.sleep(3600)", left)
    until(left.exists)
    pid = int(left.read_text())
    (reaper,) = psutil.Process(process.pid).children()
    until(lambda: psutil.Process(pid).ppid() == reaper.pid)  # adopted
    assert lives(pid)
    process.send_signal(END_NOW)
    process.wait(DEADLINE_S)


def test_all_of_it_ends_with_a_parent_that_is_killed(left: Path, tmp_path: Path) -> None:
    """The parent is killed with its process group, as the launcher does it to a service."""
    parent = (
        "import subprocess, sys; from slipstream.common.reaper import guarded\n"
        f"p = subprocess.Popen(guarded([sys.executable, '-c', {LEAVES + 'time.sleep(3600)'!r}, {str(left)!r}]),"
        " start_new_session=True)\nprint(p.pid, flush=True)\np.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        keeper = int(process.stdout.readline())
        until(left.exists)
        (reaper,) = psutil.Process(keeper).children()
        children = reaper.children
        until(lambda: int(left.read_text()) in {child.pid for child in children()})  # adopted
        pids = [keeper, reaper.pid, *(child.pid for child in children())]
        assert len(pids) == 4  # the program, and what it left
        os.killpg(process.pid, signal.SIGKILL)
    until(lambda: not any(map(lives, pids)))


REFUSED_ONCE = """
import os, signal
from slipstream.common import reaper
kill, refused = os.kill, []

def refuse(pid, number):
    if number == signal.SIGKILL and not refused:
        refused.append(pid)
        raise PermissionError(1, "Operation not permitted")
    kill(pid, number)

os.kill = refuse
reaper.main()
"""


def test_a_process_that_may_not_be_killed_hides_neither_the_others_nor_how_the_program_ended(left: Path) -> None:
    program = [sys.executable, "-c", LEAVES + "os._exit(7)", str(left)]
    reaper = [sys.executable, "-c", REFUSED_ONCE, str(os.getpid()), *program]
    done = subprocess.run(reaper, capture_output=True, text=True, timeout=DEADLINE_S, start_new_session=True)
    assert (done.returncode, done.stderr) == (7, "")
    assert not lives(int(left.read_text())), "it was tried again"


def test_a_command_that_is_none_says_so(left: Path) -> None:
    process = subprocess.run(guarded(["/no/such/program"]), capture_output=True, text=True, timeout=DEADLINE_S)
    assert (process.returncode, process.stderr) == (127, "/no/such/program: No such file or directory\n")
