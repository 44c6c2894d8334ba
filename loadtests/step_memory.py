"""What a step of a shape holds on a card, computed without one: tensors on the device `meta` have sizes and no data.

    python loadtests/step_memory.py qwen3-30b-a3b-lora --checkpointing full

Counts the memory of every tensor that a pass makes while anything refers to it, of a model in bfloat16 with as many
layers as `--layers`; what they add to is in proportion. What allocators round up is not in it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainer_shapes import SHAPES, Shape

from slipstream.models.documents import Documents
from slipstream.models.lora.adapters import attach
from slipstream.trainer import recompute

META = torch.device("meta")
HEAD_ROWS = 256
"""Whose logits exist at once: a card's kernels hold those of all rows in half the bytes, beside what is counted."""


class Held(TorchDispatchMode):
    """Bytes of all that operators made and somebody still refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and (storage := leaf.untyped_storage())._cdata not in given:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, self.now())
        return made

    def now(self) -> int:
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        return sum(size for _, size in self._alive.values())


@dataclass(frozen=True)
class StepMemory:
    """Bytes, of a micro-batch of one document."""

    kept: int
    """By the forward pass for the backward pass."""
    most: int
    """At once, in both, weights left out."""


def step_memory(shape: Shape, layers: int, context: int, checkpointing: recompute.Checkpointing) -> StepMemory:
    """Of so many layers with ends; the sums of gradients are in `most`."""
    sizes = shape.sizes.model_copy(update={"n_layers": layers})
    with META:
        model: Any = shape.build(sizes)
    if shape.lora is not None:
        attach(model, shape.lora, 0)
    model.to(torch.bfloat16)
    recompute.apply(checkpointing, model)
    documents = Documents.of_lengths([context], META)
    rows_TLK = torch.zeros(context, sizes.moe_layers, sizes.top_k, dtype=torch.uint8, device=META)
    tokens_1T = torch.zeros(1, context, dtype=torch.int64, device=META)
    with Held() as held:
        model.routes.begin(replay_TLK=rows_TLK if sizes.moe_layers else None, balance=True)
        hidden_1TD = model.hidden(tokens_1T, documents.positions_1T, documents)
        kept = held.now()
        logp_T, _ = model.target_logps(hidden_1TD[0], tokens_1T[0], None, HEAD_ROWS)
        (logp_T.sum() + model.routes.balance_loss()).backward()
    return StepMemory(kept, held.most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--checkpointing", choices=("none", "selective", "full"))
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    found = step_memory(shape, options.layers, options.context, options.checkpointing or shape.checkpointing)
    print(f"{options.layers} layers: kept {found.kept / 2**30:.2f} GiB, at most {found.most / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
