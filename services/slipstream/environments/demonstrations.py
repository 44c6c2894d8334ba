"""Demonstrations of all environments for the supervised warm-up, as token ids: a pure function of seed and step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.environments.base import AnyEnvironment, takes_turns
from slipstream.environments.config import EnvironmentConfig
from slipstream.environments.prompts import Prompts
from slipstream.environments.registry import build_environments
from slipstream.environments.tokenizer import TextCodec

VALIDATION_EXAMPLES = 100
MAX_INDEX = 2**31


@dataclass(frozen=True)
class Example:
    """A prompt and the answer to learn, end token included."""

    prompt_ids: list[int]
    answer_ids: list[int]


class Demonstrations:
    """Batches mixed by `demonstration_weight`."""

    def __init__(self, configs: Sequence[EnvironmentConfig], model_dir: Path, seed: int) -> None:
        self._codec = TextCodec.load(model_dir)
        self._prompts = Prompts(configs, model_dir)
        self._seed = seed
        self._environments = build_environments(configs, seed)
        self._weights = {config.name: config.demonstration_weight for config in configs}

    def batch(self, step: int, size: int) -> list[Example]:
        """Training examples of one step, from 1. Raises `ValueError` when no environment has any to show."""
        rng = random.Random(f"{self._seed}/batch/{step}")
        shown = [(self._environments[name], weight) for name, weight in self._weights.items() if weight > 0]
        if not shown:
            raise ValueError("no environment has a demonstration_weight above 0: there is nothing to warm up on")
        environments, weights = zip(*shown, strict=True)
        examples: list[Example] = []
        for environment in rng.choices(environments, weights, k=size):
            example = self._example(environment, rng.randrange(MAX_INDEX), validation=False)
            if example is None:
                raise ValueError(f"{environment.name} has no demonstrations: set its demonstration_weight to 0")
            examples.append(example)
        return examples

    def validation(self) -> list[Example]:
        """Examples with one right answer each, none of them in any batch."""
        examples = (
            self._example(environment, index, validation=True)
            for environment in self._environments.values()
            for index in range(VALIDATION_EXAMPLES)
        )
        return [example for example in examples if example is not None]

    def _example(self, environment: AnyEnvironment, index: int, *, validation: bool) -> Example | None:
        if takes_turns(environment):
            return None
        shown = environment.demonstration(index, validation=validation)
        if shown is None:
            return None
        prompt, answer = shown
        prompt = self._prompts.shown(environment.name, prompt)
        return Example(self._codec.encode(prompt), [*self._codec.encode(answer), self._codec.end_id])
