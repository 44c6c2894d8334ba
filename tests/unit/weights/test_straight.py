"""Copies and their loans, sums on torch, and stretches that are read."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from slipstream.api.broadcast.v1 import broadcast_pb2
from slipstream.common import errors
from slipstream.common.config import ConfigError
from slipstream.common.version import PolicyVersion
from slipstream.weights.checksum import slice_checksum
from slipstream.weights.config import WeightsConfig
from slipstream.weights.manifest import Manifest, Source, WeightSlice
from slipstream.weights.straight.collective import CollectiveLender, CollectiveReader, meet
from slipstream.weights.straight.copies import MAX_LOANS, KeptCopies
from slipstream.weights.straight.lender import Lender
from slipstream.weights.straight.links import Run, runs_of, target_offsets
from slipstream.weights.straight.memory import DeviceMemory
from slipstream.weights.straight.packing import TensorBox, pack
from slipstream.weights.straight.receiver import Receiver

V = [PolicyVersion(1, step) for step in range(8)]
CPU = torch.device("cpu")
DEADLINE_S = 30.0


class Bench:
    def __init__(self, limit: int = 2, lease_s: float = 60.0) -> None:
        self.now_s = 100.0
        self.allocated: list[int] = []
        self.free_bytes = 1 << 20
        self.copies = KeptCopies(self.allocate, limit, lease_s, lambda: self.now_s)

    def allocate(self, size_bytes: int) -> DeviceMemory:
        if size_bytes > self.free_bytes:
            raise MemoryError
        self.allocated.append(size_bytes)
        return DeviceMemory(size_bytes, CPU)

    def keep(self, version: PolicyVersion, value: float = 0.0) -> tuple[WeightSlice, ...]:
        return pack(self.copies, version, [TensorBox("w", (4,), (0,), torch.full((4,), value))], "float32")


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 70)), min_size=1, max_size=6),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.integers(0, 2**32 - 1),
)
def test_sums_on_torch_are_those_of_the_manifest(shapes, dtype, seed):
    """Of whole tensors and of rows of larger ones, alike or not."""
    torch.manual_seed(seed)
    boxes = [
        TensorBox(f"t{at}", (rows + at % 2, width), (at % 2, 0), torch.randn(rows, width))
        for at, (rows, width) in enumerate(shapes)
    ]
    bench = Bench()
    for part, box in zip(pack(bench.copies, V[1], boxes, dtype), boxes, strict=True):
        values = box.values.to(getattr(torch, dtype))
        bits = values.view(torch.int32 if dtype == "float32" else torch.int16).numpy()
        unsigned = bits.view(np.uint32 if dtype == "float32" else np.uint16)
        assert part.checksum == slice_checksum(part.name, unsigned, part.global_shape, part.offsets)


def test_a_tensor_larger_than_a_chunk_has_the_sum_of_the_manifest():
    bench, values = Bench(), torch.randn(3, 50_000)
    (part,) = pack(bench.copies, V[1], [TensorBox("w", (3, 50_000), (0, 0), values)], "float32")
    assert part.checksum == slice_checksum("w", values.numpy(), (3, 50_000), (0, 0))


def test_the_kernel_of_a_card_gives_the_same_sums():
    """By triton's interpreter, which is chosen before triton is imported."""
    program = Path(__file__).with_name("fused_sums.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.strip().endswith("alike"), done.stderr[-2000:]


def test_no_more_versions_are_kept_than_allowed_and_their_memory_is_used_again():
    bench = Bench(limit=2)
    for version in V[1:6]:
        bench.keep(version)
    assert bench.copies.versions == [V[4], V[5]]
    assert bench.allocated == [16, 16]
    with pytest.raises(errors.WeightVersionUnknown) as raised:
        bench.copies.lend(V[3], "reader")
    assert raised.value.metadata["newest"] == "1.5"


def test_a_lent_copy_is_not_overwritten_until_it_is_given_back():
    bench = Bench(limit=1)
    bench.keep(V[1], 1.0)
    copy = bench.copies.lend(V[1], "reader")
    filled = threading.Thread(target=bench.keep, args=(V[2], 2.0))
    filled.start()
    deadline_s = time.monotonic() + DEADLINE_S
    while bench.copies.versions and time.monotonic() < deadline_s:  # nobody can borrow it once the writer waits
        time.sleep(0.005)
    assert bench.copies.versions == []
    assert copy.memory.data.view(torch.float32).tolist() == [1.0] * 4
    bench.copies.give_back("reader")
    filled.join(DEADLINE_S)
    assert not filled.is_alive()
    assert bench.copies.versions == [V[2]]


def test_a_larger_version_takes_the_place_of_a_smaller_one_or_none_if_there_is_no_memory():
    bench = Bench(limit=1)
    bench.keep(V[1])
    large = [TensorBox("w", (9,), (0,), torch.ones(9))]
    bench.free_bytes = 0
    with pytest.raises(MemoryError):
        pack(bench.copies, V[2], large, "float32")
    assert bench.copies.size_bytes == 0
    bench.free_bytes = 36
    pack(bench.copies, V[2], large, "float32")
    assert bench.copies.versions == [V[2]]
    assert bench.allocated == [16, 36]


def test_a_loan_that_is_over_is_void_once_its_copy_is_overwritten():
    bench = Bench(limit=1, lease_s=5.0)
    bench.keep(V[1])
    bench.copies.lend(V[1], "late", ttl_s=3.0)
    bench.now_s += 4.0
    bench.copies.give_back("late")  # nothing happened to it yet
    bench.copies.lend(V[1], "later", ttl_s=600.0)
    bench.now_s += 5.5
    bench.keep(V[2])
    with pytest.raises(errors.WeightVersionUnknown):
        bench.copies.give_back("later")


def test_more_loans_than_there_may_be_are_refused_until_one_is_over():
    bench = Bench(limit=1, lease_s=5.0)
    bench.keep(V[1])
    for number in range(MAX_LOANS):
        bench.copies.lend(V[1], f"reader-{number}", ttl_s=1.0 if number else 4.0)
    bench.copies.lend(V[1], "reader-0", ttl_s=4.0)  # a repeat is no further one
    with pytest.raises(errors.Overloaded) as refused:
        bench.copies.lend(V[1], "one too many")
    assert refused.value.metadata["limit"] == str(MAX_LOANS)
    bench.copies.give_back("reader-1")
    bench.copies.lend(V[1], "in its place")
    bench.now_s += 2.0  # who died gives nothing back
    for number in range(MAX_LOANS - 2):
        bench.copies.lend(V[1], f"later-{number}")
    with pytest.raises(errors.Overloaded):
        bench.copies.lend(V[1], "one too many")


def test_slices_that_lie_back_to_back_on_both_sides_are_one_stretch():
    parts = [WeightSlice(name, (2, 8), (0, 0), (2, 8), "float32", 64, 0, 0) for name in "abc"]
    assert runs_of(parts, target_offsets(parts, {"a": 0, "b": 64, "c": 128})) == [Run(0, 0, 192)]
    assert runs_of(parts, target_offsets(parts, {"a": 0, "b": 256, "c": 320})) == [Run(0, 0, 64), Run(64, 256, 128)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0, 2, 8]), st.booleans()), max_size=12), st.integers(0, 3))
