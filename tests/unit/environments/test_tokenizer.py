"""Text to tokens and back; demonstrations as tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.environments.config import ExpressionConfig, SpellBackwardConfig
from slipstream.environments.demonstrations import Demonstrations
from slipstream.environments.tokenizer import END, INSTRUCTIONS, PAD, TOKENIZER_FILE, TextCodec, build_tokenizer

CODEC = TextCodec(build_tokenizer())
PRINTABLE = "".join(chr(code) for code in range(32, 127)) + "\n"


def test_every_printable_character_is_a_token_and_comes_back() -> None:
    ids = CODEC.encode(PRINTABLE)
    assert len(ids) == len(set(ids)) == len(PRINTABLE)
    assert CODEC.decode(ids) == PRINTABLE
    for text in ("  two  spaces  ", "\n\n", " leading", "trailing ", "(9-3)*7"):
        assert CODEC.decode(CODEC.encode(text)) == text


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_an_instruction_is_one_token(instruction: str) -> None:
    assert len(CODEC.encode(instruction)) == 1
    assert len(CODEC.encode(f"{instruction}word\n")) == 6
    assert CODEC.decode(CODEC.encode(f"{instruction}word\n")) == f"{instruction}word\n"


def test_end_and_padding_are_not_text() -> None:
    pad_id = build_tokenizer().token_to_id(PAD)
    assert pad_id is not None
    assert CODEC.decode([*CODEC.encode("cat"), CODEC.end_id, pad_id]) == "cat"
    assert CODEC.stop_token_ids == [build_tokenizer().token_to_id(END)]


def test_other_characters_become_the_unknown_token() -> None:
    assert len(CODEC.encode("naïve")) == 5
    assert CODEC.decode(CODEC.encode("naïve")) == "nave"


def test_a_tokenizer_without_an_end_token_is_refused() -> None:
    from tokenizers import Tokenizer, models

    with pytest.raises(ValueError, match="no end token"):
        TextCodec(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))


def test_a_saved_tokenizer_gives_the_same_ids(tmp_path: Path) -> None:
    build_tokenizer().save(str(tmp_path / TOKENIZER_FILE))
    assert TextCodec.load(tmp_path).encode(INSTRUCTIONS[0] + PRINTABLE) == CODEC.encode(INSTRUCTIONS[0] + PRINTABLE)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    build_tokenizer().save(str(tmp_path / TOKENIZER_FILE))
    return tmp_path


def test_batches_are_pure_mixed_and_end_with_the_end_token(model_dir: Path) -> None:
    configs = [SpellBackwardConfig(), ExpressionConfig()]
    first, again = (Demonstrations(configs, model_dir, 0) for _ in range(2))
    batch = first.batch(3, 64)
    assert batch == again.batch(3, 64) != first.batch(4, 64)
    assert all(example.answer_ids[-1] == CODEC.end_id for example in batch)
    heads = {example.prompt_ids[0] for example in batch}
    assert heads == {CODEC.encode(instruction)[0] for instruction in INSTRUCTIONS}
    assert Demonstrations(configs, model_dir, 1).batch(3, 64) != batch


def test_validation_examples_are_in_no_batch(model_dir: Path) -> None:
    demonstrations = Demonstrations([SpellBackwardConfig(), ExpressionConfig()], model_dir, 0)
    validation = demonstrations.validation()
    assert len(validation) == 100  # those of spell_backward; an expression has no single right answer
    asked = {CODEC.decode(example.prompt_ids).lower() for example in validation}
    shown = {
        CODEC.decode(example.prompt_ids).lower() for step in range(30) for example in demonstrations.batch(step, 64)
    }
    assert not asked & shown


def test_nothing_to_show_is_an_error(model_dir: Path) -> None:
    with pytest.raises(ValueError, match="nothing to warm up on"):
        Demonstrations([SpellBackwardConfig(demonstration_weight=0)], model_dir, 0).batch(1, 4)
