"""A model of the Llama family in a GGUF file, shown as Hugging Face's tensors, sizes and tokenizer.

llama.cpp stores query and key with the pairs of the rotary embedding side by side; Hugging Face's layout has them in
two halves, so their rows are put back. Quantised weights are dequantised: what comes out is float32, and no better
than what the file holds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from slipstream.common.config import ConfigError
from slipstream.models.llama.config import LlamaConfig

_OF_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_CONTROL_TOKEN = 3
_SPLITS = {"smollm": True}
"""By llama.cpp's name of a pre-tokenizer (`tokenizer.ggml.pre`): whether digits stand alone."""


class GgufModel:
    """One file; tensors are dequantised as they are read."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            self._reader = GGUFReader(file)
        except (ValueError, OSError) as error:
            raise ConfigError(f"{file} cannot be read as GGUF: {error}") from None
        if self._field("general.architecture") != "llama":
            raise ConfigError(f"{file}: general.architecture is {self._field('general.architecture')!r}, not 'llama'")
        self._tensors = {_hf_name(tensor.name): tensor for tensor in self._reader.tensors}
        self.sizes = self._sizes()
        self.shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """One tensor in float32, in Hugging Face's layout."""
        stored = self._tensors[name]
        values = np.array(dequantize(stored.data, stored.tensor_type), dtype=np.float32)  # own, writable memory
        if name.endswith("self_attn.q_proj.weight"):
            values = _halves(values, self.sizes.n_heads)
        elif name.endswith("self_attn.k_proj.weight"):
            values = _halves(values, self.sizes.n_kv_heads)
        return torch.from_numpy(np.ascontiguousarray(values))

    def tokenizer_files(self) -> dict[str, bytes]:
        """`tokenizer.json` and `tokenizer_config.json`; raises `ConfigError` for a tokenizer that is not known."""
        kind, split = self._field("tokenizer.ggml.model"), self._field("tokenizer.ggml.pre")
        if kind != "gpt2" or split not in _SPLITS:
            raise ConfigError(
                f"{self.file}: tokenizer.ggml.pre is {split!r} of {kind!r}, and only 'smollm' of 'gpt2' is built"
            )
        tokens: list[str] = self._field("tokenizer.ggml.tokens")
        kinds: list[int] = self._field("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ")) for merge in self._field("tokenizer.ggml.merges")]
        special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self.sizes.max_context_tokens,
            "clean_up_tokenization_spaces": False,
            "bos_token": self._token("bos", tokens),
            "eos_token": self._token("eos", tokens),
            "unk_token": self._token("unknown", tokens),
            "pad_token": self._token("padding", tokens),
            "chat_template": self._field("tokenizer.chat_template"),
        }
        config = {key: value for key, value in config.items() if value is not None}
        return {
            "tokenizer.json": _byte_pairs(tokens, merges, special, digits_alone=_SPLITS[split]).encode(),
            "tokenizer_config.json": json.dumps(config, indent=2).encode() + b"\n",
        }

    def _sizes(self) -> LlamaConfig:
        heads, dim = self._number("attention.head_count"), self._number("embedding_length")
        scaling = self._field("llama.rope.scaling.type")
        if scaling not in (None, "none") or "rope_freqs.weight" in {tensor.name for tensor in self._reader.tensors}:
            raise ConfigError(f"{self.file}: llama.rope.scaling.type is {scaling!r}, and no scaling is built for GGUF")
        return LlamaConfig(
            vocab_size=int(self._tensors["model.embed_tokens.weight"].shape[1]),
            dim=dim,
            n_layers=self._number("block_count"),
            n_heads=heads,
            n_kv_heads=self._field("llama.attention.head_count_kv") or heads,
            head_dim=self._field("llama.attention.key_length") or dim // heads,
            ffn_dim=self._number("feed_forward_length"),
            rope_theta=self._field("llama.rope.freq_base") or 10000.0,
            max_context_tokens=self._number("context_length"),
            # Stored in float32: 1e-5 comes as 9.99999974e-06.
            norm_eps=float(np.format_float_positional(np.float32(self._number("attention.layer_norm_rms_epsilon")))),
            tied_embeddings="lm_head.weight" not in self._tensors,
            eos_token_id=self._field("tokenizer.ggml.eos_token_id"),
        )

    def _field(self, name: str) -> Any:
        found = self._reader.fields.get(name)
        return None if found is None else found.contents()

    def _number(self, name: str) -> Any:
        found = self._field(f"llama.{name}")
        if found is None:
            raise ConfigError(f"{self.file} has no llama.{name}")
        return found

    def _token(self, role: str, tokens: list[str]) -> str | None:
        number = self._field(f"tokenizer.ggml.{role}_token_id")
        return None if number is None else tokens[number]


def _hf_name(name: str) -> str:
    if name in _OF_MODEL:
        return _OF_MODEL[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _OF_LAYER:
        return f"model.layers.{parts[1]}.{_OF_LAYER[parts[2]]}.{parts[3]}"
    return name  # it will be told as unexpected


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from pairs side by side into two halves."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _byte_pairs(tokens: list[str], merges: list[tuple[str, ...]], special: list[str], *, digits_alone: bool) -> str:
    """A byte-level BPE as `tokenizer.json`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(first, second) for first, second in merges]))
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if digits_alone else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer.to_str()
