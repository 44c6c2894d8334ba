"""The spool of rows and the log of rollouts: both bounded."""

from __future__ import annotations

import json
from pathlib import Path

from slipstream.runner.rollout_log import RolloutLog
from slipstream.runner.spool import Rows, Spool


def test_the_first_write_of_a_key_wins() -> None:
    spool = Spool(100)
    spool.put("t/a", Rows(b"first"))
    spool.put("t/a", Rows(b"second, and longer"))
    assert spool.get("t/a") == Rows(b"first")
    assert (spool.size_bytes, len(spool)) == (5, 1)


def test_a_full_spool_says_so_and_drops_nothing() -> None:
    spool = Spool(8)
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


def test_rollouts_are_logged_up_to_the_bound_and_counted_beyond(tmp_path: Path) -> None:
    path = tmp_path / "rollouts" / "runner-1.jsonl"
    log = RolloutLog(path, limit_bytes=60)
    log.write([{"completion": "göd"}, {"completion": "tac"}])
    log.write([{"completion": "does not fit any more"}] * 3)
    assert [json.loads(line)["completion"] for line in path.read_text().splitlines()] == ["göd", "tac"]
    assert (log.size_bytes, log.unwritten_count) == (path.stat().st_size, 3)
    log.close()

    again = RolloutLog(path, limit_bytes=60)  # a restarted runner goes on where the bound is
    assert again.size_bytes == path.stat().st_size
    again.close()


def test_a_full_disk_costs_the_log_and_not_the_rollouts(tmp_path: Path) -> None:
    log = RolloutLog(Path("/dev/full"), limit_bytes=1000)
    log.write([{"completion": "tac"}])
    assert (log.size_bytes, log.unwritten_count) == (0, 1)
    log.close()
