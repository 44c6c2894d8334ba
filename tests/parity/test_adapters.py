"""Adapters against peft's code, in float32: what is exported loads there, and computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from families import DEEPSEEK, MOE, ours, theirs, tokens, trained

from slipstream.models.checkpoint import load_model, save_model
from slipstream.models.lora.config import GROUPS
from slipstream.models.lora.peft import save_adapters
from slipstream.models.registry import load_sizes

# Where transformers stacks experts, peft 0.21 takes gate_proj for theirs alone, so not for DeepSeek's dense layers too.
# It then warns of a pattern that it has made itself and that it heeds.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft, of transformers
]
ALL = GROUPS
FAMILIES = {
    "llama": ("llama", {}, ALL),
    "qwen3": ("qwen3", {"head_dim": 16, "attention_bias": True}, ALL),
    "qwen3-some": ("qwen3", {"head_dim": 16}, ("q_proj", "down_proj")),
    "qwen3_moe": ("qwen3_moe", {**MOE, "decoder_sparse_step": 1}, ALL),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK, ("attention", "experts")),
}


def logits(model: Any) -> torch.Tensor:
    model.routes.begin()
    return model.logits(model.hidden(tokens()))


def peft_logits(base: Path, adapter: Path) -> torch.Tensor:
    reference = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(reference, adapter).eval()(tokens()).logits


@pytest.mark.parametrize(("kind", "changes", "targets"), FAMILIES.values(), ids=FAMILIES.keys())
@torch.no_grad()
def test_an_exported_adapter_gives_pefts_logits_and_those_of_the_merged_model(tmp_path, kind, changes, targets):
    theirs(kind, changes).save_pretrained(tmp_path / "base")
    model = ours(tmp_path / "base")
    plain = logits(model)
    adapters = trained(model, targets)
    changed = logits(model)
    assert (changed - plain).abs().max() > 0.01

    save_adapters(adapters, adapters.tensors(), str(tmp_path / "base"), tmp_path / "adapter")
    assert (peft_logits(tmp_path / "base", tmp_path / "adapter") - changed).abs().max() < 1e-4

    save_model(model, tmp_path / "merged")
    merged = load_model(load_sizes(tmp_path / "merged"), tmp_path / "merged")
    assert (logits(merged) - changed).abs().max() < 1e-4
