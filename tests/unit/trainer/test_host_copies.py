"""What is published stays as it was while training goes on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.trainer.host_copies import HostCopies, Memory

CPU = torch.device("cpu")


@pytest.mark.parametrize("memory", ["fresh", "reused"])
def test_copies_hold_until_the_export_after_the_next(memory: Memory):
    weights = {"a": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16)}
    copies, taken = HostCopies(CPU, memory), []
    for value in range(4):
        for weight in weights.values():
            weight.fill_(float(value))
        taken.append(copies.begin(weights).arrays())
        assert all(tensor.dtype == np.float32 for tensor in taken[-1].values())
        for old in (value, value - 1):
            if old >= 0:
                assert all((tensor == old).all() for tensor in taken[old].values())
    reused = np.shares_memory(taken[0]["a"], taken[2]["a"])
    assert reused == (memory == "reused")
    assert not np.shares_memory(taken[2]["a"], taken[3]["a"])


def test_a_view_is_copied_as_it_looks():
    whole = torch.arange(12.0).view(3, 4)
    for memory in ("fresh", "reused"):
        copied = HostCopies(CPU, memory).begin({"column": whole[:, 1:3]}).arrays()["column"]
        np.testing.assert_array_equal(copied, whole[:, 1:3].numpy())
        assert not np.shares_memory(copied, whole.numpy())


def test_slices_that_make_up_a_tensor_are_each_themselves():
    stacked, other = torch.arange(24.0).view(3, 2, 4), torch.arange(5.0)
    given = {f"expert.{index}": part for index, part in enumerate(stacked.unbind(0))} | {"bias": other}
    copied = HostCopies(CPU, "reused").begin(given).arrays()
    assert list(copied) == list(given)
    for name, tensor in given.items():
        np.testing.assert_array_equal(copied[name], tensor.numpy())
        assert not np.shares_memory(copied[name], tensor.numpy())
