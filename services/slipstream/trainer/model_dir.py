"""The run's model directory: `config.json` and `tokenizer.json` at once, weights after the warm-up. Imports no torch.

Workers and runner wait for these files at start, so they are written before torch is imported, and renamed into place
so that nobody reads half a file.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import structlog

from slipstream.common.disk import RETRY_S, full_disk_named, make_directory, replace_file
from slipstream.common.errors import DiskFull
from slipstream.environments.tokenizer import TOKENIZER_FILE, build_tokenizer
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.trainer.config import TrainerConfig

log = structlog.get_logger()


def prepare_model_dir_when_room(config: TrainerConfig) -> MoeConfig:
    """The same, however long the disk has no room for it. Nobody can be told but the log: no server runs yet."""
    waiting = False
    while True:
        try:
            return prepare_model_dir(config)
        except DiskFull as error:
            if not waiting:
                log.warning("model_dir_waits_for_room", detail=error.message)
            waiting = True
        time.sleep(RETRY_S)


def prepare_model_dir(config: TrainerConfig) -> MoeConfig:
    """Write or copy what can be known without training; returns the model's sizes. A repeat writes the same."""
    target = config.model_dir
    scratch = target / ".new"
    make_directory(scratch)
    if config.initial_model is not None:
        sizes = MoeConfig.load(config.initial_model)
        replace_file(scratch / TOKENIZER_FILE, (config.initial_model / TOKENIZER_FILE).read_bytes())
    else:
        tokenizer = build_tokenizer()
        replace_file(scratch / TOKENIZER_FILE, tokenizer.to_str(pretty=True).encode())
        sizes = MoeConfig(
            **{**config.model.model_dump(), "vocab_size": config.model.vocab_size or tokenizer.get_vocab_size()}
        )
    sizes.save(scratch)
    move_into_place(scratch, target)
    return sizes


def move_into_place(scratch: Path, target: Path) -> None:
    """Move the files of `scratch` to `target`, `config.json` last: who sees it finds the others."""
    with full_disk_named(target):
        for file in sorted(scratch.iterdir(), key=lambda file: file.name == "config.json"):
            os.replace(file, target / file.name)
        scratch.rmdir()
