"""torch.distributed.checkpoint over safetensors: one file a rank, and one JSON file that tells which part is where.

torch's own writers pickle what describes the tensors; nothing that is read here can run code. Only tensors are taken.
(Ranks that plan a checkpoint together exchange the plan as torch does it, inside their process group.)
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from slipstream.common.disk import replace_file, sync_directory
from slipstream.trainer.checkpoint_store import METADATA_FILE, file_checksum

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.int32, torch.int64)
}


class SafetensorsWriter(StorageWriter):
    """Writes into a directory, which the first rank makes, and commits when all ranks have written."""

    def __init__(self, begin: Callable[[], Path], directory: Path, commit: Callable[[], None]) -> None:
        self._begin = begin
        self._directory = directory
        self._commit = commit

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between two."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self._begin()  # before the plan comes back to the others, who write after that

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        others = [item.index.fqn for item in plan.items if item.type is WriteItemType.BYTE_IO]
        if others:
            raise TypeError(f"only tensors can be saved: {others[:3]}")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=f"rank-{rank:05d}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        file = str(plan.storage_data)
        tensors: dict[str, Tensor] = {}
        for item in plan.items:
            data = planner.resolve_data(item)
            assert isinstance(data, Tensor)
            tensors[_key(item.index)] = data.detach().to("cpu").contiguous()
        path = self._directory / file
        save_file(tensors, path)
        with path.open("rb") as written:
            os.fsync(written.fileno())
        where = (file, file_checksum(path), path.stat().st_size)
        results = [WriteResult(item.index, tensors[_key(item.index)].nbytes, where) for item in plan.items]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        file_of = {_key(result.index): result.storage_data[0] for part in results for result in part}
        written = {result.storage_data for part in results for result in part}
        document = {
            "format": 1,
            "files": {file: checksum for file, checksum, _ in written},
            "sizes": {file: size_bytes for file, _, size_bytes in written},
            "tensors": {name: _described(name, found, file_of) for name, found in metadata.state_dict_metadata.items()},
        }
        replace_file(self._directory / METADATA_FILE, json.dumps(document).encode() + b"\n")
        sync_directory(self._directory)
        self._commit()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # never found by an id


class SafetensorsReader(StorageReader):
    """Reads the parts that a rank needs, however many ranks wrote them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._document = json.loads((directory / METADATA_FILE).read_text())
        self.shapes = {name: tuple(each["shape"]) for name, each in self._document["tensors"].items()}
        self.dtypes = {name: _DTYPES[each["dtype"]] for name, each in self._document["tensors"].items()}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between two."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found: dict[str, Any] = {}
        where: dict[MetadataIndex, str] = {}
        for name, each in self._document["tensors"].items():
            chunks = [ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"])) for c in each["chunks"]]
            properties = TensorProperties(dtype=self.dtypes[name])
            found[name] = TensorStorageMetadata(properties, torch.Size(each["shape"]), chunks)
            where |= {MetadataIndex(name, c["offsets"]): c["file"] for c in each["chunks"]}
        return Metadata(state_dict_metadata=found, planner_data={}, storage_data=where)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._where: dict[MetadataIndex, str] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self._where[item.storage_index], []).append(item)
        for file, items in by_file.items():
            with safe_open(self._directory / file, framework="pt") as opened:
                for item in items:
                    part = opened.get_slice(_key(item.storage_index))
                    box = [
                        slice(start, start + length)
                        for start, length in zip(item.storage_offsets, item.lengths, strict=True)
                    ]
                    data = part[tuple(box)] if box else opened.get_tensor(_key(item.storage_index))
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(data)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # never found by an id


def _key(index: MetadataIndex) -> str:
    """Of a part of a tensor in its file."""
    return f"{index.fqn}@{','.join(map(str, index.offset or ()))}"


def _described(name: str, found: Any, file_of: dict[str, str]) -> dict[str, Any]:
    chunks = [
        {"offsets": list(c.offsets), "sizes": list(c.sizes), "file": file_of[_key(MetadataIndex(name, c.offsets))]}
        for c in found.chunks
    ]
    dtype = str(found.properties.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise TypeError(f"{name} is {dtype}, not one of {', '.join(_DTYPES)}")
    return {"dtype": dtype, "shape": list(found.size), "chunks": chunks}
