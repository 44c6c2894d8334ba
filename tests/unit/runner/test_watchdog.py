"""What counts as holding an event loop, and what the runner takes of the news of it."""

from __future__ import annotations

import json
import os
import threading

import pytest

from slipstream.runner.envclient import closing_fd, read_report
from slipstream.runner.watchdog import TICK_S, Held, waited_s


def test_a_loop_is_held_since_its_last_beat():
    held = Held()
    for beats in (1, 2, 2, 2):
        held.look(beats, TICK_S, 0.0)
    assert held.blocked_s == pytest.approx(2 * TICK_S)
    held.look(3, TICK_S, 0.0)
    assert held.blocked_s == 0


def test_neither_a_machine_that_stands_still_nor_a_busy_one_counts():
    held = Held()
    held.look(1, TICK_S, 5.0)
    held.look(1, 30.0, 5.0)
    assert held.blocked_s == 0
    for tick in range(1, 101):  # nine parts of ten of the time, others had the processor
        held.look(1, TICK_S, 5.0 + 0.9 * TICK_S * tick)
    assert held.blocked_s == pytest.approx(10 * TICK_S)
    held.look(1, TICK_S, 500.0)  # told late, and of more than was counted
    assert held.blocked_s == 0


def test_how_long_a_thread_has_waited_for_a_processor_never_falls():
    thread = threading.get_native_id()
    assert 0 <= waited_s(thread) <= waited_s(thread)
    assert waited_s(2**30) == 0, "there is none"


@pytest.mark.parametrize(
    "data",
    [b"", b"no JSON", b"[" * 4000, b"[]", b"7", b"{}", b'{"request": Infinity, "blocked_s": 1, "where": ""}'],
)
def test_what_environment_code_writes_in_place_of_the_news_says_nothing(data: bytes):
    reading, writing = os.pipe()
    with closing_fd(reading):
        with closing_fd(writing):
            os.write(writing, data)
        assert read_report(reading) == {}


def test_news_of_a_loop_that_was_held_are_read_as_they_were_written():
    report = {"request": 3, "blocked_s": 2.1, "where": "judge.py:5, in score"}
    reading, writing = os.pipe()
    with closing_fd(reading), closing_fd(writing):  # what it forked holds the other end
        assert read_report(reading) == {}
        os.write(writing, json.dumps(report).encode())
        assert read_report(reading) == report
