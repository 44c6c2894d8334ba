"""A trainer's side of a weight update, in a process of its own: keeps versions on a device, and offers them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def lend(pipe: Connection, device_name: str, transport: str, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
    """Answers "ready"; then, to each step it is told, slices, source, offer, and the seconds that keeping it took.

    What is told after that ends the loan. The first element of the first tensor is the step; None ends the process.
    """
    import torch

    from slipstream.common.version import PolicyVersion
    from slipstream.trainer.kept import in_engine_order, whole_boxes
    from slipstream.weights.config import WeightsConfig
    from slipstream.weights.straight.lender import Lender

    device = torch.device(device_name)
    config = WeightsConfig.model_validate({"transport": transport, "dtype": dtype})
    lender = Lender(config, device, "127.0.0.1:1")
    pipe.send("ready")
    weights = {name: _random(shape, device, dtype) for name, shape in shapes.items()}
    boxes = in_engine_order(whole_boxes(weights))
    while (step := _told(pipe)) is not None:
        boxes[0].values.view(-1)[0] = step
        began_s = time.monotonic()
        shard = lender.keep(PolicyVersion(1, step), boxes)
        keep_s = time.monotonic() - began_s
        copy = lender.copies.lend(PolicyVersion(1, step), str(step))
        offer = lender.link.offer(copy.memory, copy.size_bytes, "reader")
        slices = [part.to_proto().SerializeToString() for part in shard.slices]
        pipe.send((slices, shard.source, offer.SerializeToString(), keep_s))
        _told(pipe)
        lender.copies.give_back(str(step))
    lender.close()


def _told(pipe: Connection) -> Any:
    """The next message; None too when the one that sends them has ended."""
    try:
        return pipe.recv()
    except EOFError:
        return None


def _random(shape: tuple[int, ...], device: torch.device, dtype: str) -> torch.Tensor:
    """Weights with which a model computes: norms of 1, matrices small."""
    import torch

    made = torch.ones(shape, device=device, dtype=getattr(torch, dtype))
    return made if len(shape) == 1 else made.normal_(0, 0.02)
