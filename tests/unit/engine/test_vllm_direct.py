"""Tokens of samples that go on are taken as they come; all else vLLM gets, with what came before it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slipstream.engine.vllm.direct import Direct, DirectSamples
from slipstream.engine.vllm.samples import Sample

KIND = ("<u2", [2, 3])
ROW = np.arange(6, dtype="<u2").reshape(1, 2, 3)
QUIET: dict[str, Any] = dict.fromkeys(
    [
        "finish_reason",
        "events",
        "routed_experts",
        "prefill_stats",
        "kv_transfer_params",
        "ec_transfer_params",
        "new_prompt_logprobs_tensors",
        "new_sampling_mask",
    ]
)


def output_of(token: int, **said: Any) -> Any:
    return SimpleNamespace(request_id="a", new_token_ids=[token], **(QUIET | said))


def begun(greedy: bool = False) -> tuple[DirectSamples, Direct]:
    samples = DirectSamples()
    state = SimpleNamespace(routed_experts_chunks=[])
    sample = Sample(0, [], greedy, token_ids=[1], logprobs=[-0.5])
    direct = Direct(sample, state, SimpleNamespace(output=None))
    samples.add("a", direct)
    return samples, direct


def take(samples: DirectSamples, output: Any, row: int) -> bool:
    return samples.take(output, [-0.25], [(ROW + row).tobytes()], KIND)


def test_tokens_alone_are_taken_and_their_rows_come_when_vllm_needs_them():
    samples, direct = begun()
    assert take(samples, output_of(2), 10)
    assert take(samples, output_of(3), 20)
    assert (direct.sample.token_ids, direct.sample.logprobs) == ([1, 2, 3], [-0.5, -0.25, -0.25])
    assert (samples.take_count(), samples.take_count()) == (2, 0)
    assert not direct.state.routed_experts_chunks
    samples.settle("a")
    (rows,) = direct.state.routed_experts_chunks
    assert rows.dtype == np.uint16
    np.testing.assert_array_equal(rows, np.concatenate([ROW + 10, ROW + 20]))
    assert not take(samples, output_of(4), 30), "from then on all goes vLLM's way"
    samples.settle("a")
    samples.settle("unknown")
    assert len(direct.state.routed_experts_chunks) == 1


@pytest.mark.parametrize("name", QUIET)
def test_what_says_more_goes_to_vllm_after_the_rows_of_before(name: str):
    samples, direct = begun()
    assert take(samples, output_of(2), 10)
    more = output_of(3, **{name: 0})
    assert not take(samples, more, 20)
    assert direct.sample.token_ids == [1, 2]
    samples.give_way([more, SimpleNamespace(request_id="of nobody")])
    np.testing.assert_array_equal(direct.state.routed_experts_chunks, [ROW + 10])
    assert take(samples, output_of(4), 30)
    samples.settle("a")
    np.testing.assert_array_equal(direct.state.routed_experts_chunks, [ROW + 10, ROW + 30])


def test_nothing_overtakes_what_its_waiter_has_not_taken_yet():
    samples, direct = begun()
    direct.collector.output = "three tokens"
    assert not take(samples, output_of(2), 10)
    direct.collector.output = None
    assert take(samples, output_of(3), 20)


def test_without_routes_and_of_a_sample_that_nobody_named():
    samples, direct = begun()
    assert samples.take(output_of(2), [-0.25], [], ("", ()))
    samples.settle("a")
    assert not direct.state.routed_experts_chunks
    assert not samples.take(output_of(2), [-0.25], [], ("", ()))


def test_a_temperature_that_vllm_takes_for_0():
    samples, direct = begun(greedy=True)
    assert take(samples, output_of(2), 10)
    assert direct.sample.logprobs == [-0.5, 0.0]
