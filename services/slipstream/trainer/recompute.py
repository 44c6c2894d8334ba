"""Which activations of a block are kept for the backward pass, and which are computed again."""

from __future__ import annotations

from typing import Any, Literal

import torch

from slipstream.models.light_import import light_imports

Checkpointing = Literal["none", "selective", "full"]
"""Which activations of a block are computed again in the backward pass, with the same replayed routes."""


def apply(checkpointing: Checkpointing, model: Any) -> None:
    """Wrap each block of a model."""
    if checkpointing == "none":
        return
    with light_imports():  # here, as it takes half a second
        from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    class KeptProducts(SelectiveAC):
        """torchtitan's choice, and what experts' products gave, which are most of a block of experts and not in it."""

        def get_save_ops(self) -> set[Any]:
            return super().get_save_ops() | {torch.ops.aten._grouped_mm.default}

    if checkpointing == "full":
        FullAC(FullAC.Config()).apply(model)
    else:
        KeptProducts(SelectiveAC.Config()).apply(model)
