"""Manifests: what is described comes back, and what differs is caught."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from slipstream.common.errors import WeightsCorrupt
from slipstream.common.version import PolicyVersion
from slipstream.weights.checksum import slice_checksum
from slipstream.weights.manifest import (
    Manifest,
    Probe,
    assemble,
    check_geometry,
    describe_tensors,
    verify_tensors,
)

TENSORS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.weight": np.linspace(0, 1, 5, dtype=np.float16),
}


def described() -> tuple[Manifest, bytearray]:
    slices, buffers = describe_tensors(TENSORS)
    return Manifest(PolicyVersion(1, 3), slices, Probe((1, 2), (-0.5,), 0.5)), bytearray(b"".join(buffers))


def test_a_manifest_survives_the_wire():
    manifest, _ = described()
    assert Manifest.from_proto(manifest.to_proto()) == manifest


def test_tensors_come_back_from_their_bytes():
    manifest, data = described()
    for name, values in assemble(manifest, data).items():
        np.testing.assert_array_equal(values, TENSORS[name])
    assert verify_tensors(manifest, TENSORS) == 2


@pytest.mark.parametrize("at", [0, 47, 48, 57])
def test_a_flipped_bit_in_the_bytes_is_caught(at):
    manifest, data = described()
    data[at] ^= 4
    with pytest.raises(WeightsCorrupt):
        assemble(manifest, data)


def test_a_changed_missing_or_extra_parameter_is_caught():
    manifest, _ = described()
    changed = {**TENSORS, "a.weight": TENSORS["a.weight"][::-1]}
    missing = {"a.weight": TENSORS["a.weight"]}
    for live in (changed, missing, {**TENSORS, "c": TENSORS["b.weight"]}):
        with pytest.raises(WeightsCorrupt):
            verify_tensors(manifest, live)


def test_slices_of_several_ranks_make_one_tensor():
    whole = TENSORS["a.weight"]
    parts = []
    for start in (0, 2):
        (part,), _ = describe_tensors({"a.weight": whole[:, start : start + 2]})
        checksum = slice_checksum("a.weight", whole[:, start : start + 2], whole.shape, (0, start))
        parts.append(replace(part, global_shape=(3, 4), offsets=(0, start), checksum=checksum))
    check_geometry(parts)
    manifest = Manifest(PolicyVersion(1, 1), tuple(parts))
    data = b"".join(np.ascontiguousarray(whole[:, s : s + 2]).tobytes() for s in (0, 2))
    tensors = assemble(manifest, bytearray(data))
    np.testing.assert_array_equal(tensors["a.weight"], whole)
    assert verify_tensors(manifest, tensors) == 2


def test_slices_with_a_hole_or_an_overlap_are_refused():
    (part,), _ = describe_tensors({"a.weight": np.zeros((2, 4), np.float32)})
    half = replace(part, global_shape=(4, 4))
    for offsets in [(0, 0)], [(0, 0), (1, 0)], [(0, 0), (3, 0)]:
        with pytest.raises(WeightsCorrupt):
            check_geometry([replace(half, offsets=each) for each in offsets])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_though_every_checksum_fits(value):
    slices, buffers = describe_tensors({"a.weight": np.array([1.0, value], np.float32)})
    with pytest.raises(WeightsCorrupt, match="not finite"):
        assemble(Manifest(PolicyVersion(1, 3), slices), bytearray(b"".join(buffers)))


def test_a_tensor_in_thousands_of_slices_is_checked_in_no_time():
    (part,), _ = describe_tensors({"a.weight": np.zeros((1, 4), np.float32)})
    rows = [replace(part, global_shape=(4096, 4), offsets=(row, 0)) for row in range(4096)]
    began_s = time.process_time()
    check_geometry(rows)
    with pytest.raises(WeightsCorrupt):
        check_geometry([*rows[:-1], rows[0]])
    assert time.process_time() - began_s < 5.0
