"""Blocks as files: what comes back is what was written, under the same name and layout, or it is a miss."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.common.version import UNSET, PolicyVersion
from slipstream.engine.vllm.offload.files import BlockFiles
from slipstream.engine.vllm.offload.layout import Layout
from slipstream.engine.vllm.offload.options import remove_orphan_regions

LAYOUT = Layout("model", "vllm 0.30.0", "bfloat16", 32, 1024, 1, 1, 1, "LBHNC", ("layer.0", "layer.1"), 128, "sha256")
SALT = "run/1/7/bfloat16"
MIB = 2**20


def key(number: int) -> bytes:
    return number.to_bytes(32, "big") + b"\0\0\0\0"


def parts(seed: int, size: int = 1024) -> list[memoryview]:
    return [memoryview(bytes([seed % 251]) * size), memoryview(bytes([seed % 7]) * 128)]


def room(size: int = 1024) -> list[memoryview]:
    return [memoryview(bytearray(size)), memoryview(bytearray(128))]


@pytest.fixture
def files(tmp_path: Path) -> Iterator[BlockFiles]:
    files = BlockFiles(tmp_path, MIB, LAYOUT.digest)
    yield files
    files.close()


def blocks(directory: Path) -> list[Path]:
    return [path for path in (directory / "runs").rglob("*") if path.is_file() and len(path.name) == 72]


def test_a_block_comes_back_as_it_was_written_to_another_worker(files: BlockFiles, tmp_path: Path):
    assert files.write(SALT, key(1), parts(1))
    other, target = BlockFiles(tmp_path, MIB, LAYOUT.digest), room()
    assert other.has(SALT, key(1))
    assert other.read(SALT, key(1), target)
    assert target == parts(1)
    assert not other.has(SALT, key(2))
    assert not other.read(SALT, key(2), target)
    assert other.rejected_files == 0
    other.close()


@pytest.mark.parametrize("salt", ["run/1/8/bfloat16", "run/2/7/bfloat16", "run/1/7/fp8", "other/1/7/bfloat16", ""])
def test_another_salt_is_a_miss(files: BlockFiles, salt: str):
    assert files.write(SALT, key(1), parts(1))
    assert not files.has(salt, key(1))
    assert not files.read(salt, key(1), room())


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float32"},
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
        {"model": "another"},
        {"engine": "vllm 0.31.0"},
        {"kv_cache_layout": "BLHNC"},
        {"block_size_tokens": 64},
        {"route_bytes": 0},
        {"hash_algorithm": "xxhash"},
        {"layers": ("layer.1", "layer.0")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_layout_is_a_miss_even_where_its_file_stands_under_our_name(
    files: BlockFiles, tmp_path: Path, change: dict[str, object]
):
    foreign = BlockFiles(tmp_path, MIB, replace(LAYOUT, **change).digest)  # type: ignore[arg-type]
    assert foreign.write(SALT, key(1), parts(1))
    assert not files.has(SALT, key(1))
    (path,) = blocks(tmp_path)
    ours = files._path(SALT, key(1))
    ours.parent.mkdir(parents=True)
    os.replace(path, ours)
    assert not files.read(SALT, key(1), room())
    assert files.rejected_files == 1
    assert not files.has(SALT, key(1))
    foreign.close()


def _flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-1]), id="cut short"),
        pytest.param(lambda path: path.write_bytes(path.read_bytes() + b"\0"), id="longer"),
        pytest.param(lambda path: path.write_bytes(b""), id="empty"),
        pytest.param(lambda path: _flip(path, -1), id="a bit of the routes"),
        pytest.param(lambda path: _flip(path, 500), id="a bit of the KV"),
        pytest.param(lambda path: _flip(path, 3), id="a bit of the header"),
        pytest.param(lambda path: path.write_bytes(os.urandom(path.stat().st_size)), id="noise"),
    ],
)
def test_a_damaged_file_is_a_miss_counted_and_removed(files: BlockFiles, tmp_path: Path, damage):
    assert files.write(SALT, key(1), parts(1))
    (path,) = blocks(tmp_path)
    damage(path)
    assert not files.read(SALT, key(1), room())
    assert files.rejected_files == 1
    assert not path.exists()
    assert files.write(SALT, key(1), parts(1))  # and can be written again
    assert files.read(SALT, key(1), room())


def test_a_file_of_another_block_or_salt_under_our_name_is_a_miss(files: BlockFiles, tmp_path: Path):
    assert files.write(SALT, key(1), parts(1))
    for salt, number in ((SALT, 2), ("run/1/8/bfloat16", 1)):
        target = files._path(salt, key(number))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(files._path(SALT, key(1)).read_bytes())
        assert not files.read(salt, key(number), room())
    assert files.rejected_files == 2
    assert files.read(SALT, key(1), room())


def test_the_bound_holds_over_all_users_and_the_least_recently_used_go(tmp_path: Path):
    limit = 20 * 1300
    users = [BlockFiles(tmp_path, limit, LAYOUT.digest) for _ in range(2)]
    for number in range(15):
        assert users[number % 2].write(SALT, key(number), parts(number))
        os.utime(users[0]._path(SALT, key(number)), (number, number))
    assert users[1].read(SALT, key(0), room())  # used just now
    for number in range(15, 60):
        assert users[number % 2].write(SALT, key(number), parts(number))
        held = sum(path.stat().st_size for path in blocks(tmp_path))
        assert held == users[0].used_bytes <= limit
        if number == 25:
            assert users[0].has(SALT, key(0))
            assert not users[0].has(SALT, key(1))
    assert users[0].has(SALT, key(59))
    for user in users:
        user.close()


def test_a_block_beyond_the_whole_bound_is_not_kept(tmp_path: Path):
    files = BlockFiles(tmp_path, 1000, LAYOUT.digest)
    assert not files.write(SALT, key(1), parts(1))
    assert (files.failed_writes, files.used_bytes) == (1, 0)
    files.close()


def test_a_full_disk_keeps_no_half_of_a_block(files: BlockFiles, tmp_path: Path):
    """The file size limit of the process stands in for the disk: a write ends short in the same way, with OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, hard))
    try:
        assert not files.write(SALT, key(1), parts(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert (files.failed_writes, files.used_bytes) == (1, 0)
    assert [path for path in (tmp_path / "runs").rglob("*") if path.is_file()] == []
    assert not files.write(SALT, key(1), parts(1))  # not tried again at once
    files._full_until_s = 0.0
    assert files.write(SALT, key(1), parts(1))


def test_the_end_of_a_salt_removes_its_blocks_and_no_others(files: BlockFiles, tmp_path: Path):
    for salt in (SALT, "run/1/8/bfloat16"):
        for number in range(3):
            assert files.write(salt, key(number), parts(number))
    freed = files.end(SALT)
    assert freed == files.used_bytes > 0
    assert not files.has(SALT, key(0))
    assert files.has("run/1/8/bfloat16", key(0))
    assert files.end(SALT) == 0


def test_the_oldest_weights_of_a_salt_are_those_of_any_worker(files: BlockFiles, tmp_path: Path):
    other = BlockFiles(tmp_path, MIB, b"")
    assert other.oldest(SALT) == UNSET
    files.use(SALT, PolicyVersion(1, 10))
    other.use(SALT, PolicyVersion(1, 9))
    files.use(SALT, PolicyVersion(2, 9))
    assert files.oldest(SALT) == other.oldest(SALT) == PolicyVersion(1, 9)
    files.end(SALT)
    assert files.oldest(SALT) == UNSET
    other.close()


_LIVE = """
import sys, time
from pathlib import Path
from slipstream.engine.vllm.offload.files import BlockFiles
with BlockFiles(Path(sys.argv[1]), 1 << 20, b"").living(sys.argv[2]):
    print("living", flush=True)
    time.sleep(60)
"""


def test_runs_that_nobody_serves_are_removed_at_the_next_start(tmp_path: Path):
    def serve(run: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", _LIVE, str(tmp_path), run], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "living\n"
        return process

    def end(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.communicate()

    killed, alive = serve("gone"), serve("alive")
    files = BlockFiles(tmp_path, MIB, LAYOUT.digest)
    salts = [f"{run}/1/0/bfloat16" for run in ("gone", "alive", "ours", "never-said")]
    for salt in salts:
        assert files.write(salt, key(1), parts(1))
    end(killed)
    with files.living("ours"):
        assert [files.has(salt, key(1)) for salt in salts] == [False, True, True, False]
        assert files.used_bytes == sum(path.stat().st_size for path in blocks(tmp_path))
    end(alive)
    with files.living("another"):
        assert not any(files.has(salt, key(1)) for salt in salts)
    files.close()


def test_what_a_killed_writer_left_is_removed_and_what_is_being_written_is_not(files: BlockFiles, tmp_path: Path):
    assert files.write(SALT, key(1), parts(1))
    place = files._path(SALT, key(1)).parent
    left, being = place / "left.partial", place / "being.partial"
    left.write_bytes(b"x" * 100)
    with being.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with files.living("run"):
            assert (left.exists(), being.exists()) == (False, True)
    assert files.used_bytes == files._path(SALT, key(1)).stat().st_size


def test_no_salt_leads_out_of_the_directory(files: BlockFiles, tmp_path: Path):
    for salt in ("../../evil", "..", ".", "/etc", "a" * 200 + "/x", "\0"):
        assert files.write(salt, key(1), parts(1))
        assert files._path(salt, key(1)).resolve().is_relative_to(tmp_path / "runs")


def test_memory_of_killed_engines_is_given_back(tmp_path: Path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    names = [f"vllm_offload_slipstream-{pid}-abc.mmap" for pid in (dead.pid, os.getpid())]
    for name in (*names, "vllm_offload_somebody.mmap"):
        (tmp_path / name).write_bytes(b"x")
    assert remove_orphan_regions(tmp_path) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([names[1], "vllm_offload_somebody.mmap"])
