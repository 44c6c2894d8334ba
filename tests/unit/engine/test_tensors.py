"""Work on tensors, spread over threads."""

from __future__ import annotations

import threading

import pytest

from slipstream.engine.tensors import spread

NAMES = [f"t{index}" for index in range(11)]


@pytest.mark.parametrize("threads", [1, 3, 20])
def test_each_tensor_is_worked_on_once_and_the_order_stays(threads):
    seen: list[str] = []
    lock = threading.Lock()

    def work(name: str) -> int:
        with lock:
            seen.append(name)
        return int(name[1:])

    assert list(spread(work, NAMES, threads).items()) == [(name, index) for index, name in enumerate(NAMES)]
    assert sorted(seen) == sorted(NAMES)


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_of_any_thread_is_the_callers(threads):
    def work(name: str) -> None:
        if name == "t7":
            raise ValueError(name)

    with pytest.raises(ValueError, match="t7"):
        spread(work, NAMES, threads)


def test_nothing_is_no_work():
    assert spread(lambda name: name, [], 3) == {}
