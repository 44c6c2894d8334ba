"""What vLLM is told of a teacher."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.common.config import ConfigError
from slipstream.common.errors import RequestAborted
from slipstream.engine.vllm.judge import longer_context
from slipstream.engine.vllm.prompts import prompt_logprobs
from slipstream.models.teachers import Bounds, bounds_on_vllm

TEXT: dict[str, Any] = {"vocab_size": 64, "max_position_embeddings": 320}


def directory(path: Path, config: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("config", "changed"),
    [
        ({"model_type": "qwen3", **TEXT}, {"max_position_embeddings": 321}),
        (
            {"model_type": "gemma3", "text_config": TEXT, "vision_config": {"hidden_size": 8}},
            {"text_config": {"max_position_embeddings": 321}},
        ),
    ],
)
def test_a_position_more_is_asked_for_where_vllm_looks_for_them(tmp_path, config, changed):
    bounds = bounds_on_vllm(directory(tmp_path, config))
    assert bounds == Bounds(64, 320)
    assert longer_context(tmp_path, bounds.max_context_tokens + 1) == changed


@pytest.mark.parametrize(
    "config", [{"vocab_size": 64}, {**TEXT, "max_position_embeddings": True}, {**TEXT, "vocab_size": "64"}]
)
def test_a_teacher_without_a_size_is_refused_by_its_name(tmp_path, config):
    with pytest.raises(
        ConfigError, match=r"config\.json has no '(vocab_size|max_position_embeddings)' that is a number"
    ):
        bounds_on_vllm(directory(tmp_path, config))


@pytest.mark.parametrize("said", [[], [-1.0], [-1.0, -2.0, -3.0]])
def test_an_answer_that_does_not_speak_of_every_token_is_none(said: list[float]) -> None:
    output = SimpleNamespace(prompt_logprobs=SimpleNamespace(logprobs=said))
    with pytest.raises(RequestAborted, match=f"vLLM spoke of {len(said)} of 2 tokens"):
        prompt_logprobs(output, 3)
    output.prompt_logprobs.logprobs = [-1.0, -2.0]
    assert prompt_logprobs(output, 3) == [-1.0, -2.0]
