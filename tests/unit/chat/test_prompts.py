"""Prompts as messages of a chat, where an environment asks for it."""

from __future__ import annotations

import json

import pytest

from slipstream.common.config import ConfigError
from slipstream.environments.base import takes_turns
from slipstream.environments.config import ReasoningGymConfig, SpellBackwardConfig
from slipstream.environments.demonstrations import Demonstrations
from slipstream.environments.prompts import Prompts
from slipstream.environments.registry import build_environments
from slipstream.trainer.config import TrainerConfig
from slipstream.trainer.model_dir import prepare_model_dir
from tests.unit.chat.conversations import PLAIN_TEMPLATE, codec, sizes, write_tokenizer


def sums(**options) -> ReasoningGymConfig:
    return ReasoningGymConfig.model_validate({"name": "sums", "dataset": "chain_sum", **options})


def test_a_chat_shows_the_prompt_as_a_users_message_and_other_environments_theirs_as_it_is(tmp_path):
    write_tokenizer(tmp_path, PLAIN_TEMPLATE)
    configs = [sums(chat=True, system="Be brief."), SpellBackwardConfig()]
    environments = build_environments(configs, 0)
    prompts = Prompts(configs, tmp_path)
    chat, plain = environments["sums"], environments["spell_backward"]
    assert not takes_turns(chat)
    assert not takes_turns(plain)
    task = chat.task("held_out", 0)
    assert prompts.text(chat, task) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\n{chat.prompt(task)}<|im_end|>\n<|im_start|>assistant\n"
    )
    word = plain.task("train", 0)
    assert prompts.text(plain, word) == plain.prompt(word)


def test_demonstrations_are_shown_the_same_way(tmp_path):
    write_tokenizer(tmp_path, PLAIN_TEMPLATE)
    (tmp_path / "config.json").write_text(f'{{"eos_token_id": {codec().end_id}}}')
    example = Demonstrations([sums(chat=True)], tmp_path, 0).validation()[0]
    assert example.prompt_ids[-len("assistant\n") - 1] == codec().encode("<|im_start|>")[0]
    assert example.answer_ids[-1] == codec().end_id


def test_a_chat_without_a_template_is_refused(tmp_path):
    write_tokenizer(tmp_path, PLAIN_TEMPLATE)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=r"environments.sums: chat is true, and .* has no chat template"):
        Prompts([sums(chat=True)], tmp_path)
    with pytest.raises(ConfigError, match=r"environments.sums: chat is true, and a random start has no chat template"):
        Prompts([sums(chat=True)], None)


def test_a_run_s_model_directory_has_the_chat_template_of_its_start(tmp_path):
    start = tmp_path / "start"
    write_tokenizer(start, PLAIN_TEMPLATE)
    (start / "model.safetensors").touch()
    (start / "config.json").write_text(json.dumps(sizes().to_hf()))
    (tmp_path / "run").mkdir()
    model = {"architecture": "llama"}
    prepare_model_dir(
        TrainerConfig.model_validate({"run_dir": tmp_path / "run", "initial_model": start, "model": model})
    )
    assert (tmp_path / "run/model/tokenizer_config.json").read_bytes() == (start / "tokenizer_config.json").read_bytes()
