"""Starts of a runner are in order, also over a clock that is set back."""

from __future__ import annotations

import pytest

from slipstream.orchestrator.leases import RunnerLeases
from slipstream.runner.epoch import next_epoch


def test_a_clock_that_is_set_back_does_not_make_a_new_start_older(tmp_path):
    file = tmp_path / "run" / "runner-1.epoch"
    hour_ns = 3600 * 10**9
    epochs = [next_epoch(file, lambda ns=ns: ns) for ns in (5 * hour_ns, 2 * hour_ns, 2 * hour_ns + 1, 9 * hour_ns)]
    assert epochs == sorted(set(epochs))
    leases = RunnerLeases(10.0, lambda: 0.0)
    for epoch in epochs:
        runner = leases.renew("runner-1", epoch)
        assert runner.epoch == epoch


@pytest.mark.parametrize("content", ["", "garbage", "12x", "-5", "9" * 20, "9" * 5000, "\x80"])
def test_a_file_that_makes_no_sense_is_begun_again(tmp_path, content):
    file = tmp_path / "runner-1.epoch"
    file.write_bytes(content.encode("latin-1"))
    assert next_epoch(file, lambda: 7) == f"{7:020d}"
    assert next_epoch(file, lambda: 3) == f"{8:020d}"


def test_the_epoch_of_before_is_never_written_over(tmp_path):
    file = tmp_path / "runner-1.epoch"
    next_epoch(file, lambda: 7)
    (tmp_path / "runner-1.epoch.new").write_text("1")  # of a process that was killed as it wrote
    with file.open() as before:
        next_epoch(file, lambda: 9)
        assert before.read() == "7\n"
    assert file.read_text() == "9\n"
    assert [each.name for each in tmp_path.iterdir()] == ["runner-1.epoch"]
