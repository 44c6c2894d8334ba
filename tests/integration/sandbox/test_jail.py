"""What a program in the jail can do, cannot do, and how it ends; each with and without cgroups."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from slipstream.common.sandbox_client import SandboxLimits

MIB = 2**20
TIGHT = SandboxLimits(wall_s=60.0, cpu_s=60.0, memory_bytes=96 * MIB, process_count=12, output_bytes=100_000)
BUSY_S = 30.0
"""What a busy machine may take where a limit ends a program, or all of it; far from what it would take without."""
DYNLOAD = "import sys; sys.path.append(f'{sys.prefix}/lib/python3.{sys.version_info.minor}/lib-dynload'); "
SOCKETS = DYNLOAD + "import socket"


@pytest.fixture(autouse=True)
async def nothing_is_left(running):
    """After every test: no process that a place started, and no task in its cgroup but the place itself."""
    before = children(os.getpid())  # the warden, and servers of other tests
    yield
    await running.idle()
    deadline_s = time.monotonic() + BUSY_S
    while left := children(os.getpid()) - before or strangers():
        assert time.monotonic() < deadline_s, left
        await asyncio.sleep(0.02)


def strangers() -> set[str]:
    """What the cgroups of the places hold beside one task each, the place's own."""
    folders = Path("/sys/fs/cgroup/pids").glob(f"slipstream-sandbox-{os.getpid()}/*/tasks")
    return {task for tasks in folders for task in tasks.read_text().split()[1:]}


def children(pid: int) -> set[str]:
    """Ids of a process's children, whichever thread started them."""
    found: set[str] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread ends when it likes
            found.update((task / "children").read_text().split())
    return found


async def test_a_program_reads_input_and_writes_both_outputs(running):
    source = "import sys; print(sys.stdin.read().upper()); print('oh', file=sys.stderr); sys.exit(3)"
    result = await running.client.run_python(source, stdin=b"hello" * 100_000)
    assert (result.outcome, result.exit_code, result.stderr) == ("exited", 3, b"oh\n")
    assert result.stdout == b"HELLO" * 100_000 + b"\n"
    assert not result.truncated
    assert 0 < result.cpu_s < 5
    assert 0 < result.wall_s < 10


async def test_a_program_makes_no_user_namespace_of_its_own(running):
    source = "import ctypes, os; print(ctypes.CDLL(None, use_errno=True).unshare(0x10000000), os.getuid())"
    result = await running.client.run_python(DYNLOAD + source)
    assert (result.stdout, result.stderr) == (b"-1 1000\n", b"")


async def test_a_program_too_long_for_an_argument_runs(running):
    source = "x = 0\n" + "x += 1\n" * 30_000 + "print(x)\n"
    assert (await running.client.run_python(source)).stdout == b"30000\n"


async def test_a_missing_program_ends_as_in_a_shell(running):
    result = await running.client.run(["no-such-program"])
    assert (result.outcome, result.exit_code) == ("exited", 127)


async def test_more_arguments_than_the_kernel_passes_on_do_not_start(running):
    result = await running.client.run(["echo", *["x" * 130_000] * 30])
    assert result.outcome == "not_started"
    assert "too long" in result.message
    assert (await running.client.run(["/bin/sh", "-c", "exit 7"])).exit_code == 7


async def test_too_little_memory_to_start_in_ends_as_an_outcome(running):
    result = await running.client.run(["true"], limits=SandboxLimits(memory_bytes=1))
    assert not result.ok
    assert (await running.client.run(["/bin/sh", "-c", "exit 7"])).exit_code == 7


async def test_a_crash_is_told_from_an_exit(running):
    result = await running.client.run_python("import os; os.abort()")
    assert result.outcome == "signaled"


async def test_a_program_sees_a_cleared_environment_and_no_one_else(running):
    source = (
        "import os\n"
        "print(sorted(os.environ), os.getpid(), os.getuid(), os.listdir('/tmp'), os.path.exists('/proc/1'))\n"
        "open_files = []\n"
        "for number in range(256):\n"
        "    try: os.fstat(number); open_files.append(number)\n"
        "    except OSError: pass\n"
        "print(open_files)"
    )
    result = await running.client.run_python(source)
    environment = ["HOME", "LANG", "PATH", "PWD"]
    assert result.stdout.decode().splitlines() == [f"{environment} 1 1000 [] False", "[0, 1, 2]"]


