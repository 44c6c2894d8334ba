"""Copies and their loans, sums on torch, and stretches that are read."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.common import errors
from slipstream.common.version import PolicyVersion
from slipstream.weights.checksum import slice_checksum
from slipstream.weights.manifest import WeightSlice
from slipstream.weights.straight.copies import KeptCopies
from slipstream.weights.straight.links import Run, runs_of, target_offsets
from slipstream.weights.straight.memory import DeviceMemory
from slipstream.weights.straight.packing import TensorBox, pack

V = [PolicyVersion(1, step) for step in range(8)]
CPU = torch.device("cpu")
DEADLINE_S = 30.0


class Bench:
    def __init__(self, limit: int = 2, lease_s: float = 60.0) -> None:
        self.now_s = 100.0
        self.allocated: list[int] = []
        self.copies = KeptCopies(self.allocate, limit, lease_s, lambda: self.now_s)

    def allocate(self, size_bytes: int) -> DeviceMemory:
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


def test_slices_that_lie_back_to_back_on_both_sides_are_one_stretch():
    parts = [WeightSlice(name, (2, 8), (0, 0), (2, 8), "float32", 64, 0, 0) for name in "abc"]
    assert runs_of(parts, target_offsets(parts, {"a": 0, "b": 64, "c": 128})) == [Run(0, 0, 192)]
    assert runs_of(parts, target_offsets(parts, {"a": 0, "b": 256, "c": 320})) == [Run(0, 0, 64), Run(64, 256, 128)]


def test_rows_of_a_tensor_go_to_their_place_in_it():
    part = WeightSlice("a", (10, 8), (3, 0), (2, 8), "bfloat16", 32, 0, 0)
    assert target_offsets([part], {"a": 1000}) == [1000 + 3 * 8 * 2]


def test_a_slice_that_is_cut_through_its_rows_is_refused():
    part = WeightSlice("a", (10, 8), (0, 4), (10, 4), "float32", 160, 0, 0)
    with pytest.raises(errors.Unsupported):
        target_offsets([part], {"a": 0})
