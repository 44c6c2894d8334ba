"""What a step brings travels in one piece, and every request gets its own back."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import generate_latest

from slipstream.engine.vllm.direct import Direct, DirectSamples
from slipstream.engine.vllm.launch import set_environment
from slipstream.engine.vllm.packing import MOST_ROWS, pack, unpack
from slipstream.engine.vllm.samples import Sample
from tests.engine.bench import Factory, prompt_of
from tests.engine.engines import Vllm

SAMPLES, TOKENS = 6, 100


@pytest.fixture(autouse=True, scope="module")
def _environment(tmp_path_factory: pytest.TempPathFactory) -> None:
    """vLLM is imported here, perhaps before an engine is started, and reads this then."""
    set_environment(tmp_path_factory.mktemp("sockets"), {})


def routes_of(seed: int, rows: int, dtype: type = np.uint8) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 200, (rows, 3, 2)).astype(dtype)


def logprobs_of(seed: int, tokens: int, width: int = 1) -> Any:
    from vllm.v1.outputs import LogprobsLists

    drawn = np.random.default_rng(seed)
    values = -drawn.random((tokens, width)).astype(np.float32)
    return LogprobsLists(drawn.integers(0, 99, (tokens, width)), values, drawn.integers(1, 9, tokens))


def outputs_of(parts: Sequence[tuple[np.ndarray | None, Any]], told: bool = True) -> Any:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats

    made = [
        EngineCoreOutput(request_id=str(index), new_token_ids=[index], routed_experts=routes, new_logprobs=logprobs)
        for index, (routes, logprobs) in enumerate(parts)
    ]
    return EngineCoreOutputs(outputs=made, scheduler_stats=SchedulerStats() if told else None)


def sent(outputs: Any) -> Any:
    """As it comes out of the other process."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    return MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs))


def assert_all_came(outputs: Any, parts: Sequence[tuple[np.ndarray | None, Any]]) -> None:
    assert [output.request_id for output in outputs.outputs] == [str(index) for index in range(len(parts))]
    for output, (routes, logprobs) in zip(outputs.outputs, parts, strict=True):
        assert (output.routed_experts is None) == (routes is None)
        if routes is not None:
            assert output.routed_experts.dtype == routes.dtype
            np.testing.assert_array_equal(output.routed_experts, routes)
        assert (output.new_logprobs is None) == (logprobs is None)
        for came, was in zip((output.new_logprobs or ())[:3], (logprobs or ())[:3], strict=True):
            assert came.dtype == was.dtype
            np.testing.assert_array_equal(came, was)


MIXED: list[tuple[np.ndarray | None, Any]] = [
    (routes_of(1, 1), logprobs_of(1, 1)),
    (None, logprobs_of(2, 1)),
    (routes_of(3, MOST_ROWS + 1), logprobs_of(3, 1)),  # a prompt's
    (routes_of(4, MOST_ROWS), logprobs_of(4, 3)),
    (None, None),
    (routes_of(5, 2), None),
    (routes_of(6, 1), logprobs_of(6, 1, width=4)),  # of other tokens than the sampled, too
    (routes_of(7, 1), logprobs_of(7, MOST_ROWS + 1)),
]


def test_each_request_gets_its_own_back():
    outputs = outputs_of(MIXED)
    pack(outputs)
    left = [(output.routed_experts is not None, output.new_logprobs is not None) for output in outputs.outputs]
    assert left == [
        (False, False),
        (False, False),
        (True, False),
        (False, False),
        (False, False),
        (False, False),
        (False, True),
        (False, True),
    ]
    came = sent(outputs)
    unpack(came)
    assert_all_came(came, MIXED)
    assert came.scheduler_stats.kv_connector_stats is None, "as it was: NIXL's metrics fail at an empty one"


def test_routes_of_more_than_256_experts_keep_their_dtype():
    parts = [(routes_of(seed, 1, np.uint16), logprobs_of(seed, 1)) for seed in range(4)]
    outputs = outputs_of(parts)
    pack(outputs)
    came = sent(outputs)
    unpack(came)
    assert_all_came(came, parts)


def test_what_others_tell_with_the_statistics_stays():
    outputs = outputs_of(MIXED)
    outputs.scheduler_stats.kv_connector_stats = {"others": 1}
    pack(outputs)
    came = sent(outputs)
    unpack(came)
    assert came.scheduler_stats.kv_connector_stats == {"others": 1}