def test_stretches_are_those_of_the_slices_in_few(parts, start):
    """Whatever follows whatever, with slices of nothing among them."""
    slices, targets, at, after = [], [], 0, start
    expected: dict[int, int] = {}
    for size, apart in parts:
        after += 100 if apart else 0
        slices.append(WeightSlice("w", (size,), (0,), (size,), "bfloat16", size, 0, 0))
        targets.append(after)
        expected |= {after + byte: at + byte for byte in range(size)}
        at, after = at + size, after + size
    runs = runs_of(slices, targets)
    found = {run.target + byte: run.source + byte for run in runs for byte in range(run.size_bytes)}
    assert found == expected
    assert all(run.size_bytes for run in runs)
    assert all(one.target + one.size_bytes != two.target for one, two in pairwise(runs))


def test_what_does_not_fit_the_memory_for_it_is_refused():
    lender = Lender(WeightsConfig(transport="shm"), CPU, "host:1")
    kept = lender.keep(V[1], [TensorBox("w", (4,), (0,), torch.ones(4))])
    manifest = Manifest(V[1], kept.slices, sources=(Source(1, kept.source),))
    loan = lender.link.offer(lender.copies.lend(V[1], "test").memory, 16, "reader")
    receiver = Receiver(CPU)
    for size_bytes, place in ((15, 0), (16, 4)):
        with pytest.raises(errors.WeightsCorrupt, match="does not fit"):
            receiver.receive(manifest, [loan], torch.zeros(size_bytes, dtype=torch.uint8), {"w": place}, "reader", 1e9)
    target = torch.zeros(20, dtype=torch.uint8)
    receiver.receive(manifest, [loan], target, {"w": 4}, "reader", 1e9)
    assert target.view(torch.float32).tolist() == [0.0, 1.0, 1.0, 1.0, 1.0]
    lender.close()


