"""`slipstream convert`: directories and GGUF files, in a process as a user starts it and by its parts."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

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


def write_gguf(
    file: Path, *, leave_out: str = "", changed: dict[str, Any] | None = None, **fields: object
) -> dict[str, torch.Tensor]:
    """A small model in 8 bits; returns the weights that a reader must find, by Hugging Face name.

    `changed` replaces fields of the header by their key; None leaves one out.
    """
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
    for key, value in (changed or {}).items():
        for fields_of_file in writer.kv_data:
            fields_of_file.pop(key, None)
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            kinds = {int: writer.add_int32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
            kinds[type(value)](key, value)
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


OF_MODEL = [
    ("block_count", 2_000_000_000),
    ("attention.head_count", 0),
    ("attention.head_count", [2, 2]),
    ("attention.head_count", "two"),
    ("attention.head_count_kv", 3),
    ("attention.head_count_kv", [1, 1]),
    ("attention.layer_norm_rms_epsilon", float("nan")),
    ("embedding_length", "64"),
    ("embedding_length", -64),
    ("rope.freq_base", float("inf")),
]
OF_TOKENIZER = [
    ("eos_token_id", -1),
    ("eos_token_id", 262),
    ("bos_token_id", -1),
    ("padding_token_id", 262),
    ("unknown_token_id", "<|unk|>"),
    ("tokens", None),
    ("tokens", ["a", "b"]),
    ("tokens", ["a"] * 262),
    ("tokens", [1] * 262),
    ("token_type", None),
    ("token_type", [3, 3]),
    ("token_type", [77] * 262),
    ("merges", None),
    ("merges", ["t"]),
    ("merges", ["t h e"]),
    ("merges", ["t q"]),
    ("merges", [" "]),
    ("merges", ["nowhere h"]),
    ("merges", [7]),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("key", "value"),
    [(f"llama.{key}", value) for key, value in OF_MODEL]
    + [(f"tokenizer.ggml.{key}", value) for key, value in OF_TOKENIZER],
)
def test_a_gguf_file_of_damaged_fields_is_refused(tmp_path, key, value):
    write_gguf(tmp_path / "small.gguf", changed={key: value})
    with pytest.raises(ConfigError, match=r"small\.gguf is damaged: "):
        open_source(str(tmp_path / "small.gguf"))


def test_a_gguf_file_without_an_embedding_is_refused(tmp_path):
    write_gguf(tmp_path / "small.gguf", leave_out="token_embd.weight")
    with pytest.raises(ConfigError, match=r"is damaged: it has no token_embd\.weight of two dimensions"):
        open_source(str(tmp_path / "small.gguf"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "damaged",
    [
        lambda whole: b"",
        lambda whole: whole[:4],
        lambda whole: whole[:200],
        lambda whole: whole[:-5000],
        lambda whole: whole[:4] + whole[4:8][::-1] + whole[8:],
        lambda whole: whole[:8] + b"\xff" * 7 + b"\x0f" + whole[16:],  # of tensors
        lambda whole: whole[:16] + b"\xff" * 7 + b"\x0f" + whole[24:],  # of fields
        # A list of numbers, told to be longer than any file: token_type
        lambda whole: whole.replace((262).to_bytes(8, "little") + b"\3\0\0\0", b"\xff" * 7 + b"\x0f\3\0\0\0"),
    ],
)
def test_a_gguf_file_of_a_damaged_header_is_refused(tmp_path, damaged):
    write_gguf(tmp_path / "small.gguf")
    whole = (tmp_path / "small.gguf").read_bytes()
    assert damaged(whole) != whole
    (tmp_path / "small.gguf").write_bytes(damaged(whole))
    with pytest.raises(ConfigError, match=r"small\.gguf is damaged: "):
        open_source(str(tmp_path / "small.gguf"))


@pytest.mark.timeout(300)
def test_a_gguf_file_with_one_flipped_bit_is_converted_or_refused(tmp_path):
    write_gguf(tmp_path / "small.gguf")
    whole = (tmp_path / "small.gguf").read_bytes()
    for at in [*range(0, 24), *range(24, 600, 23), *range(9000, 12000, 101)]:
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        (tmp_path / "flipped.gguf").write_bytes(flipped)
        with contextlib.suppress(ConfigError):
            source = open_source(str(tmp_path / "flipped.gguf"))
            for name in source.shapes:
                source.read(name)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"\xff", b"[" * 100_000, b"{"])
def test_a_damaged_config_json_is_refused(tmp_path, content):
    save_model(model(), tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json is damaged: "):
        open_source(str(tmp_path))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("rope_scaling", 5),
        ("rope_parameters", 5),
        ("model_type", ["a"]),
        ("max_position_embeddings", "x"),
        ("head_dim", [1]),
        ("num_attention_heads", "two"),
        ("num_attention_heads", 0),
        ("hidden_size", None),
    ],
)
def test_a_config_json_of_wrong_values_is_refused(tmp_path, key, value):
    save_model(model(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(ConfigError, match=str(tmp_path)):
        open_source(str(tmp_path))


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
