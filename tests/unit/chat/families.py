"""Model families with made tokenizers: their special tokens, and bytes with a few pairs."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from slipstream.environments.config_renderer import FamilyConfig
from slipstream.environments.families import FamilyRenderer
from slipstream.environments.tokenizer import TextCodec

CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>")
CALLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
FAMILIES: dict[str, tuple[str, ...]] = {
    "qwen3": (*CHATML, *CALLS),
    "qwen3.5": (*CHATML, *CALLS, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    "glm-4.5": (
        *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        *("<think>", "</think>", *CALLS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"),
    ),
    "deepseek-v3": (
        *("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        *("<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
        *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    ),
    "kimi-k2": (
        *("<|im_end|>", "[BOS]", "[EOS]", "[EOT]", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
        "<|tool_call_argument_begin|>",
    ),
    "minimax-m2": ("[e~[", "]~!b[", "]~b]", "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
    "llama-3": (
        *("<|eot_id|>", "<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|python_tag|>"),
        *("<|start_header_id|>", "<|end_header_id|>"),
    ),
}
"""Their special tokens; the first ends a turn."""


def tokenizer_of(family: str) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("Ċ", "Ċ"), ("e", "r"), ("l", "o"), ("lo", "o"), ("loo", "k"), ("1", "2")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in FAMILIES[family]])
    return tokenizer


def renderer_of(family: str, **options: Any) -> FamilyRenderer:
    tokenizer = tokenizer_of(family)
    codec = TextCodec(tokenizer, tokenizer.token_to_id(FAMILIES[family][0]))
    return FamilyRenderer(codec, tokenizer, FamilyConfig(family=family, options=options))


def in_bytes(renderer: FamilyRenderer, text: str) -> list[int]:
    """Tokens of a text as its tokenizer would never encode it: a token a byte, special tokens apart."""
    tokenizer = renderer._family._tokenizer
    whole = [tokenizer.convert_ids_to_tokens(token_id) for token_id in renderer.codec.encode(text)]
    special = set(renderer._special)
    return [
        tokenizer.convert_tokens_to_ids(part) for token in whole for part in ([token] if token in special else token)
    ]
