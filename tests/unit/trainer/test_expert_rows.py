"""Rows of expert ids: one that is named twice, or does not exist, is found by compiled code and by numpy alike."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.trainer.expert_rows import BLOCK_BYTES, compiled_check, fault

ALWAYS, NEVER = 0, 1 << 40
TWICE = "they name an expert twice for one token"
FORMS = [("u1", 2), ("u1", 3), ("u1", 4), ("u1", 8), ("u1", 16), ("<u2", 2), ("<u2", 4), ("<u2", 8), ("<u2", 10)]


def distinct(count: int, dtype: str, top_k: int, expert_count: int = 256) -> np.ndarray:
    first = np.random.default_rng(1).integers(0, expert_count, (count, 1))
    return ((first + 7 * np.arange(top_k)) % expert_count).astype(dtype)


def test_the_loop_is_compiled_where_the_trainer_is_installed():
    assert compiled_check() is not None


@pytest.mark.parametrize("compiled_bytes", [ALWAYS, NEVER])
@pytest.mark.parametrize(("dtype", "top_k"), FORMS)
def test_each_pair_of_places_is_compared(dtype: str, top_k: int, compiled_bytes: int):
    rows = distinct(37, dtype, top_k)
    assert fault(rows, 256, compiled_bytes) is None
    for row in (0, 17, 36):
        for one, other in combinations(range(top_k), 2):
            wrong = rows.copy()
            wrong[row, other] = wrong[row, one]
            assert fault(wrong, 256, compiled_bytes) == TWICE


@pytest.mark.parametrize("compiled_bytes", [ALWAYS, NEVER])
@pytest.mark.parametrize("row", [0, 2047, 2048, BLOCK_BYTES // 8 - 1, BLOCK_BYTES // 8, BLOCK_BYTES // 8 + 2])
def test_a_fault_is_found_wherever_it_is(row: int, compiled_bytes: int):
    rows = distinct(BLOCK_BYTES // 8 + 3, "u1", 8)
    rows[row, 6] = rows[row, 1]
    assert fault(rows, 256, compiled_bytes) == TWICE
    rows = distinct(BLOCK_BYTES // 8 + 3, "u1", 8, 128)
    rows[row, 3] = 200
    assert fault(rows, 200, compiled_bytes) == "they name expert 200 of 200"
    assert fault(rows, 201, compiled_bytes) is None


@pytest.mark.parametrize("expert_count", [256, 65536])
@given(data=st.data())
def test_compiled_code_and_numpy_say_what_sorting_says(data: st.DataObject, expert_count: int):
    dtype = "u1" if expert_count == 256 else "<u2"
    top_k = data.draw(st.sampled_from([1, 2, 4, 8]))
    ids = st.sampled_from([0, 1, 2, 3, 7, 127, 128, 129, expert_count - 2, expert_count - 1])
    row = st.lists(ids, min_size=top_k, max_size=top_k)
    rows = np.array(data.draw(st.lists(row, min_size=1, max_size=9)), dtype)
    ordered = np.sort(rows, axis=1)
    twice = bool((ordered[:, 1:] == ordered[:, :-1]).any())
    assert [fault(rows, expert_count, limit) for limit in (ALWAYS, NEVER)] == [TWICE if twice else None] * 2


def test_rows_at_any_address_are_looked_through():
    memory = np.zeros(8 * 20 + 3, np.uint8)
    rows = memory[3:].reshape(-1, 4)
    rows[:] = distinct(40, "u1", 4)
    assert fault(rows, 256, ALWAYS) is None
    rows[39, 0] = rows[39, 3]
    assert fault(rows, 256, ALWAYS) == TWICE


@pytest.mark.parametrize("top_k", [4, 8])
def test_rows_that_may_not_be_written_to_are_looked_through(top_k: int):
    rows = distinct(40, "u1", top_k)
    assert fault(np.frombuffer(rows.tobytes(), np.uint8).reshape(-1, top_k), 256, ALWAYS) is None
    rows[39, 0] = rows[39, 3]
    assert fault(np.frombuffer(rows.tobytes(), np.uint8).reshape(-1, top_k), 256, ALWAYS) == TWICE
