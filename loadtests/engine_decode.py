"""What paging, scheduling and sampling cost: an engine step against the plain forward pass it contains.

    python loadtests/engine_decode.py

Prints milliseconds of CPU a decode step at several batch sizes, for the whole engine (its thread, its event loop,
requests coming and going) and for a bare forward pass of the same batch over the same KV, and fails if the ratio is
above the budget. CPU time, so that other processes on the machine do not matter; sizes of the demo.
"""

from __future__ import annotations

import asyncio
import sys
import time

import torch

from slipstream.common.version import PolicyVersion
from slipstream.engine.base import DecodeRequest, Sampling
from slipstream.engine.embedded.config import EmbeddedConfig
from slipstream.engine.embedded.core import EngineCore
from slipstream.engine.embedded.engine import EmbeddedEngine
from slipstream.models.checkpoint import to_hf
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.model import build_model, init_weights

SIZES = MoeConfig(vocab_size=101)
PROMPT = list(range(11))
NEW_TOKENS = 10
GROUP = 8
BATCHES = (8, 32, 64, 128)
BUDGET = 1.6  # small batches are the worst: sampling and bookkeeping cost about 0.8 ms whatever the size
VERSION = PolicyVersion(1, 0)


def forward_ms(tensors: dict[str, torch.Tensor], rows: int) -> float:
    """Median of a bare forward pass: embeddings to logits, with attention over KV of the same length."""
    core = EngineCore(SIZES, EmbeddedConfig(max_running_samples=rows))
    core.update(VERSION, tensors, lambda paused: None)
    position = len(PROMPT) + NEW_TOKENS // 2
    size = core.config.block_size_tokens
    tables = torch.arange(rows * (position // size + 1)).view(rows, -1)
    positions = torch.full((rows,), position)
    tokens = torch.randint(SIZES.vocab_size, (1, rows))
    times = []
    for _ in range(60):
        step = core.kv.decode_step(tables, positions)
        core.model.routes.begin()
        started = time.process_time()
        core.model.logits(core.model.hidden(tokens, positions.unsqueeze(0), step))
        times.append(time.process_time() - started)
    return sorted(times)[len(times) // 2] * 1e3


async def engine_ms(tensors: dict[str, torch.Tensor], rows: int, seconds: float = 2.0) -> tuple[float, float]:
    """Milliseconds of CPU a step, and tokens a second, with the batch kept full by groups that come and go."""
    engine = EmbeddedEngine(SIZES, EmbeddedConfig(max_running_samples=rows))
    await engine.start()
    await engine.update(VERSION, tensors, lambda paused: None)
    deadline = time.perf_counter() + seconds
    sampling = Sampling(max_new_tokens=NEW_TOKENS)

    async def client(number: int) -> None:
        turn = 0
        while time.perf_counter() < deadline:
            ids = tuple(f"{number}/{turn}/{index}" for index in range(GROUP))
            request = DecodeRequest(f"{number}/{turn}", PROMPT, "salt", ids, sampling)
            async for _ in engine.decode_batches(request):
                pass
            turn += 1

    started, started_cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(client(number) for number in range(2 * rows // GROUP)))
    elapsed, cpu = time.perf_counter() - started, time.process_time() - started_cpu
    load = engine.load()
    await engine.stop()
    return cpu / load.decode_steps * 1e3, load.decoded_tokens / elapsed


def main() -> int:
    torch.set_num_threads(1)
    model = build_model(SIZES)
    init_weights(model, 0)
    tensors = to_hf(model)
    worst = 0.0
    with torch.inference_mode():
        for rows in BATCHES:
            plain = forward_ms(tensors, rows)
            full, tokens_per_s = asyncio.run(engine_ms(tensors, rows))
            worst = max(worst, full / plain)
            print(
                f"batch {rows:3}: forward {plain:5.2f} ms, engine {full:5.2f} ms a step, "
                f"ratio {full / plain:.2f}, {tokens_per_s:6.0f} tokens/s"
            )
    print(f"{'ok' if worst <= BUDGET else 'over budget'}: worst ratio {worst:.2f}, budget {BUDGET}")
    return int(worst > BUDGET)


if __name__ == "__main__":
    sys.exit(main())
