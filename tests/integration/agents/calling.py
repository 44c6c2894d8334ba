"""A tiny MoE model that babbles and then calls a tool, its tokenizer and chat template, and the engines that run it.

What follows a token hangs on the token alone, by the script below; attention and experts add a little noise of their
own to it, different with each seed. So versions agree on what may be said and differ in how likely it is, and every
token has experts of its own.

The model says two digits where the tokenizer has one token for them, and letters that it would merge: whoever encodes
what was said gets other tokens than those that were sampled.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from slipstream.engine.vllm.config import VllmConfig
from slipstream.models.qwen3_moe.config import MoeConfig
from tests.engine.engines import START_TIMEOUT_S
from tests.integration.workers.kinds import Vllm
from tests.unit.chat.conversations import END, START, TOOLS_TEMPLATE

BLOCK_TOKENS = 32
LETTERS, LOW, HIGH = "abcdefgh", "01234", "56789"
CALL, CALLED, HEAD, TAIL = "<tool_call>", "</tool_call>", '{"name": "look", "arguments": {"at": ', "}}"
NEVER = -12.0
"""Of a logit."""


def build_tokenizer() -> Tokenizer:
    """A token a byte, pairs of letters and of digits, and those of calls."""
    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [*itertools.product(LOW, HIGH), *itertools.pairwise(LETTERS)]
    vocabulary |= {left + right: len(vocabulary) + index for index, (left, right) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    tokenizer.add_special_tokens([AddedToken(START, special=True), AddedToken(END, special=True)])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in (CALL, CALLED, HEAD, TAIL)])
    return tokenizer


SIZES = MoeConfig(
    vocab_size=build_tokenizer().get_vocab_size(),
    dim=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=32,
    max_context_tokens=1024,
    eos_token_id=build_tokenizer().token_to_id(END),
)


def write_texts(model_dir: Path) -> Path:
    """What a runner needs of the model: sizes, tokenizer and chat template."""
    model_dir.mkdir()
    build_tokenizer().save(str(model_dir / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TOOLS_TEMPLATE}
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config))
    (model_dir / "config.json").write_text(json.dumps(SIZES.to_hf()))
    return model_dir


def script() -> list[tuple[list[str], dict[str, float]]]:
    """Tokens, and what follows each of them. All others are followed by letters."""
    babble = dict.fromkeys(LETTERS, 0.95 / len(LETTERS)) | {CALL: 0.05}
    return [
        ([CALL], {HEAD: 1.0}),
        ([HEAD], dict.fromkeys(LOW, 1 / len(LOW))),
        ([*LOW], dict.fromkeys(HIGH, 1 / len(HIGH))),
        ([*HIGH], {TAIL: 1.0}),
        ([TAIL], {CALLED: 1.0}),
        ([CALLED], {END: 1.0}),
        ([], babble),
    ]


def build(seed: int) -> Any:
    """The model with the noise of a seed."""
    import torch

    from slipstream.models.qwen3_moe.model import build_model, init_weights

    model = build_model(SIZES)
    init_weights(model, seed)
    tokenizer, states = build_tokenizer(), script()
    strength = math.sqrt(SIZES.dim)  # of a direction of the residual stream that a norm leaves nothing else in
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("wo.weight", "w2_EDF")):
                parameter *= 0.2
        said, follows = model.tok_embeddings.weight, model.lm_head.weight
        said *= 0.3
        said[:, : len(states)] = 0.0
        said[:, len(states) - 1] = strength
        follows *= 0.05
        follows[:, : len(states)] = NEVER / strength
        for state, (tokens, chances) in enumerate(states):
            for token in tokens:
                said[tokenizer.token_to_id(token), : len(states)] = 0.0
                said[tokenizer.token_to_id(token), state] = strength
            for token, chance in chances.items():
                follows[tokenizer.token_to_id(token), state] = math.log(chance) / strength
    return model.eval().requires_grad_(False)


class Callers(Vllm):
    """Both pools on vLLM."""

    sizes = SIZES

    def build(self, model_dir: Path, sizes: MoeConfig, config: Any) -> Any:
        from slipstream.engine.vllm.engine import VllmEngine

        default = VllmConfig(
            block_count=512,
            max_running_samples=16,
            max_prefill_tokens=1024,
            connector="nixl",
            start_timeout_s=START_TIMEOUT_S,
        )
        return VllmEngine(model_dir, sizes, config or default)
