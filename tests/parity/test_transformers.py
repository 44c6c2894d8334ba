"""Every family against transformers' code, in float32: a line of `FAMILIES` a case, tiny and random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import DEEPSEEK, LINEAR, LLAMA3, MOE, TINY, YARN, ours, theirs, tokens
from safetensors.torch import load_file

from slipstream.models.checkpoint import load_model, save_model, to_hf
from slipstream.models.documents import Documents
from slipstream.models.registry import find_architecture, sizes_of

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
