"""reasoning-gym's `spell_backward`: write a word's letters in reverse order, judged by reasoning-gym's own scorer."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from slipstream.environments.base import Completion, Score, Split, Task
from slipstream.environments.config import SpellBackwardConfig
from slipstream.environments.tokenizer import SPELL_BACKWARD_INSTRUCTION
from slipstream.environments.tools import Tools

VALIDATION_WORDS = 100
"""Words kept out of training for the warm-up's validation."""

Scorer = Callable[[str | None, dict[str, Any]], float]


class SpellBackward:
    """Words of reasoning-gym's list, split by seed into held-out, validation and training ones, whatever their case."""

    def __init__(self, config: SpellBackwardConfig, seed: int) -> None:
        self.name = config.name
        self._config = config
        self._seed = seed
        words = _words(config.min_word_len, config.max_word_len)
        random.Random(f"spell_backward/{seed}").shuffle(words)
        held_out = words[: config.evaluation_task_count]
        asked = {word.lower() for word in held_out}
        others = [word for word in words[len(held_out) :] if word.lower() not in asked]
        validation = others[:VALIDATION_WORDS]
        unseen = asked | {word.lower() for word in validation}
        self.held_out, self.validation = held_out, validation
        self.training = [word for word in others if word.lower() not in unseen]
        if not self.training:
            raise ValueError("spell_backward: no word is left to train on")
        self._short = [word for word in self.training if len(word) <= config.demonstration_word_len]

    def task(self, split: Split, index: int) -> Task:
        if split == "held_out":
            return Task(split, index, {"word": self.held_out[index % len(self.held_out)]})
        return Task(split, index, {"word": random.Random(f"{self._seed}/{index}").choice(self.training)})

    def prompt(self, task: Task) -> str:
        return _question(task.payload["word"])

    async def score(self, task: Task, completions: Sequence[Completion], tools: Tools) -> list[Score]:
        return [self._score(task.payload["word"], completion) for completion in completions]

    def demonstration(self, index: int, *, validation: bool = False) -> tuple[str, str] | None:
        if validation:
            word = self.validation[index % len(self.validation)]
        else:
            rng = random.Random(f"{self._seed}/demonstration/{index}")
            long = rng.random() < self._config.long_demonstration_share
            word = rng.choice(self.training if long else self._short)
            if len(word) > self._config.demonstration_word_len and rng.random() < self._config.careless_share:
                return _question(word), word[:0:-1]
        return _question(word), word[::-1]

    def _score(self, word: str, completion: Completion) -> Score:
        if not completion.stopped:
            return Score(0.0, False, "no end token")
        # The scorer ignores case and gives part marks: only 1.0 is right.
        score = float(_scorer()(completion.text, {"answer": word[::-1]}))
        correct = score == 1.0
        share = self._config.exact_share
        return Score((1 - share) * score + share * correct, correct, f"score {score:.3f}")


def _question(word: str) -> str:
    return f"{SPELL_BACKWARD_INSTRUCTION}{word}\n"


def _words(min_len: int, max_len: int) -> list[str]:
    """The dataset's words, each once, sorted. Read from the wheel: importing reasoning-gym takes seconds."""
    path = Path(str(metadata.distribution("reasoning-gym").locate_file("reasoning_gym/data/words3to10.txt")))
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return sorted({word for word in lines if word.isalnum() and word.isascii() and min_len <= len(word) <= max_len})


@cache
def _scorer() -> Scorer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # from a dependency of reasoning-gym
        from reasoning_gym.algorithmic.spell_backward import SpellBackwardConfig as DatasetConfig
        from reasoning_gym.algorithmic.spell_backward import SpellBackwardDataset
    return SpellBackwardDataset(DatasetConfig(size=1, seed=0)).score_answer
