"""Online FP8: an update quantises the new weights, and the layers that it should."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from slipstream.common.version import PolicyVersion
from slipstream.engine.base import DecodeRequest, Sampling
from slipstream.engine.vllm.config import VllmConfig
from slipstream.engine.vllm.engine import VllmEngine
from slipstream.engine.vllm.live import QUANTIZATION_ERROR
from slipstream.models.checkpoint import save_model, to_hf
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.model import build_model, init_weights

SIZES = MoeConfig(
    vocab_size=512, dim=256, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=64, n_experts=8, expert_dim=128
).model_copy(update={"max_context_tokens": 256})


def model(seed: int):
    built = build_model(SIZES)
    init_weights(built, seed)
    return built.eval().requires_grad_(False)


@pytest.mark.parametrize("quantization", ["fp8_per_tensor", "fp8_per_block"])
async def test_a_refit_gives_the_new_weights_quantised_layer_by_layer(tmp_path, quantization):
    save_model(model(1), tmp_path)
    config = VllmConfig(
        device="cuda",
        dtype="bfloat16",
        quantization=quantization,
        compiled=False,
        gpu_memory_fraction=0.1,
        block_count=64,
        max_running_samples=16,
    )
    engine = VllmEngine(tmp_path, SIZES, config)
    await engine.start()
    try:
        prompt = list(range(40))
        answers = []
        for step, seed in enumerate((1, 2, 1)):
            tensors = to_hf(model(seed))
            seen: dict[str, np.ndarray] = {}
            report = await engine.update(PolicyVersion(1, step), tensors, lambda p, s=seen: s.update(p.parameters()))
            assert report.size_bytes > 0
            assert all(np.array_equal(seen[name], tensor.numpy()) for name, tensor in tensors.items())
            quantised, errors = await engine.quantised()
            layers = [f"model.layers.{layer}" for layer in range(SIZES.n_layers)]
            parts = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.experts")
            assert quantised.keys() == errors.keys() == {f"{layer}.{part}" for layer in layers for part in parts}
            print(quantization, {name: round(error, 4) for name, error in errors.items()}, set(quantised.values()))
            assert max(errors.values()) < QUANTIZATION_ERROR
            probe = torch.tensor(await engine.probe(prompt))
            expected = torch.log_softmax(model(seed)(torch.tensor([prompt]))[0], -1)
            expected = expected[:-1].gather(1, torch.tensor(prompt[1:])[:, None]).squeeze(1)
            print(quantization, "probe differs by", float((probe - expected).abs().max()))
            request = DecodeRequest(
                f"r{step}", prompt, f"s{step}", ("a",), Sampling(max_new_tokens=16, temperature=0.0)
            )
            async with asyncio.timeout(60):
                answers.append([token async for chunk in engine.decode(request) for token in chunk.token_ids])
        assert answers[0] == answers[2] != answers[1]
    finally:
        await engine.stop()
