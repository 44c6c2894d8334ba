"""The embedded engine's FP8 is the trainer's."""

from __future__ import annotations

import pytest
import torch

from slipstream.common.version import PolicyVersion
from slipstream.engine.embedded.config import EmbeddedConfig
from slipstream.engine.embedded.core import EngineCore
from slipstream.models.checkpoint import to_hf
from slipstream.models.fp8.config import Fp8Config
from slipstream.models.fp8.modules import convert
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.model import MoeModel, build_model, init_weights

SIZES = MoeConfig(vocab_size=32, dim=64, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=32, expert_dim=48)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@torch.no_grad()
def probe(model: MoeModel) -> list[float]:
    model.routes.begin()
    logps = torch.log_softmax(model.logits(model.hidden(torch.tensor([PROMPT])))[0, :-1], -1)
    return logps.gather(1, torch.tensor(PROMPT[1:]).unsqueeze(1)).squeeze(1).tolist()


def test_an_engine_in_fp8_says_after_each_update_what_a_trainer_in_fp8_says():
    core = EngineCore(SIZES, EmbeddedConfig(quantization="fp8_per_block", block_size_tokens=16))
    model = build_model(SIZES)
    convert(model, Fp8Config())
    for step in range(2):
        init_weights(model, step)
        weights = to_hf(model)
        core.update(PolicyVersion(1, step), weights, lambda engine: None)
        plain = build_model(SIZES)
        plain.load_state_dict(model.state_dict())
        assert all((core.parameters()[name] == tensor.numpy()).all() for name, tensor in weights.items())
        assert core.probe(PROMPT) == pytest.approx(probe(model), abs=1e-3)
        assert max(abs(a - b) for a, b in zip(core.probe(PROMPT), probe(plain), strict=True)) > 1e-2
