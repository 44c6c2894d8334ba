"""What FP8 inference costs in mismatch, and what FP8 training takes back, with vLLM's own FP8 on a card.

    python loadtests/fp8_mismatch_card.py [--out FILE]

A small mixture of experts of random weights, whose widths the kernels take. vLLM quantises it at the update, by blocks,
and samples answers; the trainer computes the same tokens on the recorded routes, with products in bfloat16 and in FP8.
Both in one process beside vLLM's, within two minutes; figures are written as they come. `fp8_mismatch.py` does the same
on a CPU, emulated. Without a card this runs all the same, vLLM then in float32 and not quantised, FP8 emulated: it
shows that it would run, and what FP8 training costs against an engine that is not in FP8.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "services"))

import numpy as np
import torch
from fp8_mismatch import VERSION, sequence

from slipstream.engine.base import DecodeRequest, Sampling
from slipstream.engine.vllm.config import VllmConfig
from slipstream.engine.vllm.engine import VllmEngine
from slipstream.models.checkpoint import save_model, to_hf
from slipstream.models.fp8.config import Fp8Config
from slipstream.models.fp8.modules import convert
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.model import MoeModel, build_model, init_weights
from slipstream.trainer.loss_config import MaskedRatioLossConfig
from slipstream.trainer.optim_config import OptimConfig
from slipstream.trainer.parallel.sharding import Passes
from slipstream.trainer.sequence import TrainSequence
from slipstream.trainer.step import Learner

KEYS: dict[str, Any] = {"vocab_size": 512, "dim": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64}
SIZES = MoeConfig(**KEYS, n_experts=8, top_k=2, expert_dim=128, max_context_tokens=256)
SHARPER = 4.0
"""A random head's logits are nearly alike; times this, a few tokens are likely, as in a model that has learned."""
PROMPT_TOKENS, SAMPLES, ANSWER_TOKENS = 32, 4, 64
MICRO_BATCH = 16


def model() -> MoeModel:
    made = build_model(SIZES)
    init_weights(made, 1)
    with torch.no_grad():
        made.lm_head.weight.mul_(SHARPER)
    return made.requires_grad_(False)


async def sampled(prompts: list[list[int]], device: str) -> list[TrainSequence]:
    """Answers of vLLM with their routes and log-probabilities."""
    on_card = device == "cuda"
    config = VllmConfig(
        dtype="bfloat16" if on_card else "float32",
        quantization="fp8_per_block" if on_card else "none",
        compiled=False,
        gpu_memory_fraction=0.05,
        block_count=512,
        max_running_samples=128,
    )
    with tempfile.TemporaryDirectory() as directory:
        save_model(model(), Path(directory))
        engine = VllmEngine(Path(directory), SIZES, config)
        await engine.start()
        try:
            await engine.update(VERSION, to_hf(model()), lambda paused: None)
            async with asyncio.timeout(90), asyncio.TaskGroup() as group:
                tasks = [group.create_task(answered(engine, index, each)) for index, each in enumerate(prompts)]
            return [one for task in tasks for one in task.result()]
        finally:
            await engine.stop()


async def answered(engine: VllmEngine, index: int, prompt: list[int]) -> list[TrainSequence]:
    keys = tuple(f"{index}.{each}" for each in range(SAMPLES))
    sampling = Sampling(max_new_tokens=ANSWER_TOKENS, seed=5)
    request = DecodeRequest(str(index), prompt, f"salt {index}", keys, sampling, capture_routes=True)
    answers: list[tuple[list[int], list[float]]] = [([], []) for _ in keys]
    async for chunk in engine.decode(request):
        answers[chunk.sample_index][0].extend(chunk.token_ids)
        answers[chunk.sample_index][1].extend(chunk.logprobs)
    before = engine.routes(str(index))
    return [sequence(prompt, *answer, before, engine.routes(key)) for key, answer in zip(keys, answers, strict=True)]


def compared(sequences: list[TrainSequence], device: str, fp8: bool) -> dict[str, Any]:
    """What the trainer says of these tokens, against the engine."""
    trained = model().to(device)
    if fp8:
        convert(trained, Fp8Config())
    learner = Learner(trained, OptimConfig(), MaskedRatioLossConfig(), passes=Passes(bfloat16=True))
    batches = (sequences[at : at + MICRO_BATCH] for at in range(0, len(sequences), MICRO_BATCH))
    found = np.concatenate([learner.logps(batch) for batch in batches])
    difference = found - np.concatenate([each.engine_logps for each in sequences])
    size = np.abs(difference)
    return {
        "kl": float((np.exp(difference) - 1 - difference).mean()),
        "mean": float(size.mean()),
        "p999": float(np.quantile(size, 0.999)),
        "max": float(size.max()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--out", type=Path, help="append figures, a JSON object a line")
    options = parser.parse_args()

    def note(figures: dict[str, Any]) -> None:
        print(json.dumps(figures), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(figures) + "\n")

    started_s = time.monotonic()
    rng = np.random.default_rng(3)
    prompts = rng.integers(0, SIZES.vocab_size, (options.prompts, PROMPT_TOKENS)).tolist()
    sequences = asyncio.run(sampled(prompts, options.device))
    tokens = sum(len(each.engine_logps) for each in sequences)
    note(
        {
            "engine": "fp8" if options.device == "cuda" else "float32",
            "tokens": tokens,
            "s": time.monotonic() - started_s,
        }
    )
    kl: dict[str, float] = {}
    for name in ("bfloat16", "fp8"):
        figures = compared(sequences, options.device, name == "fp8")
        kl[name] = figures["kl"]
        note({"trainer": name, **figures, "s": time.monotonic() - started_s})
    note({"gain": kl["bfloat16"] / max(kl["fp8"], 1e-12)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
