"""A model that no rank has room for where it computes: built without weights, spread, then given its weights.

model = without_weights(sizes)
learner = Learner(model, ..., world)          # each rank gets room for its part, and makes tables by itself
learner.fill(source)                          # `source`: the whole model at rank 0, None elsewhere; or a checkpoint
"""

from __future__ import annotations

from typing import Any

import torch

from slipstream.models.base import Model, Sizes
from slipstream.models.meta import on_meta
from slipstream.models.registry import find_architecture
from slipstream.trainer.optimizer import plain_name
from slipstream.trainer.parallel.export import held
from slipstream.trainer.parallel.world import World


def without_weights(sizes: Sizes) -> Model:
    """The model on meta."""
    with on_meta():
        return find_architecture(sizes.architecture).build_model(sizes)


@torch.no_grad()
def fill(model: Any, source: Any, world: World) -> None:
    """Give each rank its part of `source`, by one parameter after another, which the CPU has whole meanwhile.

    Collective.
    """
    given = {} if source is None else {plain_name(name): each for name, each in source.named_parameters()}
    for full_name, target in model.named_parameters():
        name = plain_name(full_name)
        whole = given[name].detach().cpu() if given else torch.empty(target.shape, dtype=target.dtype)
        world.share([whole])
        offsets, part = held(target)
        box = tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))
        part.copy_(whole[box])


@torch.no_grad()
def set_tables(model: Any, device: torch.device) -> None:
    """Give buffers their values, which follow from the sizes of the model: every rank makes them as a CPU does.

    Raises `ValueError` for a module whose buffers cannot be made so.
    """
    for name, module in model.named_modules():
        buffers = [buffer for buffer, _ in module.named_buffers(recurse=False)]
        if not buffers:
            continue
        if not hasattr(module, "_init_self_buffers"):
            needed = "several ranks need a module with buffers to have torchtitan's _init_self_buffers"
            raise ValueError(f"{name}: {needed}")
        module._init_self_buffers(buffer_device=torch.device("cpu"))
        for buffer in buffers:
            setattr(module, buffer, getattr(module, buffer).to(device))
