"""What it costs a vLLM worker's own process to take the outputs of a step, by vLLM's way and by ours.

    python loadtests/step_outputs.py [--samples 64] [--layers 16] [--top-k 8]

Feeds the same step, as it comes from vLLM's engine process, through vLLM's output processor, whose answers each
sample's task takes, and through what takes tokens of samples that go on directly (`engine/vllm/direct.py`); with expert
routes and without. Prints microseconds of processor time a step, the least of four rounds, and their ratio. Needs vLLM,
and no model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "services"))

ROUNDS = 4
STEPS_A_ROUND = 100
WARM_UP_STEPS = 5


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=8)
    return parser.parse_args()


def name_of(sample: int) -> str:
    return f"rollout-{sample}/0-0123abcd"


def step(options: argparse.Namespace, routes: bool) -> list[bytes]:
    """A step of one token a sample, as it travels."""
    import numpy as np
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import MsgpackEncoder

    from slipstream.engine.vllm.packing import pack

    outputs = [
        EngineCoreOutput(
            request_id=name_of(sample),
            new_token_ids=[sample],
            new_logprobs=LogprobsLists(
                np.array([[sample]], np.int32), np.array([[-0.5]], np.float32), np.array([1], np.int32)
            ),
            routed_experts=np.full((1, options.layers, options.top_k), sample, np.uint8) if routes else None,
        )
        for sample in range(options.samples)
    ]
    together = EngineCoreOutputs(outputs=outputs, scheduler_stats=SchedulerStats())
    pack(together)
    parts: list[Any] = list(MsgpackEncoder().encode(together))
    return [bytes(part) for part in parts]


async def cost_us(options: argparse.Namespace, routes: bool, directly: bool) -> float:
    """Of one step."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
    from vllm.v1.metrics.stats import IterationStats
    from vllm.v1.serial_utils import MsgpackDecoder

    from slipstream.engine.vllm.direct import Direct, DirectSamples
    from slipstream.engine.vllm.packing import unpack
    from slipstream.engine.vllm.samples import Sample

    processor, decoder, direct = (
        OutputProcessor(None, log_stats=True),
        MsgpackDecoder(EngineCoreOutputs),
        DirectSamples(),
    )
    sampling = SamplingParams(
        max_tokens=10**6,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
    samples = [Sample(index, []) for index in range(options.samples)]
    collectors: list[Any] = []
    for sample in range(options.samples):
        name = name_of(sample)
        collectors.append(RequestOutputCollector(RequestOutputKind.DELTA, name))
        request = EngineCoreRequest(
            request_id=name,
            external_req_id=name,
            prompt_token_ids=[1] * 16,
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        processor.add_request(request, None, None, 0, collectors[sample])
        if directly:
            state = processor.request_states[name]
            direct.add(name, Direct(samples[sample], state, collectors[sample]))

    async def wait_for(sample: int) -> None:
        while True:
            (news,) = (collectors[sample].get_nowait() or await collectors[sample].get()).outputs
            samples[sample].add(news.token_ids, news.logprobs.logprobs)

    waiting = [asyncio.create_task(wait_for(sample)) for sample in range(options.samples)]
    await asyncio.sleep(0)
    came = step(options, routes)

    async def take(count: int) -> None:
        for _ in range(count):
            outputs = decoder.decode(came)
            unpack(outputs, direct)
            processor.process_outputs(outputs.outputs, outputs.timestamp, IterationStats() if outputs.outputs else None)
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # its waiters run

    await take(WARM_UP_STEPS)
    times_s: list[float] = []
    for _ in range(ROUNDS):
        before_s = time.process_time()
        await take(STEPS_A_ROUND)
        times_s.append(time.process_time() - before_s)
    for task in waiting:
        task.cancel()
    steps = WARM_UP_STEPS + ROUNDS * STEPS_A_ROUND
    assert all(len(taken) == steps for sample in samples for taken in (sample.token_ids, sample.logprobs)), (
        "tokens were lost"
    )
    return min(times_s) / STEPS_A_ROUND * 1e6


def main() -> int:
    options = arguments()
    from vllm import envs

    from slipstream.engine.vllm.merging import keep_routes_when_merging

    envs.enable_envs_cache()
    keep_routes_when_merging()
    figures: dict[str, dict[str, float]] = {}
    for routes in (False, True):
        vllms, ours = (asyncio.run(cost_us(options, routes, directly)) for directly in (False, True))
        figures["routes" if routes else "none"] = {
            "vllm_us": round(vllms),
            "direct_us": round(ours),
            "ratio": round(ours / vllms, 3),
        }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
