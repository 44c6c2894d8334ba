"""The logical checksum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.weights.checksum import slice_checksum, tensor_checksum

MASK = (1 << 64) - 1


def tensor(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize(
    ("values", "golden"),
    [
        (np.array([1.0, -2.5, 0.0], "<f4"), 0x18D90AF838600000),
        (np.arange(6, dtype="<f2").reshape(2, 3), 0xB38EE0AEC4195100),
    ],
    ids=["float32", "float16"],
)
def test_the_sum_of_known_values_is_known(values, golden):
    assert tensor_checksum("model.norm.weight", values) == golden


@given(rows=st.integers(0, 12), columns=st.integers(0, 7))
def test_sums_of_the_parts_add_up_wherever_a_tensor_is_cut(rows, columns):
    values = tensor(12, 7, 3)
    parts = [
        (values[:rows, :columns], (0, 0, 0)),
        (values[:rows, columns:], (0, columns, 0)),
        (values[rows:, :columns], (rows, 0, 0)),
        (values[rows:, columns:], (rows, columns, 0)),
    ]
    total = sum(slice_checksum("w", part, values.shape, offsets) for part, offsets in reversed(parts))
    assert total & MASK == tensor_checksum("w", values)


@given(index=st.integers(0, 70_000 - 1), bit=st.integers(0, 31))
def test_any_flipped_bit_changes_the_sum(index, bit):
    values = tensor(70_000)
    before = tensor_checksum("w", values)
    values.view(np.uint32)[index] ^= np.uint32(1 << bit)
    assert tensor_checksum("w", values) != before


def test_names_places_and_missing_elements_count():
    values = tensor(4, 4)
    before = tensor_checksum("w", values)
    assert tensor_checksum("v", values) != before
    assert tensor_checksum("w", values.T) != before
    assert slice_checksum("w", values[:3], (4, 4), (0, 0)) != before
    assert tensor_checksum("w", np.zeros(3, "<f4")) != tensor_checksum("w", np.zeros(4, "<f4"))
