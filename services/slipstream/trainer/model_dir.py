"""The run's model directory: `config.json` and `tokenizer.json` at once, weights after the warm-up. Imports no torch.

Workers and runner wait for these files at start, so they are written before torch is imported, and renamed into place
so that nobody reads half a file.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import structlog

from slipstream.common.config import ConfigError
from slipstream.common.config_errors import suggest
from slipstream.common.disk import RETRY_S, full_disk_named, make_directory, replace_file
from slipstream.common.errors import DiskFull
from slipstream.environments.tokenizer import CHAT_FILES, TOKENIZER_FILE, build_tokenizer
from slipstream.models.base import Sizes
from slipstream.models.registry import BUILT_IN, CONFIG_FILE, read_config, save_sizes, sizes_of
from slipstream.trainer.config import TrainerConfig

log = structlog.get_logger()


def prepare_model_dir_when_room(config: TrainerConfig) -> Sizes:
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


def prepare_model_dir(config: TrainerConfig) -> Sizes:
    """Write or copy what can be known without training; returns the model's sizes. A repeat writes the same."""
    target = config.model_dir
    scratch = target / ".new"
    make_directory(scratch)
    sizes = sizes_at_start(config)
    if config.initial_model is not None:
        tokenizer = (config.initial_model / TOKENIZER_FILE).read_bytes()
        for name in CHAT_FILES:
            if (config.initial_model / name).is_file():
                replace_file(scratch / name, (config.initial_model / name).read_bytes())
    else:
        tokenizer = build_tokenizer().to_str(pretty=True).encode()
    replace_file(scratch / TOKENIZER_FILE, tokenizer)
    save_sizes(sizes, scratch)
    move_into_place(scratch, target)
    return sizes


def sizes_at_start(config: TrainerConfig, where: str = "trainer.initial_model") -> Sizes:
    """Sizes of the model that training starts from. Raises `ConfigError` for a start that cannot be, named `where`."""
    architecture = config.model.architecture
    if config.initial_model is None:
        if architecture in BUILT_IN and architecture != config.model.RANDOM_START:
            raise ConfigError(
                f'model.architecture "{architecture}" starts from trainer.initial_model; '
                f"[model] has the sizes of {config.model.RANDOM_START} alone"
            )
        return sizes_of(architecture, config.model.config_json(build_tokenizer().get_vocab_size()))
    where = f"{where} {str(config.initial_model)!r}"
    require_model_dir(config.initial_model, where)
    try:
        given = read_config(config.initial_model)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    kind = given.get("model_type")
    if isinstance(kind, str) and kind in BUILT_IN and architecture in BUILT_IN and kind != architecture:
        raise ConfigError(f'{where} is of the model_type "{kind}": it takes model.architecture = "{kind}"')
    context = given.get("max_position_embeddings", sys.maxsize)
    if not isinstance(context, int | float):
        raise ConfigError(f"{where}: {CONFIG_FILE}: max_position_embeddings is {str(context)[:40]!r}, not a number")
    context = min(context, config.model.max_context_tokens)
    try:
        return sizes_of(architecture, {**given, "max_position_embeddings": context})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def require_model_dir(model_dir: Path, where: str) -> None:
    """Say at once what a model directory lacks."""
    if not model_dir.is_dir():
        raise ConfigError(
            f"{where} is no directory; it must be the model/ of a run, or hold a model in Hugging Face's form"
        )
    for pattern in (CONFIG_FILE, TOKENIZER_FILE, "*.safetensors"):
        if not any(model_dir.glob(pattern)):
            below = [str(file.parent) for file in sorted(model_dir.glob(f"*/{pattern}"))]
            raise ConfigError(f"{where} has no {pattern}{suggest(below)}")


def move_into_place(scratch: Path, target: Path) -> None:
    """Move the files of `scratch` to `target`, `config.json` last: who sees it finds the others."""
    with full_disk_named(target):
        for file in sorted(scratch.iterdir(), key=lambda file: file.name == CONFIG_FILE):
            os.replace(file, target / file.name)
        scratch.rmdir()
