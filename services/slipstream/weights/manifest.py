"""What a published version consists of, as plain data; to and from the wire; to and from tensors."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from slipstream.api.broadcast.v1 import broadcast_pb2
from slipstream.common.errors import Unsupported, WeightsCorrupt
from slipstream.common.version import PolicyVersion
from slipstream.weights.adapter import Adapter
from slipstream.weights.checksum import slice_checksum

_DTYPES = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2")}
"""What numpy can hold; bfloat16 needs an engine that takes it as it is."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of an element on the way."""


@dataclass(frozen=True)
class WeightSlice:
    """A box of one tensor, in Hugging Face names and coordinates."""

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    crc32: int
    """Of the bytes on the wire; 0 where they do not pass the broadcaster."""
    checksum: int
    """Of the logical elements: `weights/checksum.py`."""

    @property
    def whole(self) -> bool:
        return self.shape == self.global_shape

    @classmethod
    def from_proto(cls, message: broadcast_pb2.Slice) -> WeightSlice:
        if message.quantization:
            raise Unsupported(f"quantization {message.quantization!r} is not supported", slice=message.name)
        return cls(
            message.name,
            tuple(message.global_shape),
            tuple(message.offsets),
            tuple(message.shape),
            message.dtype,
            message.size_bytes,
            message.crc32,
            message.checksum,
        )

    def to_proto(self) -> broadcast_pb2.Slice:
        return broadcast_pb2.Slice(
            name=self.name,
            global_shape=self.global_shape,
            offsets=self.offsets,
            shape=self.shape,
            dtype=self.dtype,
            size_bytes=self.size_bytes,
            crc32=self.crc32,
            checksum=self.checksum,
        )


@dataclass(frozen=True)
class Probe:
    """A fixed prompt and the trainer's log-probabilities of each of its tokens but the first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float
    """Largest allowed absolute difference."""

    @classmethod
    def from_proto(cls, message: broadcast_pb2.Probe) -> Probe:
        return cls(tuple(message.token_ids), tuple(message.logprobs), message.tolerance)

    def to_proto(self) -> broadcast_pb2.Probe:
        return broadcast_pb2.Probe(token_ids=self.token_ids, logprobs=self.logprobs, tolerance=self.tolerance)


@dataclass(frozen=True)
class Source:
    """Where the bytes of one rank's slices are."""

    slice_count: int
    address: str
    """Transport and address, as in "shm://127.0.0.1:7003"; empty if the broadcaster has them."""

    @property
    def transport(self) -> str:
        return self.address.partition("://")[0]

    @property
    def peer(self) -> str:
        """host:port of whoever lends them."""
        return self.address.partition("://")[2]


@dataclass(frozen=True)
class Manifest:
    """A sealed version: its slices in the order of their bytes, and the probe for it."""

    version: PolicyVersion
    slices: tuple[WeightSlice, ...]
    probe: Probe | None = None
    sealed_unix_ms: int = 0
    adapter: Adapter | None = None
    """What it is to be added to, if it is no whole model."""
    sources: tuple[Source, ...] = ()
    """Where the bytes are, in the order of the slices; none if the broadcaster has them all."""

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.slices)

    @classmethod
    def from_proto(cls, message: broadcast_pb2.Manifest) -> Manifest:
        return cls(
            PolicyVersion.from_proto(message.version),
            tuple(WeightSlice.from_proto(part) for part in message.slices),
            Probe.from_proto(message.probe) if message.HasField("probe") else None,
            message.sealed_unix_ms,
            Adapter.from_proto(message.adapter) if message.HasField("adapter") else None,
            tuple(Source(source.slice_count, source.address) for source in message.sources),
        )

    def to_proto(self) -> broadcast_pb2.Manifest:
        return broadcast_pb2.Manifest(
            version=self.version.to_proto(),
            slices=[part.to_proto() for part in self.slices],
            size_bytes=self.size_bytes,
            probe=None if self.probe is None else self.probe.to_proto(),
            sealed_unix_ms=self.sealed_unix_ms,
            adapter=None if self.adapter is None else self.adapter.to_proto(),
            sources=[broadcast_pb2.Source(slice_count=s.slice_count, address=s.address) for s in self.sources],
        )

    def parts(self) -> list[tuple[Source, tuple[WeightSlice, ...]]]:
        """The slices of each source."""
        found, at = [], 0
        for source in self.sources:
            found.append((source, self.slices[at : at + source.slice_count]))
            at += source.slice_count
        return found


@dataclass(frozen=True)
class Box:
    """Values of a part of one tensor, in Hugging Face names and coordinates."""

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: np.ndarray


def describe_tensors(tensors: Mapping[str, np.ndarray]) -> tuple[tuple[WeightSlice, ...], list[memoryview]]:
    """Whole tensors as slices, with their bytes in the same order. Non-contiguous ones are copied."""
    return describe_boxes(Box(name, values.shape, (0,) * values.ndim, values) for name, values in tensors.items())


def describe_boxes(boxes: Iterable[Box]) -> tuple[tuple[WeightSlice, ...], list[memoryview]]:
    """The same of parts of tensors."""
    slices, buffers = [], []
    for box in boxes:
        name, array = box.name, np.ascontiguousarray(box.values)
        dtype = next((label for label, known in _DTYPES.items() if known == array.dtype), None)
        if dtype is None:
            raise Unsupported(f"{name} has dtype {array.dtype}", slice=name)
        data = memoryview(array.reshape(-1).view(np.uint8).data)
        shape, whole, offsets = tuple(array.shape), tuple(box.global_shape), tuple(box.offsets)
        checksum = slice_checksum(name, array, whole, offsets)
        slices.append(WeightSlice(name, whole, offsets, shape, dtype, data.nbytes, zlib.crc32(data), checksum))
        buffers.append(data)
    return tuple(slices), buffers


