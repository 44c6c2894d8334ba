"""The log of rollouts: bounded, compressed, readable while it is written."""

from __future__ import annotations

import random
from pathlib import Path

from slipstream.common.compressed_lines import read_compressed
from slipstream.common.disk import with_older
from slipstream.launcher.rollout_files import read_rollouts
from slipstream.runner.rollout_log import FRAME_BYTES, RolloutLog


def completions(path: Path) -> list[str]:
    return [line["completion"] for line in read_compressed(path)]


def noise(number: int) -> str:
    """Text that compression cannot make much of."""
    return random.Random(number).randbytes(4000).hex()


def test_the_newest_rollouts_are_kept_up_to_the_bound_and_evaluations_apart(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, "runner-1", limit_bytes=40_000)
    for number in range(20):
        log.write([{"completion": f"göd {number}", "noise": noise(number)}, {"completion": f"tac {number}"}])
        log.write([{"completion": f"asked {number}", "purpose": "evaluation"}])
        assert log.flush()
    log.close()
    path = tmp_path / "runner-1.jsonl.zst"
    assert completions(path)[-2:] == ["göd 19", "tac 19"]
    assert sum(file.stat().st_size for file in with_older(path)) <= 40_000
    assert len(with_older(path)) == 2
    assert completions(tmp_path / "runner-1.evaluation.jsonl.zst") == [f"asked {number}" for number in range(20)]
    read = [line["completion"] for line in read_rollouts(tmp_path) if line.get("purpose") != "evaluation"]
    kept = [int(text.split()[1]) for text in read if text.startswith("tac")]
    assert kept == list(range(kept[0], 20))
    assert len(kept) > 5


def test_records_are_written_after_a_second_or_when_there_are_many(tmp_path: Path) -> None:
    now_s = 0.0
    log = RolloutLog(tmp_path, "r", limit_bytes=1 << 20, clock=lambda: now_s)
    (records,) = log._files[:1]
    path = tmp_path / "r.jsonl.zst"
    log.write([{"completion": "a"}])
    records.write_due()
    assert not path.exists()
    now_s = 1.0
    records.write_due()
    assert completions(path) == ["a"]
    now_s = 1.5
    log.write([{"completion": "b" * FRAME_BYTES}])
    assert [len(text) for text in completions(path)] == [1, FRAME_BYTES]
    log.close()


def test_rollouts_wait_for_room_on_a_full_disk_and_none_is_lost(small_disk) -> None:
    disk = small_disk(64 * 1024)
    log = RolloutLog(disk.path, "runner-1", limit_bytes=1 << 20)
    disk.fill()
    for number in range(1000):
        log.write([{"completion": str(number)}])
    assert not log.flush()
    assert log.full
    disk.free()
    assert log.flush()
    assert not log.full
    log.close()
    assert (completions(disk.path / "runner-1.jsonl.zst"), log.dropped_count) == ([str(n) for n in range(1000)], 0)
