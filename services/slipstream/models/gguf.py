"""A model of the Llama family in a GGUF file, shown as Hugging Face's tensors, sizes and tokenizer.

llama.cpp stores query and key with the pairs of the rotary embedding side by side; Hugging Face's layout has them in
two halves, so their rows are put back. Quantised weights are dequantised: what comes out is float32, and no better
than what the file holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from slipstream.common.config import ConfigError
from slipstream.models.llama.config import LlamaConfig
from slipstream.models.shards import check_layers

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
_TOKEN_TYPES = range(7)
_T = TypeVar("_T")
_SPLITS = {"smollm": True}
"""By llama.cpp's name of a pre-tokenizer (`tokenizer.ggml.pre`): whether digits stand alone."""


class GgufModel:
    """One file; tensors are dequantised as they are read."""

    def __init__(self, file: Path) -> None:
        """Raises `ConfigError` for what is damaged or not built."""
        self.file = file
        with _damage_told(file):
            self._reader = _Reader(file)
            if self._reader.byte_order != "I":
                raise ValueError("its bytes are in the other order than this machine's")
            architecture = self._field("general.architecture")
            if architecture != "llama":
                raise ConfigError(f"{file}: general.architecture is {architecture!r}, not 'llama'")
            self._tensors = {_hf_name(tensor.name): tensor for tensor in self._reader.tensors}
            self.shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}
            self.sizes = self._sizes()
            check_layers(self.sizes.n_layers, self.shapes)

    def read(self, name: str) -> Tensor:
        """One tensor in float32, in Hugging Face's layout."""
        stored = self._tensors[name]
        try:
            values = np.array(dequantize(stored.data, stored.tensor_type), dtype=np.float32)  # own, writable memory
        except NotImplementedError:
            raise ConfigError(f"{self.file}: {stored.name} is {stored.tensor_type.name}, which is not built") from None
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
        with _damage_told(self.file):
            return self._byte_pair_files(digits_alone=_SPLITS[split])

    def _byte_pair_files(self, *, digits_alone: bool) -> dict[str, bytes]:
        tokens, kinds = self._list("tokens", str), self._list("token_type", int)
        if not len(tokens) == len(set(tokens)) == len(kinds) == self.sizes.vocab_size:
            raise ValueError(
                f"{len(tokens)} tokens, {len(set(tokens))} of them different, and {len(kinds)} types of tokens; "
                f"token_embd.weight has {self.sizes.vocab_size}"
            )
        if not all(kind in _TOKEN_TYPES for kind in kinds):
            raise ValueError("tokenizer.ggml.token_type has a type that is not known")
        merges = _merges(self._list("merges", str), set(tokens))
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
            "tokenizer.json": _byte_pairs(tokens, merges, special, digits_alone=digits_alone).encode(),
            "tokenizer_config.json": json.dumps(config, indent=2).encode() + b"\n",
        }

    def _sizes(self) -> LlamaConfig:
        heads, dim = self._whole("attention.head_count"), self._whole("embedding_length")
        scaling = self._field("llama.rope.scaling.type")
        if scaling not in (None, "none") or "rope_freqs.weight" in {tensor.name for tensor in self._reader.tensors}:
            raise ConfigError(f"{self.file}: llama.rope.scaling.type is {scaling!r}, and no scaling is built for GGUF")
        embedding = self.shapes.get("model.embed_tokens.weight", ())
        if len(embedding) != 2:
            raise ValueError("it has no token_embd.weight of two dimensions")
        eos = self._field("tokenizer.ggml.eos_token_id")
        return LlamaConfig(
            vocab_size=embedding[0],
            dim=dim,
            n_layers=self._whole("block_count"),
            n_heads=heads,
            n_kv_heads=self._whole("attention.head_count_kv", heads),
            head_dim=self._whole("attention.key_length", dim // heads),
            ffn_dim=self._whole("feed_forward_length"),
            rope_theta=self._number("rope.freq_base", 10000.0),
            max_context_tokens=self._whole("context_length"),
            # Stored in float32: 1e-5 comes as 9.99999974e-06.
            norm_eps=float(np.format_float_positional(np.float32(self._number("attention.layer_norm_rms_epsilon")))),
            tied_embeddings="lm_head.weight" not in self._tensors,
            eos_token_id=None if eos is None else _token_id("eos", eos, embedding[0]),
        )

    def _field(self, name: str) -> Any:
        found = self._reader.fields.get(name)
        return None if found is None else found.contents()

    def _number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        found = self._field(f"llama.{name}")
        found = default if found is None else found
        if found is None:
            raise ConfigError(f"{self.file} has no llama.{name}")
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
            raise ValueError(f"llama.{name} is {str(found)[:40]!r}, not a finite number above 0")
        return found

    def _whole(self, name: str, default: int | None = None) -> int:
        found = self._number(name, default)
        if not isinstance(found, int):
            raise ValueError(f"llama.{name} is {found}, not a whole number")
        return found

    def _list(self, name: str, of: type[_T]) -> list[_T]:
        found = self._field(f"tokenizer.ggml.{name}")
        if not isinstance(found, list) or not all(isinstance(each, of) for each in found):
            raise ValueError(f"tokenizer.ggml.{name} is no list of {of.__name__}")
        return found

    def _token(self, role: str, tokens: list[str]) -> str | None:
        number = self._field(f"tokenizer.ggml.{role}_token_id")
        return None if number is None else tokens[_token_id(role, number, len(tokens))]


class _Reader(GGUFReader):
    """The package's, which takes what lies behind the end for empty: a long list there would never be read through."""

    def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise ValueError("it ends before what its header tells")
        return super()._get(offset, dtype, count, override_order)


@contextmanager
def _damage_told(file: Path) -> Iterator[None]:
    """Whatever goes wrong inside is the file's fault, but for what is `ConfigError` already or a missing package."""
    try:
        yield
    except (ConfigError, ImportError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of Rust, in tokenizers
            raise
        said = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{file} is damaged: {said}") from None


def _token_id(role: str, number: Any, count: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
        raise ValueError(f"tokenizer.ggml.{role}_token_id is {str(number)[:40]!r}, not one of {count} tokens")
    return number


def _merges(lines: list[str], tokens: set[str]) -> list[tuple[str, str]]:
    """Pairs, checked to be of two tokens that make a third, as tokenizers panics for some that are not."""
    merges: list[tuple[str, str]] = []
    for line in lines:
        first, _, second = line.partition(" ")
        if not {first, second, first + second} <= tokens:
            raise ValueError(f"tokenizer.ggml.merges has {line[:40]!r}, which is not of two tokens that make a third")
        merges.append((first, second))
    return merges


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


def _byte_pairs(tokens: list[str], merges: list[tuple[str, str]], special: list[str], *, digits_alone: bool) -> str:
    """A byte-level BPE as `tokenizer.json`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if digits_alone else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer.to_str()
