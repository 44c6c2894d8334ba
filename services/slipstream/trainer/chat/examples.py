"""Conversations as token ids, with the positions that are learned. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray

from slipstream.common.config import ConfigError
from slipstream.environments.base import Turns
from slipstream.environments.chat_template import ChatTemplate, Stretch, Unrenderable
from slipstream.environments.tokenizer import TextCodec
from slipstream.trainer.chat.config import DataConfig
from slipstream.trainer.chat.rows import BadRow, Row, read_rows

log = structlog.get_logger()

TOLD_ROWS = 20
"""Bad rows that are told one by one."""


class BadRows(ConfigError):
    """Rows that cannot be used, where that ends it; `rows` tells them, a line each."""

    def __init__(self, message: str, rows: Sequence[str]) -> None:
        super().__init__(message)
        self.rows = rows


@dataclass(frozen=True)
class Example:
    """One conversation."""

    line: int
    """Of its file."""

    token_ids: NDArray[np.int32]
    target_positions: NDArray[np.int64]
    """Tokens of the assistant's turns, their end tokens included: each is predicted from those before it."""


@dataclass
class Dataset:
    """What a run learns from, and is validated on."""

    training: list[Example]
    validation: list[Example]
    bad_rows: int


@dataclass
class _Reader:
    """Reads files, and keeps count of what is bad."""

    config: DataConfig
    codec: TextCodec
    template: ChatTemplate
    bad: int = 0
    told: list[BadRow] = field(default_factory=list)

    def read(self, file: Path) -> list[Example]:
        return [example for row in read_rows(file) if (example := self._example(row)) is not None]

    def _example(self, row: Row | BadRow) -> Example | None:
        if isinstance(row, Row):
            try:
                return encode(row, self.codec, self.template, self.config.turns, self.config.max_tokens)
            except Unrenderable as error:
                row = BadRow(row.file, row.line, str(error))
        self.bad += 1
        if len(self.told) < TOLD_ROWS:
            self.told.append(row)
            log.warning("bad_row", file=str(row.file), line=row.line, why=row.why)
        return None


def load_dataset(config: DataConfig, codec: TextCodec, template: ChatTemplate, seed: int) -> Dataset:
    """Read and tokenize everything. Raises `ConfigError` for bad rows where they are fatal, and for what is empty."""
    check_pieces(codec)
    reader = _Reader(config, codec, template)
    training = reader.read(config.train)
    if config.validation is not None:
        validation = reader.read(config.validation)[: config.validation_rows]
    else:
        order = np.random.default_rng(seed).permutation(len(training)).tolist()
        chosen = set(order[: config.validation_rows])
        validation = [training[index] for index in sorted(chosen)]
        training = [example for index, example in enumerate(training) if index not in chosen]
    if reader.bad and config.bad_rows == "fatal":
        more = [f"and {reader.bad - len(reader.told)} more"] if reader.bad > len(reader.told) else []
        message = f'{reader.bad} bad rows; data.bad_rows = "skip" leaves them out'
        raise BadRows(message, [*map(str, reader.told), *more])
    if not training and config.validation is None and validation:
        raise ConfigError(
            f"data.validation_rows is {config.validation_rows}, which takes all {len(validation)} good rows of "
            f"{config.train} for validation: none is left to learn from"
        )
    if not training:
        raise ConfigError(f"{config.train} has no row to learn from")
    if config.validation_rows and not validation:
        raise ConfigError(f"{config.validation} has no row to validate on")
    return Dataset(training, validation, reader.bad)


def encode(row: Row, codec: TextCodec, template: ChatTemplate, turns: Turns, max_tokens: int) -> Example:
    """A row's tokens up to the last that is learned. Raises `Unrenderable`."""
    token_ids, targets = tokenize(template.stretches(row.messages, row.tools, turns), codec)
    if len(token_ids) > max_tokens:
        raise Unrenderable(f"messages: {len(token_ids)} tokens, above data.max_tokens = {max_tokens}")
    if not len(targets):
        raise Unrenderable("messages: no token of the assistant's has one before it")
    return Example(row.line, token_ids, targets)


def tokenize(stretches: Iterable[Stretch], codec: TextCodec) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Token ids, and the positions of the assistant's; the first token of all is predicted from nothing, so not one."""
    token_ids: list[int] = []
    positions: list[int] = []
    for stretch in stretches:
        ids = codec.encode(stretch.text)
        if stretch.by_assistant:
            positions += range(max(1, len(token_ids)), len(token_ids) + len(ids))
        token_ids += ids
    return np.array(token_ids, dtype=np.int32), np.array(positions, dtype=np.int64)


def check_pieces(codec: TextCodec) -> None:
    """Refuse a tokenizer that puts something before each text: stretches of one could not be told apart."""
    if codec.decode([*codec.encode("x"), *codec.encode("y")]) != "xy":
        raise ConfigError("the tokenizer puts a space before every text, so that turns cannot be tokenized one by one")
