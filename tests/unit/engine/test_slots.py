"""Routes by slot: a request is given what its own positions were computed with, whose blocks they may be now."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from slipstream.engine.vllm.slots import RouteSlots

BLOCK, LAYERS, TOP_K = 4, 2, 2
KEY = "step"


@dataclass
class Request:
    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int = 0
    sampling_params: Any = field(default_factory=lambda: SimpleNamespace(routed_experts_prompt_start=0))


class Pool:
    """Slots of 8 blocks, and which of them each request has."""

    def __init__(self, experts: int = 8) -> None:
        self.blocks: dict[str, list[int]] = {}
        self.slots = RouteSlots(8, BLOCK, LAYERS, experts, TOP_K, lambda key: list(self.blocks[key]), KEY)

    def begin(self, *request_ids: str) -> int:
        number = self.slots.build_connector_meta(
            SimpleNamespace(num_scheduled_tokens=dict.fromkeys(request_ids, 1)), {}
        )
        assert number is not None
        return number

    def end(self, number: int, **spans: tuple[int, int]) -> None:
        """`spans`: positions of each request, whose rows are 10 times the number of the step and the position."""
        rows = [10 * number + position for first, end in spans.values() for position in range(first, end)]
        step = SimpleNamespace(
            number=number,
            request_ids=list(spans),
            first_positions=[first for first, _ in spans.values()],
            ends=np.cumsum([end - first for first, end in spans.values()]).tolist(),
            rows=np.broadcast_to(np.array(rows, np.uint8)[:, None, None], (len(rows), LAYERS, TOP_K)),
        )
        self.slots.store({KEY: step})

    def take(self, request: Request) -> list[int] | None:
        rows = self.slots.take_output(request, {})
        return None if rows is None else rows[:, 0, 0].tolist()


def test_the_first_token_brings_the_prompts_rows_and_each_further_one_its_own():
    pool, request = Pool(), Request("a", 6)
    pool.blocks["a"] = [5, 2]
    pool.end(pool.begin("a"), a=(0, 4))
    assert pool.take(request) is None, "no token yet"
    pool.end(pool.begin("a"), a=(4, 6))
    request.num_output_tokens = 1
    assert pool.take(request) == [10, 11, 12, 13, 24, 25]
    pool.end(pool.begin("a"), a=(6, 7))
    request.num_output_tokens = 2
    assert pool.take(request) == [36]


def test_a_prefix_that_was_found_has_the_rows_it_was_computed_with():
    pool = Pool()
    pool.blocks |= {"a": [3, 1], "b": [3, 6]}
    pool.end(pool.begin("a"), a=(0, 6))
    pool.end(pool.begin("b"), b=(4, 6))
    assert pool.take(Request("b", 6, 1)) == [10, 11, 12, 13, 24, 25]


def test_requests_of_one_step_keep_apart_also_in_another_order():
    pool = Pool()
    pool.blocks |= {"a": [1], "b": [2]}
    pool.end(pool.begin("a", "b"), b=(0, 3), a=(0, 2))
    assert pool.take(Request("a", 2, 1)) == [10, 11]
    assert pool.take(Request("b", 3, 1)) == [10, 11, 12]


def test_a_step_that_ends_late_writes_to_the_blocks_it_began_with():
    pool = Pool()
    pool.blocks["a"] = [1]
    number = pool.begin("a")
    pool.blocks["a"] = [4]
    pool.end(number, a=(0, 2))
    assert pool.take(Request("a", 2, 1)) == [10, 11]
    assert pool.slots.routed_experts_by_slot[BLOCK : BLOCK + 2, 0, 0].tolist() == [10, 11]
    assert not pool.slots.routed_experts_by_slot[4 * BLOCK :].any()


def test_a_preempted_sample_gives_out_its_next_position_alone():
    pool, request = Pool(), Request("a", 3, 2)
    pool.blocks["a"] = [1, 2]
    pool.end(pool.begin("a"), a=(0, 4))
    request.num_output_tokens = 3
    assert pool.take(request) == [13]


def test_without_a_computation_there_is_nothing_to_take():
    pool = Pool()
    assert pool.slots.build_connector_meta(SimpleNamespace(num_scheduled_tokens={}), {}) is None
    pool.slots.store(None)
    assert pool.take(Request("a", 2, 1)) is None


def test_ids_take_two_bytes_above_256_experts():
    assert Pool(256).slots.routed_experts_by_slot.dtype == np.uint8
    assert Pool(257).slots.routed_experts_by_slot.dtype == np.uint16
