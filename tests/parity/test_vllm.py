"""What is exported loads in vLLM, and has the same log-probabilities there, in float32: tiny and random models.

Where the table leaves something out, vLLM 0.30.0 computes it otherwise than transformers and we do:

* DeepSeek-V3 without yarn: its rotary kernel on the CPU takes keys for contiguous that are not. On the CPU it takes
  latent heads of 512 + 64 alone, too.
* Qwen3 with `attention_bias`: it leaves out the bias of attention's output, without a word.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.models.base import Model
from slipstream.models.checkpoint import save_model
from slipstream.models.deepseek_v3.config import DeepseekV3Config
from slipstream.models.llama.config import LlamaConfig
from slipstream.models.qwen3.config import Qwen3Config
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.registry import find_architecture
from slipstream.models.rope_config import RopeScaling

SHARD_BYTES = 300_000
START_TIMEOUT_S = 500.0
"""For all models, one after the other, on a busy machine."""
ANY: dict[str, Any] = {"vocab_size": 96, "dim": 64, "n_layers": 2, "n_heads": 4, "max_context_tokens": 256}
COMMON: dict[str, Any] = {**ANY, "ffn_dim": 96, "rope_theta": 1e4, "norm_eps": 1e-6}
DENSE: dict[str, Any] = {**COMMON, "n_kv_heads": 2, "head_dim": 32}
EXPERTS: dict[str, Any] = {"expert_dim": 32, "n_experts": 8, "n_shared_experts": 1, "top_k": 2}
EXPERTS |= {"n_groups": 2, "top_k_groups": 1, "n_dense_layers": 1}
HEADS: dict[str, Any] = {"kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 48}
YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0)
LATENT: dict[str, Any] = {**COMMON, **EXPERTS, **HEADS, "rope_scaling": YARN}
LLAMA3 = RopeScaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=64)
FAMILIES: dict[str, Any] = {
    "deepseek_v3": DeepseekV3Config(**LATENT, q_lora_rank=48),
    "deepseek_v3-whole-query": DeepseekV3Config(**LATENT),
    "qwen3_moe": MoeConfig(**ANY, n_kv_heads=2, head_dim=32, n_experts=8),
    "llama": LlamaConfig(**DENSE),
    "llama-smollm2": LlamaConfig(**DENSE, tied_embeddings=True),
    "llama-3.1": LlamaConfig(**DENSE, rope_scaling=LLAMA3),
    "llama-biases": LlamaConfig(**DENSE, attention_bias=True),
    "qwen3": Qwen3Config(**DENSE),
    "qwen3-tied": Qwen3Config(**DENSE, tied_embeddings=True),
}
"""Those with experts first: see `vllm_logprobs.py`."""

TOKENS = torch.randint(2, 96, (100,), generator=torch.Generator().manual_seed(5))


def random_model(sizes: Any) -> Model:
    architecture = find_architecture(sizes.architecture)
    model = architecture.build_model(sizes)
    architecture.init_weights(model, 3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "expert_bias_E")):
                parameter.uniform_(-0.3, 0.3, generator=generator)
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {name: random_model(sizes) for name, sizes in FAMILIES.items()}


@pytest.fixture(scope="module")
def of_vllm(models: dict[str, Model], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """vLLM's log-probabilities of `TOKENS`, by family."""
    root = tmp_path_factory.mktemp("exports")
    for name, model in models.items():
        save_model(model, root / name, shard_bytes=SHARD_BYTES)
    command = [sys.executable, "-m", "tests.parity.vllm_logprobs", json.dumps(TOKENS.tolist())]
    ended = subprocess.run(
        [*command, *(str(root / name) for name in models)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == len(models), ended.stderr[-3000:]
    return dict(zip(models, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_an_export_loads_in_vllm_with_the_same_log_probabilities(name, models, of_vllm):
    model = models[name]
    model.routes.begin()
    logps_TV = torch.log_softmax(model.logits(model.hidden(TOKENS[None]))[0], -1)
    expected = logps_TV[:-1].gather(1, TOKENS[1:, None]).squeeze(1)
    assert (torch.tensor(of_vllm[name]) - expected).abs().max() < 1e-4