def test_process_groups_that_the_device_has_not_are_refused_at_start():
    with pytest.raises(ConfigError, match=r"weights\.backend is 'nccl'.*'cpu'"):
        Lender(WeightsConfig(transport="nccl", backend="nccl"), CPU, "host:1")


def test_messages_from_cards_are_not_received_elsewhere():
    link = broadcast_pb2.CollectiveLink(store="127.0.0.1:1", name="reader", piece_bytes=16, backend="nccl")
    loan = broadcast_pb2.BorrowShardResponse(size_bytes=16, link=link)
    target = torch.zeros(16, dtype=torch.uint8)
    with pytest.raises(errors.Unsupported, match="nccl sends, and 'cpu' is to receive"):
        CollectiveReader(CPU).read(loan, [Run(0, 0, 16)], target, "reader", time.monotonic() + 1)


def test_a_reader_that_never_comes_keeps_no_other_from_meeting_its_sender():
    lender = CollectiveLender(CPU, "127.0.0.1", "auto", 2 * DEADLINE_S)
    memory = lender.allocate(16)
    memory.data.copy_(torch.arange(16, dtype=torch.uint8))
    lender.offer(memory, 16, "gone")
    time.sleep(0.1)  # its sender waits by now, or soon
    target, reader = torch.zeros(16, dtype=torch.uint8), CollectiveReader(CPU)
    loan = lender.offer(memory, 16, "here")
    reader.read(loan, [Run(0, 0, 16)], target, "here", time.monotonic() + DEADLINE_S)
    assert target.tolist() == list(range(16))
    reader.close()
    gone = lender._senders["gone"].thread
    lender.close()
    gone.join(2 * DEADLINE_S)
    assert not gone.is_alive()


@pytest.mark.parametrize("card", ["", "GPU-1"])
def test_both_ends_on_one_card_are_refused_at_once(card):
    store, outcomes = HashStore(), {}

    def come(rank: int) -> None:
        try:
            meet(store, rank, card, time.monotonic() + DEADLINE_S)
            outcomes[rank] = "met"
        except errors.Unsupported as error:
            outcomes[rank] = error.message

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE_S)
    refused = "nccl connects no card with itself: for a trainer and an engine on one card take cuda_ipc"
    assert outcomes == dict.fromkeys(range(2), refused if card else "met")


def test_rows_of_a_tensor_go_to_their_place_in_it():
    part = WeightSlice("a", (10, 8), (3, 0), (2, 8), "bfloat16", 32, 0, 0)
    assert target_offsets([part], {"a": 1000}) == [1000 + 3 * 8 * 2]


def test_a_slice_that_is_cut_through_its_rows_is_refused():
    part = WeightSlice("a", (10, 8), (0, 4), (10, 4), "float32", 160, 0, 0)
    with pytest.raises(errors.Unsupported):
        target_offsets([part], {"a": 0})
