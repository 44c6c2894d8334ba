"""Reads back the rollouts that the runners of a run recorded, while it goes on or after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.common.compressed_lines import SUFFIX, read_compressed
from slipstream.common.disk import with_older
from slipstream.launcher.errors import RunDirError

EVALUATIONS = f"*.evaluation{SUFFIX}"


def rollout_id(record: dict[str, Any]) -> str:
    """Its name in the run: group, attempt and sample."""
    return f"{record.get('group_id')}.{record.get('attempt')}.{record.get('sample')}"


def read_rollouts(directory: Path, pattern: str = f"*{SUFFIX}") -> Iterator[dict[str, Any]]:
    """Records of all runners in `rollouts/`, of each the oldest first. Raises `RunDirError` for what is no file."""
    for path in sorted(directory.glob(pattern)):
        for file in with_older(path):
            try:
                yield from read_compressed(file)
            except OSError as error:
                raise RunDirError(f"{file} cannot be read: {error.strerror}") from None
