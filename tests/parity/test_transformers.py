"""Every family against transformers' code, in float32: a line of `FAMILIES` a case, tiny and random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from slipstream.models.checkpoint import load_model, save_model, to_hf
from slipstream.models.documents import Documents
from slipstream.models.registry import find_architecture, read_config, sizes_of

transformers.logging.set_verbosity_error()

TINY = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
MOE = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
DEEPSEEK = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}
FAMILIES = {
    "llama": ("llama", {}),
    "llama-smollm2": ("llama", {"tie_word_embeddings": True, "num_attention_heads": 4, "num_key_value_heads": 1}),
    "llama-3.1": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-biases": ("llama", {"attention_bias": True, "head_dim": 16}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-tied": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3-biases": ("qwen3", {"head_dim": 8, "attention_bias": True}),
    "qwen3_moe": ("qwen3_moe", {**MOE, "decoder_sparse_step": 1}),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "deepseek_v3-yarn": (
        "deepseek_v3",
        {**DEEPSEEK, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek_v3-mscales": (
        "deepseek_v3",
        {**DEEPSEEK, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}},
    ),
    "deepseek_v3-whole-query": (
        "deepseek_v3",
        {**DEEPSEEK, "q_lora_rank": None, "v_head_dim": 12, "norm_topk_prob": False},
    ),
}
"""Name of the case: model type, and what its `config.json` has beside `TINY`."""


def theirs(kind: str, changes: dict) -> Any:
    """transformers' model with random weights, norms and biases too."""
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(kind, **{**TINY, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.5 * torch.randn_like(buffer))
    return model.eval()


def ours(directory: Path):
    config = read_config(directory)
    model = load_model(sizes_of(config["model_type"], config), directory)
    model.routes.begin()
    return model


def tokens(length: int = 40) -> torch.Tensor:
    return torch.randint(TINY["vocab_size"], (1, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(("kind", "changes"), FAMILIES.values(), ids=FAMILIES.keys())
@torch.no_grad()
def test_a_familys_logits_and_files_are_those_of_transformers(tmp_path, kind, changes):
    reference = theirs(kind, changes)
    reference.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    expected = reference(tokens()).logits
    model = ours(tmp_path / "theirs")
    assert (model.logits(model.hidden(tokens())) - expected).abs().max() < 1e-4

    save_model(model, tmp_path / "ours", shard_bytes=20_000)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    again, told = loaded
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert torch.equal(again(tokens()).logits, expected)
    assert tensors(tmp_path / "ours").keys() == tensors(tmp_path / "theirs").keys()
    assert all(
        torch.equal(each, tensors(tmp_path / "theirs")[name]) for name, each in tensors(tmp_path / "ours").items()
    )


@pytest.mark.parametrize(("kind", "changes"), FAMILIES.values(), ids=FAMILIES.keys())
@torch.no_grad()
def test_packed_documents_see_themselves_alone(tmp_path, kind, changes):
    theirs(kind, changes).save_pretrained(tmp_path)
    model = ours(tmp_path)
    row = tokens(30)
    documents = Documents.of_lengths([11, 19])
    packed = model.hidden(row, documents.positions_1T, documents)
    for start, end in ((0, 11), (11, 30)):
        model.routes.begin()
        assert (packed[:, start:end] - model.hidden(row[:, start:end])).abs().max() < 1e-4


@pytest.mark.parametrize(("kind", "changes"), FAMILIES.values(), ids=FAMILIES.keys())
def test_a_random_start_is_the_seeds_and_comes_back_from_disk(tmp_path, kind, changes):
    config = json.loads(transformers.AutoConfig.for_model(kind, **{**TINY, **changes}).to_json_string())
    sizes = sizes_of(kind, {"rms_norm_eps": 1e-6, **config})
    models = []
    for seed in (1, 1, 2):
        models.append(find_architecture(kind).build_model(sizes))
        find_architecture(kind).init_weights(models[-1], seed)
    first, same, other = (to_hf(model)["model.layers.0.self_attn.o_proj.weight"] for model in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    save_model(models[0], tmp_path)
    loaded = to_hf(load_model(sizes, tmp_path))
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in to_hf(models[0]).items())


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: each for file in directory.glob("*.safetensors") for name, each in load_file(file).items()}
