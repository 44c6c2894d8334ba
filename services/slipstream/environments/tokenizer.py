"""The character tokenizer of the built-in environments, as a `tokenizers` file.

Every printable ASCII character and the newline is a token; each environment's constant instruction is one added token,
so that a prompt is hardly longer than its task.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
CHAT_FILES = (TOKENIZER_CONFIG_FILE, TEMPLATE_FILE)
"""Where a model directory may have its chat template."""
END = "<|end|>"
PAD = "<|pad|>"
UNKNOWN = "<|unknown|>"

SPELL_BACKWARD_INSTRUCTION = "Spell this word backward (example: sun -> nus): "
EXPRESSION_INSTRUCTION = "Write single digits and operators that evaluate to this number: "
INSTRUCTIONS = (SPELL_BACKWARD_INSTRUCTION, EXPRESSION_INSTRUCTION)


def build_tokenizer() -> Tokenizer:
    """The tokenizer; always the same ids."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: index for index, token in enumerate([*characters, PAD, END, UNKNOWN])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")  # pyright: ignore
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue] the stubs give it no setter
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (PAD, END, UNKNOWN)])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in INSTRUCTIONS])
    return tokenizer


class TextCodec:
    """Text to token ids and back, with the tokenizer of a model directory."""

    def __init__(self, tokenizer: Tokenizer, end_id: int | None = None) -> None:
        """`end_id` ends an answer; None means the token `<|end|>`."""
        self._tokenizer = tokenizer
        end_id = tokenizer.token_to_id(END) if end_id is None else end_id
        if end_id is None:
            raise ValueError(f"the tokenizer has no end token {END!r}, and config.json no eos_token_id")
        self.end_id: int = end_id
        self.longest_token = max(map(len, tokenizer.get_vocab()))
        """Characters of the longest token."""

    @classmethod
    def load(cls, model_dir: Path) -> TextCodec:
        config = model_dir / "config.json"
        end_id = json.loads(config.read_text()).get("eos_token_id") if config.exists() else None
        return cls(Tokenizer.from_file(str(model_dir / TOKENIZER_FILE)), end_id)

    @property
    def vocab_size(self) -> int:
        """How many token ids there are."""
        return self._tokenizer.get_vocab_size()

    @property
    def stop_token_ids(self) -> list[int]:
        return [self.end_id]

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: list[int]) -> str:
        """The text, without end and padding."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def decode_all(self, token_ids: list[int]) -> str:
        """The text, special tokens included."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def step(self, stream: DecodeStream, token_id: int) -> str:
        """The text that is certain once another token has come: a character may take several."""
        return stream.step(self._tokenizer, token_id) or ""

    def token_text(self, token_id: int) -> str:
        """What stands for a token in text."""
        text = self._tokenizer.id_to_token(token_id)
        if text is None:
            raise ValueError(f"the tokenizer has no token {token_id}")
        return text
