"""Files of weights: one at a time, whole, and with every name that does not fit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.common.config import ConfigError
from slipstream.models.checkpoint import load_hf, load_model, save_model, to_hf
from slipstream.models.llama import build_model, init_weights
from slipstream.models.llama.config import LlamaConfig
from slipstream.models.registry import load_sizes
from slipstream.models.shards import INDEX_FILE, WEIGHTS_FILE

SIZES = LlamaConfig(
    vocab_size=50,
    dim=16,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    head_dim=8,
    ffn_dim=24,
    rope_theta=100.0,
    max_context_tokens=32,
    norm_eps=1e-5,
    tied_embeddings=True,
)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def model(seed: int = 0, sizes: LlamaConfig = SIZES):
    built = build_model(sizes)
    init_weights(built, seed)
    return built


def change(directory: Path, **changes: torch.Tensor | None) -> None:
    """Put tensors into the one file of a directory, or take those out that are None."""
    tensors = {name: tensor.clone() for name, tensor in load_file(directory / WEIGHTS_FILE).items()}
    tensors |= {name: tensor for name, tensor in changes.items() if tensor is not None}
    save_file({name: t for name, t in tensors.items() if changes.get(name, t) is not None}, directory / WEIGHTS_FILE)


def test_shards_hold_what_was_asked_and_come_back_bit_equal(tmp_path):
    built = model()
    save_model(built, tmp_path, shard_bytes=4000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    assert all(len(load_file(file)) == 1 or file.stat().st_size < 4000 + 2000 for file in files)
    loaded = to_hf(load_model(load_sizes(tmp_path), tmp_path))
    assert HEAD not in loaded
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in to_hf(built).items())


def test_a_directory_holds_the_weights_that_were_written_last(tmp_path):
    save_model(model(0), tmp_path, shard_bytes=4000)
    save_model(model(1), tmp_path)
    assert not (tmp_path / INDEX_FILE).exists()
    assert torch.equal(to_hf(load_model(SIZES, tmp_path))[EMBEDDING], to_hf(model(1))[EMBEDDING])
    save_model(model(2), tmp_path, shard_bytes=4000)
    assert not (tmp_path / WEIGHTS_FILE).exists()
    assert torch.equal(to_hf(load_model(SIZES, tmp_path))[EMBEDDING], to_hf(model(2))[EMBEDDING])


def test_missing_and_unexpected_tensors_are_all_named(tmp_path):
    save_model(model(), tmp_path)
    gone = {f"model.layers.{layer}.mlp.{part}_proj.weight": None for layer in (0, 1) for part in ("up", "down")}
    change(tmp_path, **gone, **{"model.layers.2.mlp.bias": torch.zeros(3), "vision.weight": torch.zeros(2, 2)})
    with pytest.raises(ConfigError) as refused:
        load_model(SIZES, tmp_path)
    missing, unexpected = str(refused.value).split("; unexpected ")
    assert all(name in missing for name in gone)
    assert unexpected == "model.layers.2.mlp.bias, vision.weight"


def test_a_tensor_of_another_shape_is_named_and_nothing_is_loaded(tmp_path):
    built = model()
    before = to_hf(built)[EMBEDDING].clone()
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(3,\), expected \(16,\)"):
        load_hf(built, {**to_hf(model(1)), "model.norm.weight": torch.zeros(3)})
    assert torch.equal(to_hf(built)[EMBEDDING], before)


def test_a_config_of_more_layers_than_there_are_is_refused_before_any_is_built(tmp_path):
    save_model(model(), tmp_path)
    with pytest.raises(ConfigError, match=r"it is to have 1000000 layers, and has tensors of 2$"):
        load_model(SIZES.model_copy(update={"n_layers": 10**6}), tmp_path)


def test_a_tied_head_may_be_written_out_but_not_differ(tmp_path):
    save_model(model(), tmp_path)
    embedding = load_file(tmp_path / WEIGHTS_FILE)[EMBEDDING].clone()
    change(tmp_path, **{HEAD: embedding})
    assert torch.equal(to_hf(load_model(SIZES, tmp_path))[EMBEDDING], embedding)
    change(tmp_path, **{HEAD: embedding + 1})
    with pytest.raises(ConfigError, match=r"lm_head.weight is not model.embed_tokens.weight"):
        load_model(SIZES, tmp_path)


def test_what_is_no_file_of_weights_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"has no model.safetensors"):
        load_model(SIZES, tmp_path)
    (tmp_path / WEIGHTS_FILE).write_bytes(b"no header")
    with pytest.raises(ConfigError, match=r"model.safetensors cannot be read"):
        load_model(SIZES, tmp_path)
    (tmp_path / INDEX_FILE).write_text('{"weight_map": 3}')
    with pytest.raises(ConfigError, match="is no index"):
        load_model(SIZES, tmp_path)
    (tmp_path / INDEX_FILE).write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(ConfigError, match=r"has no gone.safetensors"):
        load_model(SIZES, tmp_path)


@pytest.mark.parametrize("name", [5, None, "", ".", "..", "a\0b", ["a"], "n" * 300])
def test_an_index_of_names_that_no_file_has_is_refused(tmp_path, name):
    save_model(model(), tmp_path)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_model(SIZES, tmp_path)


def test_a_directory_in_the_place_of_a_file_is_refused(tmp_path):
    (tmp_path / WEIGHTS_FILE).mkdir()
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        load_model(SIZES, tmp_path)
    (tmp_path / INDEX_FILE).mkdir()
    with pytest.raises(ConfigError, match="is no index"):
        load_model(SIZES, tmp_path)


def test_quantised_tensors_are_refused_by_name(tmp_path):
    save_model(model(), tmp_path)
    change(tmp_path, **{"model.norm.weight": torch.zeros(16, dtype=torch.int8)})
    with pytest.raises(ConfigError, match=r"model.norm.weight of .* is I8, not one of F32"):
        load_model(SIZES, tmp_path)


PEAK = """
import sys
from pathlib import Path
from slipstream.models.checkpoint import load_model
from slipstream.models.registry import load_sizes

def figure(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))

small, large = map(Path, sys.argv[1:])
load_model(load_sizes(small), small)  # whatever code comes with a first load
before = figure("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
load_model(load_sizes(large), large)
print(figure("VmHWM") - before)
"""


def test_loading_takes_no_more_memory_than_the_model_and_one_file(tmp_path):
    sizes = SIZES.model_copy(update={"vocab_size": 8192, "dim": 256, "ffn_dim": 4096, "n_layers": 6})
    built = model(0, sizes)
    model_bytes = sum(4 * parameter.numel() for parameter in built.parameters())
    small, large = tmp_path / "small", tmp_path / "large"
    save_model(model(), small)
    save_model(built, large, shard_bytes=8 << 20)
    shard_bytes = max(file.stat().st_size for file in large.glob("*.safetensors"))
    done = subprocess.run(
        [sys.executable, "-c", PEAK, small, large], capture_output=True, text=True, timeout=60, check=True
    )
    assert model_bytes > 8 * shard_bytes
    objects_bytes = 1 << 20  # names, shapes and views
    assert model_bytes < int(done.stdout) < model_bytes + shard_bytes + objects_bytes
