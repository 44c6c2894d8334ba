"""The weights of a rank as they are kept for readers: on the device where they are, in the order of vLLM's parameters.

In that order a version is one stretch there, or few, and is read as such.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from slipstream.engine.vllm.layout import group
from slipstream.weights.straight.packing import TensorBox


def whole_boxes(tensors: Mapping[str, Tensor]) -> list[TensorBox]:
    """Tensors that nobody else has a part of."""
    return [TensorBox(name, tuple(t.shape), (0,) * t.ndim, t) for name, t in tensors.items()]


def in_engine_order(boxes: Sequence[TensorBox]) -> list[TensorBox]:
    """Sorted as an engine lays them out; parts of one tensor by where they begin."""
    groups = group({box.name: box.global_shape for box in boxes})
    places = {name: at for at, name in enumerate(name for each in groups for name in each.names)}
    return sorted(boxes, key=lambda box: (places[box.name], box.offsets))
