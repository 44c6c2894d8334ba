"""Builds the environments of a configuration and looks at them, in a process of its own: their code may be anyone's.

Reads one JSON object on standard input; its last line of standard output is a JSON list of problems, each the name of
an environment, or the renderer's section, and a sentence.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from slipstream.common.config import ConfigError
from slipstream.environments.base import AnyEnvironment, EpisodeEnvironment, Limits, takes_turns
from slipstream.environments.config import EntryPointConfig, EnvironmentConfig, ImportedConfig
from slipstream.environments.config_renderer import SECTION, FamilyConfig, RendererConfig
from slipstream.environments.prompts import Prompts
from slipstream.environments.registry import build_environments
from slipstream.environments.rendering import load_renderer
from slipstream.environments.tokenizer import TextCodec, build_tokenizer

TASKS_LOOKED_AT = 32
METHODS = ("task", "prompt", "score", "demonstration")
EPISODE_ATTRIBUTES = ("name", "limits", "needs_sandbox", "task", "setup")

Problem = tuple[str, str]


def probe(
    configs: Sequence[EnvironmentConfig],
    seed: int,
    *,
    codec: TextCodec,
    context_tokens: int,
    demonstrations: bool,
    model_dir: Path | None = None,
) -> list[Problem]:
    """What is wrong with the environments. `demonstrations`: the warm-up will ask for some. `model_dir`: what training
    starts from, if not a random start."""
    problems: list[Problem] = []
    for config in configs:
        try:
            environment = build_environments([config], seed)[config.name]
            prompts = Prompts([config], model_dir)
            sentence = _judge(config, environment, prompts, codec, context_tokens, demonstrations)
        except ConfigError as error:
            sentence = str(error).partition(": ")[2]
        except Exception as error:  # user code
            sentence = f"{_what(config)} fails with {type(error).__name__}: {error}"
        if sentence:
            problems.append((config.name, sentence))
    return problems


def probe_renderer(config: RendererConfig, codec: TextCodec, model_dir: Path | None) -> str:
    """What is wrong with what makes tokens of conversations; empty if nothing is."""
    if not isinstance(config, FamilyConfig):
        return ""
    if model_dir is None:
        return 'a random start has the tokenizer of no family; it takes trainer.initial_model, or type = "template"'
    try:
        load_renderer(model_dir, codec, config)
    except ConfigError as error:
        return str(error).partition(": ")[2]
    return ""


def _judge(
    config: EnvironmentConfig,
    environment: AnyEnvironment,
    prompts: Prompts,
    codec: TextCodec,
    context_tokens: int,
    demonstrations: bool,
) -> str:
    if takes_turns(environment):
        return _judge_episodes(config, environment, demonstrations)
    missing = [name for name in METHODS if not callable(getattr(environment, name, None))]
    if missing:
        made = type(environment).__name__
        return f"{_what(config)} gives a {made}, which is no Environment: it has no {', '.join(missing)}"
    score = environment.score
    if inspect.ismethod(score) and not inspect.iscoroutinefunction(score) and not hasattr(score, "__wrapped__"):
        return f"{_what(config)}: score must be an `async def`"
    tasks = [environment.task("train", index) for index in range(TASKS_LOOKED_AT)]
    held_out = min(TASKS_LOOKED_AT, config.evaluation_task_count)
    tasks += [environment.task("held_out", index) for index in range(held_out)]
    longest = 0
    for task in tasks:
        prompt = environment.prompt(task)
        if not isinstance(prompt, str) or not prompt:
            return f"{_what(config)}: prompt gives {prompt!r}, which is no text"
        shown = prompts.shown(environment.name, prompt)
        longest = max(longest, len(codec.encode(shown)))
    if longest + config.max_new_tokens > context_tokens:
        return (
            f"a prompt of {longest} tokens and max_new_tokens = {config.max_new_tokens} exceed the model's context of "
            f"{context_tokens} tokens; raise model.max_context_tokens or lower max_new_tokens"
        )
    if demonstrations and config.demonstration_weight:
        shown = environment.demonstration(0)
        if shown is None:
            return "it has no demonstrations for the warm-up; set its demonstration_weight = 0, or sft.enabled = false"
        if not (isinstance(shown, tuple) and len(shown) == 2 and all(isinstance(part, str) for part in shown)):
            return f"{_what(config)}: demonstration gives {shown!r}, which is no pair of prompt and answer"
    return ""


def _judge_episodes(config: EnvironmentConfig, environment: EpisodeEnvironment, demonstrations: bool) -> str:
    """Its episodes may need what only a run has: they are not begun here."""
    missing = [name for name in EPISODE_ATTRIBUTES if not hasattr(environment, name)]
    if missing:
        made = type(environment).__name__
        return f"{_what(config)} gives a {made}, which is no EpisodeEnvironment: it has no {', '.join(missing)}"
    if not isinstance(environment.limits, Limits):
        return f"{_what(config)}: limits is {environment.limits!r}, which is no Limits"
    for index in range(TASKS_LOOKED_AT):
        environment.task("train", index)
    for index in range(min(TASKS_LOOKED_AT, config.evaluation_task_count)):
        environment.task("held_out", index)
    if demonstrations and config.demonstration_weight:
        return "it takes turns and has no demonstrations; set its demonstration_weight = 0, or sft.enabled = false"
    return ""


def _what(config: EnvironmentConfig) -> str:
    if isinstance(config, EntryPointConfig):
        return config.entry_point
    return config.path if isinstance(config, ImportedConfig) else config.type


def main() -> None:
    asked: dict[str, Any] = json.load(sys.stdin)
    configs = TypeAdapter(list[EnvironmentConfig]).validate_python(asked["environments"])
    model = asked["initial_model"]
    codec = TextCodec.load(Path(model)) if model else TextCodec(build_tokenizer())
    problems = probe(
        configs,
        asked["seed"],
        codec=codec,
        context_tokens=asked["context_tokens"],
        demonstrations=asked["demonstrations"],
        model_dir=Path(model) if model else None,
    )
    renderer: RendererConfig = TypeAdapter[Any](RendererConfig).validate_python(asked["renderer"])
    if sentence := probe_renderer(renderer, codec, Path(model) if model else None):
        problems.append((SECTION, sentence))
    print("\n" + json.dumps(problems), flush=True)


if __name__ == "__main__":
    main()
