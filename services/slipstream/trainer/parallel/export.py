"""The weights that a rank holds, by the names of the checkpoint: what it publishes, without gathering any.

    places = places_of(model)          # before the model is spread over ranks
    boxes = boxes_of(ranked, places)   # over all ranks, each entry of each tensor once

A tensor of the checkpoint is a view into a parameter, whose rows lie there in some order (query, key and value are one
parameter; so are the experts of a layer), and a rank holds a box of the parameter. The rows of the tensor that lie in
the box are boxes of the tensor, one for each run of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from slipstream.engine.routes import runs
from slipstream.models.base import Model
from slipstream.models.lora.adapters import adapters_of
from slipstream.trainer.optimizer import plain_name
from slipstream.weights.manifest import Box
from slipstream.weights.straight.packing import TensorBox


@dataclass(frozen=True)
class Place:
    """Where a tensor of the checkpoint lies in a parameter."""

    parameter: str
    offset: int
    """Elements before its first."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Of the tensor: more than two dimensions stand for rows."""
        return (int(np.prod(self.shape[:-1])), self.shape[-1]) if len(self.shape) > 1 else self.shape

    @property
    def row_size(self) -> int:
        return self.shape[-1] if len(self.shape) > 1 else 1

    def row_starts(self) -> NDArray[np.int64]:
        """Element of the parameter that each row begins with."""
        dims = len(self.shape) - 1 if len(self.shape) > 1 else 1
        starts = np.full((1,) * dims, self.offset, np.int64)
        for dim in range(dims):
            steps = np.arange(self.shape[dim]) * self.strides[dim]
            starts = starts + steps.reshape([-1 if each == dim else 1 for each in range(dims)])
        return starts.reshape(-1)


def places_of(model: Model) -> dict[str, Place]:
    """By the names of the checkpoint. The model is whole."""
    # Storages themselves, not where they lie: those of a model on meta lie nowhere.
    parameters = {p.untyped_storage()._cdata: (name, p) for name, p in model.named_parameters()}
    places = {}
    for name, view in model.hf_views().items():
        owner, parameter = parameters[view.untyped_storage()._cdata]
        if view.shape[-1] > 1 and view.stride(-1) != 1:
            raise ValueError(f"{name}: the rows of a checkpoint's tensor must lie in one piece")
        offset = view.storage_offset() - parameter.storage_offset()
        places[name] = Place(owner, int(offset), tuple(view.shape), tuple(view.stride()))
    return places


@torch.no_grad()
def boxes_of(model: Model, places: Mapping[str, Place]) -> list[Box]:
    """Copies of what this rank holds, adapters merged: later steps leave them alone. All ranks take part."""
    return [
        Box(box.name, box.global_shape, box.offsets, box.values.cpu().numpy()) for box in tensor_boxes(model, places)
    ]


@torch.no_grad()
def tensor_boxes(model: Model, places: Mapping[str, Place]) -> list[TensorBox]:
    """The same where the parameters are. All ranks take part."""
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    boxes = [box for name, place in places.items() for box in _boxes(name, place, parameters[place.parameter])]
    adapters = adapters_of(model)
    if adapters is None:
        return boxes
    halves, scale = adapters.halves(), adapters.config.scale
    return [_merged(box, *halves[box.name], scale) if box.name in halves else box for box in boxes]


def _merged(box: TensorBox, a: Tensor, b: Tensor, scale: float) -> TensorBox:
    """A box of whole rows, with what an adapter adds to them."""
    rows = b[box.offsets[0] : box.offsets[0] + len(box.values)]
    return replace(box, values=box.values + scale * (rows @ a))


def _boxes(name: str, place: Place, parameter: Tensor) -> list[TensorBox]:
    offsets, local = held(parameter)
    if not local.numel():  # too small for all ranks to have some
        return []
    size, starts = place.row_size, place.row_starts()
    where = np.stack(np.unravel_index(starts, tuple(parameter.shape)))
    dims = where.shape[0] - 1 if size > 1 else where.shape[0]
    if size > 1 and local.shape[-1] != parameter.shape[-1]:
        raise ValueError(f"{place.parameter} is cut through the rows of {name}")
    where = where - np.array(offsets)[:, None]
    inside = ((where >= 0) & (where < np.array(local.shape)[:, None]))[:dims].all(0)
    rows = local.detach().reshape(-1, size)
    boxes = []
    for first, last in runs(np.asarray(inside)):
        flat = np.ravel_multi_index(tuple(where[:, first:last]), tuple(local.shape))
        values = rows.index_select(0, torch.from_numpy(flat // size).to(rows.device))
        shape = place.tensor_shape
        if len(shape) == 1:
            boxes.append(TensorBox(name, shape, (first,), values.reshape(-1)))
        else:
            boxes.append(TensorBox(name, shape, (first, 0), values))
    return boxes


def held(parameter: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """Where this rank's box of a parameter begins, and its values."""
    if not isinstance(parameter, DTensor):
        return (0,) * parameter.ndim, parameter
    _, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(map(int, offsets)), parameter.to_local()


@torch.no_grad()
def whole_tensors(model: Model, places: Mapping[str, Place], keep: bool) -> dict[str, Tensor]:
    """All weights by name, adapters merged, for whoever wants to `keep` them; all ranks take part, by parameters."""
    by_parameter: dict[str, list[tuple[str, Place]]] = {}
    for name, place in places.items():
        by_parameter.setdefault(place.parameter, []).append((name, place))
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        for tensor, place in by_parameter.get(plain_name(name), []) if keep else []:
            view = whole.detach().cpu().contiguous().as_strided(place.shape, place.strides, place.offset)
            tensors[tensor] = view.reshape(place.tensor_shape).contiguous()
    adapters = adapters_of(model)
    if adapters is not None:
        for name, (a, b) in adapters.halves().items():
            if name in tensors:
                tensors[name] = tensors[name] + adapters.config.scale * (b @ a).cpu()
    return {name: tensors[name] for name in places if name in tensors}
