"""Memory beside a model, filled over shared memory by a thread of its own."""

from __future__ import annotations

import os
import time

import pytest
import torch

from slipstream.common.config import ConfigError
from slipstream.common.version import PolicyVersion
from slipstream.engine.vllm.layout import Layout
from slipstream.engine.vllm.staging import Stage, check_room, error_of, free_bytes
from slipstream.weights.config import WeightsConfig
from slipstream.weights.manifest import Manifest, Source
from slipstream.weights.straight.lender import Lender
from slipstream.weights.straight.packing import TensorBox
from slipstream.weights.straight.receiver import Receiver

CPU = torch.device("cpu")
V = PolicyVersion(1, 1)
NAME = "model.norm.weight"
DEADLINE_S = 30.0


class Bench:
    """One tensor that is lent, in float32."""

    def __init__(self) -> None:
        self.lender = Lender(WeightsConfig(transport="shm"), CPU, "host:1")
        kept = self.lender.keep(V, [TensorBox(NAME, (4,), (0,), torch.arange(4.0))])
        self.manifest = Manifest(V, kept.slices, sources=(Source(1, kept.source),))
        copy = self.lender.copies.lend(V, "test")
        self.loan = self.lender.link.offer(copy.memory, copy.size_bytes, "reader").SerializeToString()

    def fill(self, stage: Stage, loan: bytes | None = None) -> bool:
        return stage.fill_from(Receiver(CPU), self.manifest, [loan or self.loan], "reader", DEADLINE_S)


def outcome(stage: Stage) -> tuple[str, str, float, float]:
    deadline_s = time.monotonic() + DEADLINE_S
    while (found := stage.outcome()) is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return found


def test_a_version_is_filled_in_and_the_next_one_after_it():
    bench, stage = Bench(), Stage(Layout.of({NAME: (4,)}, "float32"), CPU)
    for _ in range(2):
        assert bench.fill(stage)
        assert outcome(stage)[:2] == ("", "")
        assert stage.tensors()[NAME].tolist() == [0.0, 1.0, 2.0, 3.0]
    bench.lender.close()


def test_bytes_of_another_dtype_are_refused_before_they_are_read():
    bench, stage = Bench(), Stage(Layout.of({NAME: (4,)}, "bfloat16"), CPU)
    assert bench.fill(stage)
    reason, message, _, _ = outcome(stage)
    assert (reason, message) == ("UNSUPPORTED", "1.1 comes in float32, and here is bfloat16")
    assert error_of(reason, message).reason == "UNSUPPORTED"  # pyright: ignore
    assert not stage.memory.any()
    bench.lender.close()


def test_nothing_is_read_into_memory_that_is_still_written():
    bench, stage = Bench(), Stage(Layout.of({NAME: (4,)}, "float32"), CPU)
    reads, writes = os.pipe()
    slow = bench.lender.link.offer(bench.lender.copies.lend(V, "slow").memory, 16, "reader")

    class Blocked(Receiver):
        def receive(self, *arguments):
            os.read(reads, 1)
            return super().receive(*arguments)

    assert stage.fill_from(Blocked(CPU), bench.manifest, [slow.SerializeToString()], "reader", DEADLINE_S)
    assert not bench.fill(stage)
    assert stage.outcome() is None
    os.write(writes, b".")
    assert outcome(stage)[0] == ""
    assert bench.fill(stage)
    assert outcome(stage)[0] == ""
    os.close(reads)
    os.close(writes)
    bench.lender.close()


def test_places_that_would_not_fit_are_refused_at_the_start_with_what_to_do():
    check_room(1000, 2 * 1000, "cuda_ipc")
    with pytest.raises(
        ConfigError, match=r"'cuda_ipc'.* 2 places of 7 GB .* and 13\.9 GB are free .* lower engine\.gpu"
    ):
        check_room(7_000_000_000, 13_900_000_000, "cuda_ipc")
    check_room(1000, free_bytes(CPU), "shm")
    with pytest.raises(ConfigError, match="2 places"):
        check_room(free_bytes(CPU), free_bytes(CPU), "shm")
