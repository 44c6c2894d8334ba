"""Safetensors files of a model directory, one at a time: whoever streams them never holds more than one.

A directory has `model.safetensors`, or several files and an index that tells which tensor is in which.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from slipstream.common.config import ConfigError
from slipstream.common.disk import replace_file

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 4 * 2**30
"""Of a file, unless one tensor is larger."""

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


class ShardReader:
    """Tensors by name. Only the file that was read last is mapped; let go of its tensors before the next one."""

    def __init__(self, model_dir: Path) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Of all tensors, in the order of the files."""
        self._dtypes: dict[str, str] = {}
        self._file_of: dict[str, Path] = {}
        self._open: tuple[Path, Any] | None = None
        for file in _weight_files(model_dir):
            opened = _opened(file)
            for name in opened.keys():  # noqa: SIM118, no mapping
                if name in self._file_of:
                    raise ConfigError(f"{name} is in both {self._file_of[name].name} and {file.name} of {model_dir}")
                self._file_of[name] = file
                described = opened.get_slice(name)
                self.shapes[name] = tuple(described.get_shape())
                self._dtypes[name] = described.get_dtype()

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor; raises `ConfigError` for one that is quantised or holds integers."""
        found = _DTYPES.get(self._dtypes[name])
        if found is None:
            raise ConfigError(
                f"{name} of {self._file_of[name]} is {self._dtypes[name]}, not one of {', '.join(_DTYPES)}"
            )
        return found

    def read(self, name: str) -> Tensor:
        """One tensor, in memory that is the file's."""
        file = self._file_of[name]
        if self._open is None or self._open[0] != file:
            self._open = None  # unmapped before the next is mapped
            self._open = (file, _opened(file))
        self.dtype(name)
        return self._open[1].get_tensor(name)


def write_shards(
    model_dir: Path, sizes_bytes: Mapping[str, int], read: Callable[[str], Tensor], shard_bytes: int = SHARD_BYTES
) -> None:
    """Write tensors, which `read` gives when their file's turn comes. Each file whole or not at all, the index last.

    Raises:
        DiskFull: there is no room.
    """
    shards = list(_planned(sizes_bytes, shard_bytes))
    if len(shards) == 1:
        _write(model_dir / WEIGHTS_FILE, shards[0], read)
        (model_dir / INDEX_FILE).unlink(missing_ok=True)  # an older one would be believed
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(model_dir / file, names, read)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(sizes_bytes.values())}, "weight_map": weight_map}
    replace_file(model_dir / INDEX_FILE, json.dumps(index, indent=2).encode() + b"\n")
    (model_dir / WEIGHTS_FILE).unlink(missing_ok=True)


def check_names(expected: Iterable[str], found: Iterable[str]) -> None:
    """Raise `ValueError` with the names that are missing or that nobody asked for."""
    expected, found = set(expected), set(found)
    if expected != found:
        missing, unexpected = _listed(expected - found), _listed(found - expected)
        raise ValueError(f"tensors do not match the model: missing {missing}; unexpected {unexpected}")


def check_shapes(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `ValueError` for names or shapes that are not those expected."""
    check_names(expected, found)
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise ValueError(f"{name} has shape {tuple(found[name])}, expected {shape}")


def check_layers(n_layers: int, found: Iterable[str]) -> None:
    """Raise `ValueError` for more layers than `found` has names of, before anybody builds that many."""
    parts = (name.split(".", 3) for name in found if name.startswith("model.layers."))
    there = len({part[2] for part in parts})
    if n_layers > there:
        raise ValueError(f"it is to have {n_layers} layers, and has tensors of {there}")


def _listed(names: set[str], most: int = 40) -> str:
    shown = ", ".join(sorted(names)[:most]) or "none"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _weight_files(model_dir: Path) -> list[Path]:
    index = model_dir / INDEX_FILE
    if not index.exists():
        return [model_dir / WEIGHTS_FILE]
    try:
        names = {Path(name).name for name in json.loads(index.read_text())["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ConfigError(f"{index} is no index of safetensors files") from None
    if "" in names:
        raise ConfigError(f"{index} names a file of no name")
    return [model_dir / name for name in sorted(names)]


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise ConfigError(f"{file.parent} has no {file.name}") from None
    except (SafetensorError, OSError, ValueError) as error:  # a directory; a name that no file can have
        raise ConfigError(f"{file} cannot be read: {error}") from None


def _planned(sizes_bytes: Mapping[str, int], shard_bytes: int) -> Iterator[list[str]]:
    """Names of each file, filled in order."""
    names: list[str] = []
    filled_bytes = 0
    for name, size_bytes in sizes_bytes.items():
        if names and filled_bytes + size_bytes > shard_bytes:
            yield names
            names, filled_bytes = [], 0
        names.append(name)
        filled_bytes += size_bytes
    yield names


def _write(file: Path, names: list[str], read: Callable[[str], Tensor]) -> None:
    replace_file(file, save({name: read(name).contiguous() for name in names}, metadata={"format": "pt"}))