def test_without_statistics_and_of_one_request_all_travels_as_it_is():
    for parts, told in ((MIXED, False), (MIXED[:1], True), ([], True)):
        outputs = outputs_of(parts, told)
        pack(outputs)
        came = sent(outputs)
        unpack(came)
        assert_all_came(came, parts)


def test_rows_that_came_do_not_keep_those_of_other_requests():
    outputs = outputs_of([(routes_of(seed, 1), logprobs_of(seed, 1)) for seed in range(8)])
    pack(outputs)
    came = sent(outputs)
    unpack(came)
    assert all(output.routed_experts.base is None or output.routed_experts.base.nbytes == 6 for output in came.outputs)


@pytest.mark.parametrize("captured", [True, False])
def test_tokens_alone_are_taken_out_and_all_others_are_whole(captured: bool):
    from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType

    parts: list[tuple[np.ndarray | None, Any]] = [
        (routes_of(seed, 1) if captured else None, logprobs_of(seed, 1)) for seed in range(4)
    ]
    parts[2] = (routes_of(2, 3), logprobs_of(2, 1))  # rows of other tokens, too
    outputs = outputs_of([*parts, *MIXED])
    outputs.outputs[1].events = [EngineCoreEvent.new_event(EngineCoreEventType.PREEMPTED)]
    pack(outputs)
    came, direct = sent(outputs), DirectSamples()
    taken = {}
    for name in ("0", "1", "2", "3"):
        state = SimpleNamespace(routed_experts_chunks=[])
        taken[name] = Direct(Sample(0, []), state, SimpleNamespace(output=None))
        direct.add(name, taken[name])
    unpack(came, direct)
    assert [output.request_id for output in came.outputs] == ["1", "2", *(str(4 + at) for at in range(len(MIXED)))]
    for at, output in enumerate(came.outputs):
        output.request_id = str(at)
    assert_all_came(came, [parts[1], parts[2], *MIXED])
    assert [direct.sample.token_ids for direct in taken.values()] == [[0], [], [], [3]]
    for seed in (0, 3):
        mine, (rows, logprobs) = taken[str(seed)], parts[seed]
        mine.give_way()
        assert mine.sample.logprobs == logprobs.logprobs.ravel().tolist()
        assert len(mine.state.routed_experts_chunks) == captured
        if captured:
            np.testing.assert_array_equal(mine.state.routed_experts_chunks[0], rows)


@pytest.mark.parametrize("together", [True, False])
def test_rows_that_vllm_gets_come_after_those_that_were_taken(together: bool):
    direct, state = DirectSamples(), SimpleNamespace(routed_experts_chunks=[])
    direct.add("0", Direct(Sample(0, []), state, SimpleNamespace(output=None)))
    others = [(routes_of(9, 1), logprobs_of(9, 1))]
    first = outputs_of([(routes_of(1, 1), logprobs_of(1, 1)), *others])
    later = outputs_of([(routes_of(2, 1), None), *(others if together else [])])  # a row, and no token
    for outputs, left in ((first, others), (later, [None, *others] if together else [None])):
        pack(outputs)
        came = sent(outputs)
        unpack(came, direct)
        assert len(came.outputs) == len(left)
    np.testing.assert_array_equal(state.routed_experts_chunks, [routes_of(1, 1)])
    np.testing.assert_array_equal(came.outputs[0].routed_experts, routes_of(2, 1))


@pytest.mark.asyncio(loop_scope="session")
async def test_vllm_sees_the_ends_of_samples_alone(build: Factory, monkeypatch: pytest.MonkeyPatch):
    if not isinstance(build.kind, Vllm):
        return
    async with build() as bench:
        engine: Any = bench.engine
        processor, seen = engine._llm.output_processor, 0
        process = processor.process_outputs

        def process_outputs(outputs: Any, *others: Any) -> Any:
            nonlocal seen
            seen += len(outputs)
            return process(outputs, *others)

        monkeypatch.setattr(processor, "process_outputs", process_outputs)
        before = engine.load().decoded_tokens
        finished = await bench.ask(prompt_of(9), SAMPLES, max_new_tokens=TOKENS)
        assert [len(sample.token_ids) for sample in finished] == [TOKENS] * SAMPLES
        assert seen < SAMPLES * TOKENS / 4
        assert "vllm:" not in generate_latest().decode(), "those would count what vLLM sees"
        assert engine.load().decoded_tokens - before == SAMPLES * TOKENS
