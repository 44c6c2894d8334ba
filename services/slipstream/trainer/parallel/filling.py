"""A model that no rank has room for where it computes: built without weights, spread, then given its weights.

model = without_weights(sizes)
learner = Learner(model, ..., world)          # each rank gets room for its part
learner.fill(source)                          # `source`: the whole model at rank 0, None elsewhere
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slipstream.models.base import Model, Sizes
from slipstream.models.registry import find_architecture
from slipstream.trainer.optimizer import plain_name
from slipstream.trainer.parallel.export import held
from slipstream.trainer.parallel.world import World


def without_weights(sizes: Sizes) -> Model:
    """The model on meta."""
    with torch.device("meta"):
        return find_architecture(sizes.architecture).build_model(sizes)


@torch.no_grad()
def fill(model: Any, source: Any, world: World) -> None:
    """Give each rank its part of `source`, by one tensor after another, which is whole in memory of the CPU meanwhile.

    Parameters and buffers. Collective.
    """
    given = {} if source is None else dict(_tensors_of(source))
    for name, target in _tensors_of(model):
        whole = given[name].detach().cpu() if given else torch.empty(target.shape, dtype=target.dtype)
        world.share([whole])
        offsets, part = held(target)
        box = tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))
        part.copy_(whole[box])


def _tensors_of(model: Any) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield plain_name(name), tensor
