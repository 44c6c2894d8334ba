"""`slipstream convert`: directories and GGUF files, in a process as a user starts it and by its parts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from tokenizers import Tokenizer

from slipstream.common.config import ConfigError
from slipstream.launcher.cli import main as slipstream
from slipstream.models.checkpoint import load_model, save_model, to_hf
from slipstream.models.convert import convert, main, open_source
from slipstream.models.llama import build_model, init_weights
from slipstream.models.llama.config import LlamaConfig
from slipstream.models.registry import read_config, sizes_of

SIZES = LlamaConfig(
    vocab_size=262,
    dim=64,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    head_dim=32,
    ffn_dim=96,
    rope_theta=100.0,
    max_context_tokens=64,
    norm_eps=1e-5,
    tied_embeddings=True,
    eos_token_id=1,
)
NAMES = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
NAMES |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
NAMES |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def model():
    built = build_model(SIZES)
    init_weights(built, 0)
    return built


def side_by_side(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a head's rows, as its own conversion writes it."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(file: Path, *, leave_out: str = "", **fields: object) -> dict[str, torch.Tensor]:
    """A small model in 8 bits; returns the weights that a reader must find, by Hugging Face name."""
    writer = gguf.GGUFWriter(file, str(fields.get("architecture", "llama")))
    writer.add_block_count(SIZES.n_layers)
    writer.add_context_length(SIZES.max_context_tokens)
    writer.add_embedding_length(SIZES.dim)
    writer.add_feed_forward_length(SIZES.ffn_dim)
    writer.add_head_count(SIZES.n_heads)
    writer.add_head_count_kv(SIZES.n_kv_heads)
    writer.add_rope_freq_base(SIZES.rope_theta)
    writer.add_layer_norm_rms_eps(SIZES.norm_eps)
    if "scaling" in fields:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    letters = [chr(ord("!") + n) for n in range(94)] + [chr(0x100 + n) for n in range(162)]  # stand for bytes
    tokens = ["<|pad|>", "<|end|>", *letters, "th", "the", "Ġa", "12"][: SIZES.vocab_size]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(str(fields.get("pre", "smollm")))
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["t h", "th e", "Ġ a", "1 2"])
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    expected = {}
    for name, tensor in to_hf(model()).items():
        _, _, layer, *rest = [*name.split("."), ""] if name.startswith("model.layers") else ["", "", "", name]
        known = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
        stored = known.get(name) or f"blk.{layer}.{NAMES[rest[-3]]}.weight"
        values = tensor.numpy()
        quantised = gguf.GGMLQuantizationType.Q8_0
        if stored == leave_out:
            continue
        if values.ndim == 1:
            writer.add_tensor(stored, values)
            expected[name] = tensor
            continue
        # Blocks of 8 bits lie along a row, so the order of rows does not change their values.
        expected[name] = torch.from_numpy(dequantize(quantize(values, quantised), quantised))
        if "q_proj" in name or "k_proj" in name:
            values = side_by_side(values, SIZES.n_heads if "q_proj" in name else SIZES.n_kv_heads)
        writer.add_tensor(stored, quantize(values, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def refused(*arguments: object) -> bool:
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    return ended.value.code == 2


def test_a_gguf_file_becomes_a_model_directory(tmp_path):
    expected = write_gguf(tmp_path / "small.gguf")
    convert(open_source(str(tmp_path / "small.gguf")), tmp_path / "out", None)
    config = read_config(tmp_path / "out")
    assert sizes_of("llama", config) == SIZES
    loaded = to_hf(load_model(SIZES, tmp_path / "out"))
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    encoded = tokenizer.encode("the a12<|end|>")
    assert encoded.tokens == ["the", "Ġa", "1", "2", "<|end|>"]  # digits stand alone before anything is merged
    assert tokenizer.decode(encoded.ids, skip_special_tokens=True) == "the a12"
    described = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (described["eos_token"], described["chat_template"]) == ("<|end|>", TEMPLATE)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"architecture": "falcon"}, "general.architecture is 'falcon'"),
        ({"scaling": True}, "llama.rope.scaling.type is 'yarn'"),
        ({"pre": "qwen2"}, "tokenizer.ggml.pre is 'qwen2'"),
        ({"leave_out": "blk.1.ffn_up.weight"}, r"missing model.layers.1.mlp.up_proj.weight; unexpected none"),
    ],
)
def test_what_a_gguf_file_has_that_is_not_built_is_named(tmp_path, fields, said):
    write_gguf(tmp_path / "small.gguf", **fields)
    with pytest.raises(ConfigError, match=said):
        open_source(str(tmp_path / "small.gguf"))


def test_a_directory_is_converted_there_and_back_bit_equal(tmp_path, capfd):
    save_model(model(), tmp_path / "first")
    (tmp_path / "first" / "tokenizer.json").write_text("{}")
    convert(open_source(str(tmp_path / "first")), tmp_path / "half", torch.bfloat16)
    with pytest.raises(SystemExit, match="0"):  # as a user starts it
        slipstream(
            ["convert", *map(str, (tmp_path / "half", tmp_path / "wide")), "--dtype", "float32", "--shard-mib=1"]
        )
    assert "LlamaForCausalLM, 78,528 parameters in 20 tensors" in capfd.readouterr().out
    convert(open_source(str(tmp_path / "wide")), tmp_path / "again", torch.bfloat16, shard_bytes=20_000)
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 5
    half, again = (tensors(tmp_path / name) for name in ("half", "again"))
    assert half.keys() == again.keys() == to_hf(model()).keys()
    assert all(tensor.dtype == torch.bfloat16 and torch.equal(tensor, again[name]) for name, tensor in half.items())
    assert read_config(tmp_path / "again")["torch_dtype"] == "bfloat16"
    assert (tmp_path / "again" / "tokenizer.json").read_text() == "{}"


def test_a_package_that_holds_one_gguf_file_is_found_and_not_imported(tmp_path, monkeypatch):
    package = tmp_path / "small_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="'small-model' holds 0 GGUF files"):
        open_source("small-model")
    write_gguf(package / "small.gguf")
    assert open_source("small-model").config["hidden_size"] == SIZES.dim
    assert "small_model" not in sys.modules


def test_what_cannot_be_converted_is_said_in_one_line(tmp_path, capsys):
    assert refused(tmp_path / "nothing", tmp_path / "out")
    assert "nothing' is no directory, no file and no installed package" in capsys.readouterr().err
    save_model(model(), tmp_path / "there")
    assert refused(tmp_path / "there", tmp_path / "there")
    assert "exists already and is not an empty directory" in capsys.readouterr().err
    assert refused(tmp_path / "there", tmp_path / "out", "--shard-mib", "0")
    assert "--shard-mib 0: must be 1 or more" in capsys.readouterr().err
    (tmp_path / "there" / "config.json").write_text('{"model_type": "bert"}')
    assert refused(tmp_path / "there", tmp_path / "out")
    assert "model_type is 'bert', and built in are deepseek_v3, llama" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: each for file in directory.glob("*.safetensors") for name, each in load_file(file).items()}
