"""What a step keeps in memory, at the sizes of a card: on `meta`, where only sizes are computed."""

from __future__ import annotations

import torch
from step_memory import step_memory
from trainer_shapes import SHAPES, Shape

from slipstream.models.lora.adapters import attach
from slipstream.trainer.recompute import Checkpointing

GIB = 2**30
CONTEXT = 16384
CARD_BYTES = 139 * GIB
"""Of an H200."""
MOMENTS_BYTES = 16
"""Of a trained number: float32 weight, gradient and two moments."""
LORA, MOE = SHAPES["qwen3-30b-a3b-lora"], SHAPES["moe-1b"]


def whole(shape: Shape, checkpointing: Checkpointing) -> float:
    """Bytes of a step with all layers, from those of one and three."""
    one, three = (step_memory(shape, layers, CONTEXT, checkpointing).most for layers in (1, 3))
    logits = 2 * CONTEXT * shape.sizes.vocab_size
    return one + (shape.sizes.n_layers - 1) * (three - one) / 2 + logits


def test_the_shape_with_adapters_fits_a_card_with_all_activations_computed_again():
    with torch.device("meta"):
        model = LORA.build(LORA.sizes.model_copy(update={"n_layers": 1}))
        whole_model = LORA.build(LORA.sizes)
    attach(model, LORA.lora, 0)  # pyright: ignore[reportArgumentType]
    of_adapters = sum(each.numel() for each in model.parameters() if each.requires_grad) * LORA.sizes.n_layers
    held = 2 * sum(each.numel() for each in whole_model.parameters()) + MOMENTS_BYTES * of_adapters
    assert LORA.checkpointing == "full"
    assert held + whole(LORA, "full") < 0.7 * CARD_BYTES
    assert held + whole(LORA, "selective") > CARD_BYTES  # which is why


def test_what_a_layer_computes_again_is_given_up_before_the_next_layer():
    for shape in (LORA, MOE):
        one, two, three = (step_memory(shape, layers, CONTEXT, "full") for layers in (1, 2, 3))
        assert one.kept < two.kept < three.kept
        # A layer's input, 64 MiB in bfloat16, and the gradients of what it trains; a layer computed again is gigabytes.
        with torch.device("meta"):
            layer = shape.build(shape.sizes.model_copy(update={"n_layers": 1})).layers  # pyright: ignore
        trained = 0 if shape.lora else 2 * sum(each.numel() for each in layer.parameters())
        assert three.most - two.most < trained + 0.25 * GIB
