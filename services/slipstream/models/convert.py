"""`slipstream convert`: a model in the form that training starts from, tensor by tensor. Run as a process of its own.

    python -m slipstream.models.convert SOURCE TARGET --dtype bfloat16 --shard-mib 4096

Never more than one file of the source and one of the target is in memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.common.config import ConfigError
from slipstream.common.disk import make_directory, replace_file
from slipstream.common.errors import DiskFull
from slipstream.common.extras import explain_import
from slipstream.models.checkpoint import check_source, expected_shapes
from slipstream.models.registry import ARCHITECTURE_KEY, BUILT_IN, CONFIG_FILE, read_config, sizes_of
from slipstream.models.shards import SHARD_BYTES, ShardReader, check_layers, check_shapes, write_shards

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files of a model directory that are taken over as they are."""


@dataclass(frozen=True)
class Source:
    """A model that can be read tensor by tensor, checked to be whole."""

    config: dict[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    dtype: Callable[[str], torch.dtype]
    read: Callable[[str], Tensor]
    companions: Mapping[str, Callable[[], bytes]]


def convert(source: Source, target: Path, dtype: torch.dtype | None, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a model directory, `config.json` last. Without `dtype` tensors keep theirs. Raises `DiskFull`."""

    make_directory(target)
    dtypes = {name: dtype or source.dtype(name) for name in source.shapes}
    sizes_bytes = {name: torch.Size(shape).numel() * dtypes[name].itemsize for name, shape in source.shapes.items()}
    write_shards(target, sizes_bytes, lambda name: source.read(name).to(dtypes[name]), shard_bytes)
    for name, content in source.companions.items():
        replace_file(target / name, content())
    kept = {key: value for key, value in source.config.items() if key not in (ARCHITECTURE_KEY, "dtype")}
    kept["torch_dtype"] = str(Counter(dtypes.values()).most_common(1)[0][0]).removeprefix("torch.")
    replace_file(target / CONFIG_FILE, json.dumps(kept, indent=2).encode() + b"\n")


def open_source(source: str) -> Source:
    """A model directory, a GGUF file, or an installed package that holds one. Raises `ConfigError`."""
    path = Path(source)
    if path.is_dir():
        return _directory(path)
    if path.is_file():
        return _gguf(path)
    return _gguf(_packaged(source))


def _directory(model_dir: Path) -> Source:
    if not (model_dir / CONFIG_FILE).exists():
        raise ConfigError(f"{model_dir} has no {CONFIG_FILE}")
    config = read_config(model_dir)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in BUILT_IN:
        raise ConfigError(f"{model_dir}: model_type is {kind!r}, and built in are {', '.join(BUILT_IN)}")
    reader = ShardReader(model_dir)
    try:
        sizes = sizes_of(kind, config)
    except ConfigError as error:
        raise ConfigError(f"{model_dir}: {error}") from None
    try:
        check_layers(sizes.n_layers, reader.shapes)
        expected = expected_shapes(sizes)
        check_source(expected, reader)
    except ValueError as error:
        raise ConfigError(f"{model_dir}: {error}") from None
    files = {name: (model_dir / name).read_bytes for name in COMPANIONS if (model_dir / name).is_file()}
    shapes = {name: shape for name, shape in reader.shapes.items() if name in expected}
    return Source(config, shapes, reader.dtype, reader.read, files)


def _gguf(file: Path) -> Source:
    from slipstream.models.gguf import GgufModel

    model = GgufModel(file)
    try:
        check_shapes(expected_shapes(model.sizes), model.shapes)
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from None
    files = {name: (lambda content=content: content) for name, content in model.tokenizer_files().items()}
    return Source(model.sizes.to_hf(), model.shapes, lambda _: torch.float32, model.read, files)


def _packaged(name: str) -> Path:
    """The one GGUF file of an installed package, which is not imported."""
    module = name.replace("-", "_")
    found = importlib.util.find_spec(module) if module.isidentifier() else None
    folders = list(found.submodule_search_locations or []) if found else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if len(files) != 1:
        said = f"holds {len(files)} GGUF files" if found else "is no directory, no file and no installed package"
        raise ConfigError(f"{name!r} {said}")
    return files[0]


def main(argv: Sequence[str] | None = None) -> None:
    """The command; exits with 2 and one line when it cannot be done."""
    parser = argparse.ArgumentParser("slipstream convert", description="Write a model in Hugging Face's form.")
    parser.add_argument("source", help="a model directory, a GGUF file, or an installed package that holds one")
    parser.add_argument("target", type=Path, help="the directory to make")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="of all tensors; they keep theirs without it")
    parser.add_argument("--shard-mib", type=int, default=SHARD_BYTES >> 20, help="of a file (default: %(default)s)")
    given = parser.parse_args(argv)
    try:
        if given.shard_mib < 1:
            raise ConfigError(f"--shard-mib {given.shard_mib}: must be 1 or more")
        if given.target.exists() and (not given.target.is_dir() or any(given.target.iterdir())):
            raise ConfigError(f"{given.target} exists already and is not an empty directory")
        source = open_source(given.source)
        convert(source, given.target, DTYPES.get(given.dtype), given.shard_mib << 20)
    except ConfigError as error:
        sys.exit(_refused(str(error)))
    except DiskFull as error:
        sys.exit(_refused(error.message))
    except OSError as error:
        if error.filename is None:
            raise
        sys.exit(_refused(f"{error.filename}: {(error.strerror or '').lower()}"))
    except ModuleNotFoundError as error:
        sys.exit(_refused(explain_import("slipstream convert", error, "convert")))
    count = sum(torch.Size(shape).numel() for shape in source.shapes.values())
    print(f"{given.target}: {source.config['architectures'][0]}, {count:,} parameters in {len(source.shapes)} tensors")


def _refused(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
