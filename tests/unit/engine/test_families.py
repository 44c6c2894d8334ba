"""Every family in the embedded engine: it decodes as its plain forward pass does, and has rows for its experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.engine.embedded.core import EngineCore
from slipstream.engine.embedded.outputs import Chunks, Recorded
from slipstream.models.base import Sizes
from slipstream.models.checkpoint import to_hf
from slipstream.models.deepseek_v3.config import DeepseekV3Config
from slipstream.models.llama.config import LlamaConfig
from slipstream.models.qwen3.config import Qwen3Config
from slipstream.models.registry import find_architecture
from tests.unit.engine.helpers import CONFIG, PROMPT, V1, V2, decode_request, greedy, tensors

COMMON: dict[str, Any] = {"vocab_size": 23, "dim": 32, "n_layers": 2, "n_heads": 4, "ffn_dim": 48}
COMMON |= {"rope_theta": 100.0, "max_context_tokens": 64, "norm_eps": 1e-6}
DENSE: dict[str, Any] = {**COMMON, "n_kv_heads": 2, "head_dim": 8, "tied_embeddings": True}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_dense_layers": 1,
}
EXPERTS: dict[str, Any] = {
    "expert_dim": 16,
    "n_experts": 8,
    "n_shared_experts": 1,
    "top_k": 3,
    "n_groups": 4,
    "top_k_groups": 2,
}
FAMILIES = [LlamaConfig(**DENSE), Qwen3Config(**DENSE), DeepseekV3Config(**COMMON, **LATENT, **EXPERTS)]


def model(sizes: Sizes, seed: int):
    built = find_architecture(sizes.architecture).build_model(sizes)
    find_architecture(sizes.architecture).init_weights(built, seed)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if name.endswith("expert_bias_E"):
                parameter.uniform_(-0.3, 0.3, generator=torch.Generator().manual_seed(seed))
    return built.requires_grad_(False)


@pytest.mark.parametrize("sizes", FAMILIES, ids=lambda sizes: sizes.architecture)
def test_a_family_decodes_as_its_plain_forward_pass_does(sizes):
    core = EngineCore(sizes, CONFIG)
    core.update(V1, tensors(model(sizes, 1)), lambda paused: None)
    core.add_decode(decode_request("d", samples=2, temperature=0.0), 1.0)
    outputs = []
    while core.busy:
        core.step()
        outputs += core.take_outputs()
    tokens: dict[int, list[int]] = {}
    for chunk in (chunk for output in outputs if isinstance(output, Chunks) for chunk in output.chunks):
        tokens[chunk.sample_index] = [*tokens.get(chunk.sample_index, []), *chunk.token_ids]
    assert list(tokens.values()) == [greedy(model(sizes, 1), PROMPT, 8)] * 2
    rows = [output.routes.rows for output in outputs if isinstance(output, Recorded)]
    assert bool(rows) == (sizes.moe_layers > 0)
    assert all(each.shape[1:] == (sizes.moe_layers, sizes.top_k) for each in rows)


@pytest.mark.parametrize("sizes", FAMILIES, ids=lambda sizes: sizes.architecture)
def test_a_refused_update_puts_all_of_a_familys_weights_back(sizes):
    core = EngineCore(sizes, CONFIG)
    old = tensors(model(sizes, 1))
    core.update(V1, old, lambda paused: None)

    def refuse(paused: object) -> None:
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        core.update(V2, tensors(model(sizes, 2)), refuse)
    now = to_hf(core.model)
    assert all(torch.equal(now[name], tensor) for name, tensor in old.items())