async def test_variables_are_set_for_the_program_alone(running):
    """LD_PRELOAD must not reach bubblewrap, which runs outside of the jail."""
    env = {"ANSWER": "42", "LD_PRELOAD": "/tmp/no.so"}
    result = await running.client.run(["/bin/sh", "-c", "echo $ANSWER"], env=env)
    assert (result.ok, result.stdout) == (True, b"42\n")


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/etc/hostname", str(Path(__file__)), "/proc/version", "/sys/kernel", "/dev/mem", "/home"]
)
async def test_the_hosts_files_are_not_there(running, path):
    result = await running.client.run_python(f"import os; print(os.path.exists({path!r}))")
    assert result.stdout == b"False\n"


@pytest.mark.parametrize("place", ["/", "/usr/lib", "/dev", "/files", "{prefix}", "{prefix}/lib"])
async def test_only_tmp_can_be_written(running, place):
    source = f"import sys; open({place!r}.format(prefix=sys.prefix) + '/x', 'w')"
    result = await running.client.run_python(source)
    assert result.exit_code == 1
    assert b"Read-only file system" in result.stderr or b"Permission denied" in result.stderr


async def test_tmp_is_private_bounded_and_gone_afterwards(running):
    source = "import os; print(os.listdir('/tmp'))\nfor i in range(999): open(f'/tmp/{i}', 'wb').write(bytes(1 << 18))"
    for _ in range(2):
        result = await running.client.run_python(source)
        assert result.stdout == b"[]\n"
        assert b"No space left" in result.stderr


async def test_there_is_no_network(running):
    result = await running.client.run_python(f"{SOCKETS}; socket.create_connection(('192.0.2.1', 80), 2)")
    assert b"Network is unreachable" in result.stderr
    own = running.address.rpartition(":")[2]
    result = await running.client.run_python(f"{SOCKETS}; socket.create_connection(('127.0.0.1', {own}), 2)")
    assert b"refused" in result.stderr


async def test_an_infinite_loop_ends_by_wall_time(running):
    result = await running.client.run_python("while True: pass", limits=SandboxLimits(wall_s=0.3))
    assert result.outcome == "wall_limit"
    assert 0.3 <= result.wall_s < BUSY_S


async def test_sleepers_behind_a_new_session_end_with_the_program(running):
    source = "import os, time\nif os.fork() == 0:\n    os.setsid(); os.fork(); time.sleep(600)\nprint('done')"
    result = await running.client.run_python(source)
    assert (result.outcome, result.stdout) == ("exited", b"done\n")


@pytest.mark.parametrize("forks", [0, 2])
async def test_processor_time_of_all_processes_counts(running, forks):
    source = f"import os\nfor _ in range({forks}): os.fork()\nwhile True: pass"
    result = await running.client.run_python(source, limits=SandboxLimits(wall_s=60, cpu_s=0.4))
    assert result.outcome == "cpu_limit"
    assert result.cpu_s >= 0.4


async def test_a_fork_bomb_ends(running):
    source = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    result = await running.client.run_python(source, limits=TIGHT)
    assert result.outcome == "process_limit"
    assert result.wall_s < BUSY_S


async def test_a_memory_bomb_of_one_process_ends(running):
    source = "a = []\nwhile True: a.append(bytearray(b'x') * (1 << 20))"
    result = await running.client.run_python(source, limits=TIGHT)
    assert result.outcome == "memory_limit"
    assert result.wall_s < BUSY_S


async def test_a_memory_bomb_of_many_small_processes_ends(running):
    """No process alone comes near the limit."""
    source = "import os, time\nfor _ in range(3): os.fork()\na = bytearray(b'x') * (24 << 20)\ntime.sleep(60)"
    result = await running.client.run_python(source, limits=TIGHT)
    assert result.outcome == "memory_limit"
    assert result.wall_s < BUSY_S


async def test_endless_output_is_cut_and_ends(running):
    result = await running.client.run_python("while True: print('y' * 999)", limits=TIGHT)
    assert (result.outcome, result.truncated, len(result.stdout)) == ("output_limit", True, 100_000)


async def test_a_program_that_closes_its_outputs_still_ends(running):
    source = "import os\nfor n in (0, 1, 2): os.close(n)\nwhile True: pass"
    result = await running.client.run_python(source, limits=SandboxLimits(wall_s=0.3))
    assert result.outcome == "wall_limit"
