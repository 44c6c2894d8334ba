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


def samples_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Its training samples: itself, and those of an episode that went on from other tokens."""
    return [record, *record.get("further_samples", [])]


def spans_of(record: dict[str, Any]) -> list[tuple[int, str]]:
    """How many tokens which version sampled, in order, over all its samples."""
    return [(int(n), str(version)) for sample in samples_of(record) for n, version in sample.get("versions", [])]


def read_rollouts(directory: Path, pattern: str = f"*{SUFFIX}") -> Iterator[dict[str, Any]]:
    """Records of all runners in `rollouts/`, of each the oldest first. Raises `RunDirError` for what is no file."""
    for path in sorted(directory.glob(pattern)):
        for file in with_older(path):
            try:
                yield from read_compressed(file)
            except OSError as error:
                raise RunDirError(f"{file} cannot be read: {error.strerror}") from None