MAX_PARTS = 4096
"""Slices of one tensor at most: every pair that starts within the same rows is looked at for an overlap."""


def fits(part: WeightSlice) -> bool:
    """Whether a slice is a box inside its tensor and has the bytes of its elements."""
    inside = len(part.global_shape) == len(part.offsets) == len(part.shape) and all(
        offset >= 0 and size >= 0 and offset + size <= whole
        for offset, size, whole in zip(part.offsets, part.shape, part.global_shape, strict=True)
    )
    return inside and part.size_bytes == prod(part.shape) * ITEM_BYTES[part.dtype]


def check_geometry(slices: Sequence[WeightSlice]) -> None:
    """Raise `WeightsCorrupt` unless the slices are boxes that tile each of their tensors exactly."""
    tensors: dict[str, list[WeightSlice]] = {}
    for part in slices:
        if not fits(part):
            raise WeightsCorrupt(f"slice of {part.name} does not fit its tensor", slice=part.name)
        tensors.setdefault(part.name, []).append(part)
    for name, parts in tensors.items():
        same = all(part.global_shape == parts[0].global_shape and part.dtype == parts[0].dtype for part in parts)
        full = sum(prod(part.shape) for part in parts) == prod(parts[0].global_shape)
        if not same or not full or len(parts) > MAX_PARTS or _any_overlap(parts):
            raise WeightsCorrupt(f"slices of {name} do not tile it", slice=name)


def check_model(manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `WeightsCorrupt` unless a version has just the tensors of a model, in its shapes.

    Asked before any byte moves: engines there are that take a version without one of its layers and say nothing.
    """
    there = {part.name: part.global_shape for part in manifest.slices}
    if names := shapes.keys() ^ there.keys():
        name = min(names)
        what = f"the version lacks {name}" if name in shapes else f"the model has no {name}"
        raise WeightsCorrupt(what, slice=name, version=manifest.version)
    for name, shape in shapes.items():
        if there[name] != shape:
            raise WeightsCorrupt(f"{name} has shape {there[name]}, not {shape}", slice=name, version=manifest.version)


def _any_overlap(parts: Sequence[WeightSlice]) -> bool:
    if len(parts) == 1:
        return False
    starts = np.array([part.offsets for part in parts])
    ends = starts + np.array([part.shape for part in parts])
    return any(((starts[i] < ends[:i]) & (starts[:i] < ends[i])).all(-1).any() for i in range(1, len(parts)))


def assemble(manifest: Manifest, data: bytearray) -> dict[str, np.ndarray]:
    """Check every slice's CRC and that its values are finite; give the tensors back.

    They are views into `data` where a slice is a whole tensor.
    """
    tensors: dict[str, np.ndarray] = {}
    if len(data) != manifest.size_bytes:
        raise WeightsCorrupt(f"{len(data)} bytes instead of {manifest.size_bytes}", version=manifest.version)
    view, at = memoryview(data), 0
    for part in manifest.slices:
        raw = view[at : at + part.size_bytes]
        at += part.size_bytes
        if zlib.crc32(raw) != part.crc32:
            raise WeightsCorrupt(f"CRC of {part.name} differs", slice=part.name, version=manifest.version)
        if part.dtype not in _DTYPES:
            raise Unsupported(f"dtype {part.dtype} is not supported here", slice=part.name)
        values = np.frombuffer(raw, _DTYPES[part.dtype]).reshape(part.shape)
        if not np.isfinite(values).all():
            raise WeightsCorrupt(f"{part.name} holds values that are not finite", slice=part.name)
        if part.whole:
            tensors[part.name] = values
        else:
            target = tensors.setdefault(part.name, np.empty(part.global_shape, values.dtype))
            target[tuple(slice(o, o + n) for o, n in zip(part.offsets, part.shape, strict=True))] = values
    return tensors


def verify_tensors(
    manifest: Manifest, live: Mapping[str, Any], slices: Sequence[WeightSlice] | None = None, *, partly: bool = False
) -> int:
    """Compare the checksum of slices, all by default, with an engine's live parameters; return how many.

    Raises `WeightsCorrupt` at the first that differs. The names on both sides must be the same, but for those that
    a rank of several leaves to the others: `partly`.
    """
    names = {part.name for part in manifest.slices}
    if names != live.keys() and not (partly and names > live.keys()):
        raise WeightsCorrupt("parameters and manifest differ in names", slice=min(names ^ live.keys()))
    held = [part for part in (manifest.slices if slices is None else slices) if part.name in live]
    for part in held:
        values = np.asarray(live[part.name])
        if tuple(values.shape) != part.global_shape:
            raise WeightsCorrupt(f"{part.name} has another shape in the engine", slice=part.name)
        box = values[tuple(slice(o, o + n) for o, n in zip(part.offsets, part.shape, strict=True))]
        box = _bfloat16_bits(box) if part.dtype == "bfloat16" else box.astype(_DTYPES[part.dtype], copy=False)
        if slice_checksum(part.name, box, part.global_shape, part.offsets) != part.checksum:
            raise WeightsCorrupt(f"checksum of {part.name} differs", slice=part.name, version=manifest.version)
    return len(held)


def _bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Of values that came of bfloat16: the upper half of each float32."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
