"""A made model directory: ChatML with tools, a byte-level tokenizer, a tiny Llama; and conversations for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from slipstream.environments.chat_template import ChatTemplate
from slipstream.environments.tokenizer import TextCodec
from slipstream.models.llama.config import LlamaConfig

START, END = "<|im_start|>", "<|im_end|>"
HEAD = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
"""
CALLS = """
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}
            {{- '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
"""
TAIL = """
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
TOOLS_TEMPLATE = HEAD + CALLS + TAIL
MARKED_TEMPLATE = (
    HEAD
    + "{%- if message.role == 'assistant' %}{%- generation %}"
    + CALLS
    + "{%- endgeneration %}{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}"
    + TAIL
)
"""The same, with transformers' tags."""

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2's, which knows no tools."""

WEATHER: list[dict[str, Any]] = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
CALLED = '<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>'
TOOL_CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How warm is it in Zürich?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"celsius": 21}'},
    {"role": "assistant", "content": "\n21 degrees 🌞"},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "You are welcome."},
]
LEARNED = [f"{CALLED}{END}", f"\n21 degrees 🌞{END}", f"You are welcome.{END}"]


def build_tokenizer() -> Tokenizer:
    """A token a byte, a few pairs, and the special ones."""
    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("Ċ", "Ċ"), ("e", "r"), ("a", "r"), ("Ġ", "w")]
    vocabulary |= {left + right: len(vocabulary) + index for index, (left, right) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    tokenizer.add_special_tokens([AddedToken(START, special=True), AddedToken(END, special=True)])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("</tool_call>", special=False)])
    return tokenizer


def write_tokenizer(model_dir: Path, template: str) -> None:
    model_dir.mkdir(exist_ok=True)
    build_tokenizer().save(str(model_dir / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": template}
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config))


def codec() -> TextCodec:
    tokenizer = build_tokenizer()
    return TextCodec(tokenizer, tokenizer.token_to_id(END))


def chat_template(source: str) -> ChatTemplate:
    return ChatTemplate(source, [START, END], {"eos_token": END})


def sizes() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=build_tokenizer().get_vocab_size(),
        dim=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        ffn_dim=64,
        rope_theta=1e4,
        max_context_tokens=128,
        norm_eps=1e-5,
        tied_embeddings=True,
        eos_token_id=build_tokenizer().token_to_id(END),
    )


def sums(count: int) -> list[dict[str, Any]]:
    """Rows that a tiny model learns something of within a few steps."""
    return [
        {"messages": [{"role": "user", "content": f"{n}+{n}"}, {"role": "assistant", "content": str(2 * n)}]}
        for n in range(count)
    ]


def write_rows(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file
