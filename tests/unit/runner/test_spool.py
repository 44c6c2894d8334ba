"""The spool of rows and the log of rollouts: both bounded."""

from __future__ import annotations

import json
from pathlib import Path

from slipstream.common.disk import with_older
from slipstream.runner.rollout_log import RolloutLog
from slipstream.runner.spool import ENTRY_BYTES, Rows, Spool


def test_the_first_write_of_a_key_wins() -> None:
    spool = Spool(1000)
    spool.put("t/a", Rows(b"first"))
    spool.put("t/a", Rows(b"second, and longer"))
    assert spool.get("t/a") == Rows(b"first")
    assert (spool.size_bytes, len(spool)) == (ENTRY_BYTES + 5, 1)


def test_a_full_spool_says_so_and_drops_nothing() -> None:
    spool = Spool(2 * ENTRY_BYTES + 8)
    spool.put("a", Rows(b"1234"))
    assert not spool.full
    spool.put("b", Rows(b"56789"))
    assert spool.full
    assert spool.get("a") == Rows(b"1234")
    assert spool.release("a")
    assert not spool.full


def test_a_key_is_released_once() -> None:
    spool = Spool(8)
    spool.put("a", Rows(b"1234"))
    assert [spool.release("a"), spool.release("a"), spool.release("never")] == [True, False, False]
    assert (spool.get("a"), spool.size_bytes) == (None, 0)


def completions(path: Path) -> list[str]:
    return [json.loads(line)["completion"] for line in path.read_text().splitlines()]


def test_the_newest_rollouts_are_kept_up_to_the_bound_and_evaluations_all(tmp_path: Path) -> None:
    path = tmp_path / "rollouts" / "runner-1.jsonl"
    log = RolloutLog(path, limit_bytes=200)
    for number in range(20):
        log.write([{"completion": f"göd {number}"}, {"completion": f"tac {number}"}])
        log.write([{"completion": f"asked {number}", "purpose": "evaluation"}])
    log.close()
    assert completions(path)[-2:] == ["göd 19", "tac 19"]
    assert sum(file.stat().st_size for file in with_older(path)) <= 200
    assert len(with_older(path)) == 2
    assert completions(path.with_name("runner-1.evaluation.jsonl")) == [f"asked {number}" for number in range(20)]


def test_rollouts_wait_for_room_on_a_full_disk_and_none_is_lost(small_disk) -> None:
    disk = small_disk(64 * 1024)
    path = disk.path / "rollouts" / "runner-1.jsonl"
    log = RolloutLog(path, limit_bytes=1 << 20)
    log.write([{"completion": "0"}])
    disk.fill()
    for number in range(1, 1000):
        log.write([{"completion": str(number)}])
    assert log.full
    assert not log.flush()
    disk.free()
    assert log.flush()
    assert not log.full
    log.close()
    assert (completions(path), log.dropped_count) == ([str(number) for number in range(1000)], 0)
