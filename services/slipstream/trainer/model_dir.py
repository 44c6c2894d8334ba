"""The run's model directory: `config.json` and `tokenizer.json` at once, weights after the warm-up. Imports no torch.

Workers and runner wait for these files at start, so they are written before torch is imported, and renamed into place
so that nobody reads half a file.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from slipstream.environments.tokenizer import TOKENIZER_FILE, build_tokenizer
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.trainer.config import TrainerConfig


def prepare_model_dir(config: TrainerConfig) -> MoeConfig:
    """Write or copy what can be known without training; returns the model's sizes. A repeat writes the same."""
    target = config.model_dir
    scratch = target / ".new"
    scratch.mkdir(parents=True, exist_ok=True)
    if config.initial_model is not None:
        sizes = MoeConfig.load(config.initial_model)
        shutil.copyfile(config.initial_model / TOKENIZER_FILE, scratch / TOKENIZER_FILE)
    else:
        tokenizer = build_tokenizer()
        tokenizer.save(str(scratch / TOKENIZER_FILE))
        sizes = MoeConfig(
            **{**config.model.model_dump(), "vocab_size": config.model.vocab_size or tokenizer.get_vocab_size()}
        )
    sizes.save(scratch)
    move_into_place(scratch, target)
    return sizes


def move_into_place(scratch: Path, target: Path) -> None:
    """Move the files of `scratch` to `target`, `config.json` last: who sees it finds the others."""
    for file in sorted(scratch.iterdir(), key=lambda file: file.name == "config.json"):
        os.replace(file, target / file.name)
    scratch.rmdir()
