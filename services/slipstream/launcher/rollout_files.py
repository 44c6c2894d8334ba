"""Reads back the rollouts that the runners of a run recorded, while it goes on or after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.common.compressed_lines import SUFFIX, read_compressed
from slipstream.common.disk import with_older
from slipstream.launcher.errors import RunDirError
from slipstream.launcher.metrics_records import is_number

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


@dataclass
class Damage:
    """What was left out of rollouts that were read."""

    bytes_by_file: dict[Path, int] = field(default_factory=dict[Path, int])
    """Of no whole frame: damaged, or at the end of a file half-written."""
    records: int = 0
    """Records that no runner writes."""

    def lose_bytes(self, path: Path, count: int) -> None:
        self.bytes_by_file[path] = self.bytes_by_file.get(path, 0) + count

    def sentences(self) -> list[str]:
        """One for each file, and one for the records."""
        said = [
            f"{path}: {count} bytes are damaged or half-written, and left out"
            for path, count in self.bytes_by_file.items()
        ]
        if self.records:
            said.append(f"{self.records} record{'s are' if self.records > 1 else ' is'} of no rollout, and left out")
        return said


def is_rollout(record: dict[str, Any]) -> bool:
    """Whether its fields have the types that a runner writes."""
    timings, further, roles = record.get("timings", {}), record.get("further_samples", []), record.get("roles", [])
    if not isinstance(record.get("group_id", ""), str) or not isinstance(timings, dict):
        return False
    if not _are_tables(further) or not _are_tables(roles):
        return False
    numbers = [record.get(name, 0) for name in ("time_s", "reward", "turns", "attempt")]
    numbers += [*timings.values(), *(role.get("reward", 0) for role in roles)]
    return all(map(is_number, numbers)) and all(
        _are_pairs(sample.get(name, [])) for sample in (record, *further) for name in ("versions", "loss_ranges")
    )


def _are_tables(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(each, dict) for each in found)


def _are_pairs(found: Any) -> bool:
    """Lists of a number and what goes with it."""
    return isinstance(found, list) and all(
        isinstance(each, list) and len(each) == 2 and isinstance(each[0], int) and is_number(each[0]) for each in found
    )


def read_rollouts(
    directory: Path, pattern: str = f"*{SUFFIX}", damage: Damage | None = None
) -> Iterator[dict[str, Any]]:
    """Records of all runners in `rollouts/`, of each the oldest first. Raises `RunDirError` for what is no file.

    What is left out is counted in `damage`.
    """
    damage = damage or Damage()
    for path in sorted(directory.glob(pattern)):
        for file in with_older(path):
            try:
                for record in read_compressed(file, partial(damage.lose_bytes, file)):
                    if is_rollout(record):
                        yield record
                    else:
                        damage.records += 1
            except OSError as error:
                raise RunDirError(f"{file} cannot be read: {error.strerror}") from None
