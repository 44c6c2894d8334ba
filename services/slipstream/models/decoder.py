"""What all our decoders add to torchtitan's: passes without the head, names of checkpoints, a random start."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.base import Context


class DecoderPasses:
    """The two halves of a forward pass, for a torchtitan `Decoder`."""

    def hidden(self, tokens: Tensor, positions: Tensor | None = None, attention_masks: Context | None = None) -> Tensor:
        """The last block's output: the forward pass without final norm and head."""
        model: Any = self
        h = model.tok_embeddings(tokens)
        if torch.amp.is_autocast_available(h.device.type) and torch.is_autocast_enabled(h.device.type):
            h = h.to(torch.get_autocast_dtype(h.device.type))  # as engines do: all between products is half as wide
        for layer in model.layers.values():
            h = layer(h, attention_masks, positions)
        return h

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head."""
        model: Any = self
        return model.lm_head(model.norm(hidden))

    def target_logps(
        self, hidden_RD: Tensor, targets_R: Tensor, temperature_R: Tensor | None = None, chunk_rows: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of targets and entropies, `[R]` each, logits of so many rows at once (`head.py`)."""
        model: Any = self
        return model.lm_head(model.norm(hidden_RD), targets_R, temperature_R, chunk_rows)


def retype(config_class: Any, config: Any) -> Any:
    """The same config for another node class."""
    return config_class(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


def set_biases(attention: Any) -> None:
    """Give the four projections of an attention config biases."""
    for projection in (attention.qkv_linear.wq, attention.qkv_linear.wkv, attention.wo):
        projection.bias = True


def ends_views(model: Any) -> dict[str, Tensor]:
    """Embedding, last norm and head. A tied head is the embedding, and has no name of its own."""
    views = {"model.embed_tokens.weight": model.tok_embeddings.weight, "model.norm.weight": model.norm.weight}
    return views if model.enable_weight_tying else {**views, "lm_head.weight": model.lm_head.weight}


def attention_views(prefix: str, attention: Any) -> dict[str, Tensor]:
    """Projections that are not fused, with their biases, and the norms of query and key where there are any."""
    qkv = attention.qkv_linear
    modules = {"q_proj": qkv.wq, "k_proj": qkv.wk, "v_proj": qkv.wv, "o_proj": attention.wo}
    modules |= {"q_norm": attention.q_norm, "k_norm": attention.k_norm}
    return {
        f"{prefix}.self_attn.{name}.{kind}": parameter
        for name, module in modules.items()
        if module is not None
        for kind, parameter in module.named_parameters()
        if kind in ("weight", "bias")
    }


def feed_forward_views(prefix: str, feed_forward: Any) -> dict[str, Tensor]:
    """A gated feed-forward network."""
    return {
        f"{prefix}.gate_proj.weight": feed_forward.w1.weight,
        f"{prefix}.up_proj.weight": feed_forward.w3.weight,
        f"{prefix}.down_proj.weight": feed_forward.w2.weight,
    }


def dense_views(model: Any) -> dict[str, Tensor]:
    """All of a decoder whose layers are attention and a feed-forward network."""
    views = ends_views(model)
    for index, layer in enumerate(model.layers.values()):
        prefix = f"model.layers.{index}"
        views |= {
            **attention_views(prefix, layer.attention),
            **feed_forward_views(f"{prefix}.mlp", layer.feed_forward),
            f"{prefix}.input_layernorm.weight": layer.attention_norm.weight,
            f"{prefix}.post_attention_layernorm.weight": layer.ffn_norm.weight,
        }
    return {name: view.detach() for name, view in views.items()}


@torch.no_grad()
def random_start(model: Any, seed: int, residual_outputs: tuple[str, ...] = ("wo.weight", "w2.weight")) -> None:
    """Random start: normal, 1/sqrt(fan in), residual outputs scaled down by depth.

    The same for the same seed on the same kind of device. Norms start at 1, biases at 0. Embeddings have unit variance
    unless they are the head too: with the usual 0.02 the residual stream forgets which token it stands on as soon as
    the first block adds to it, and a model as small as the demo's learned to spell half as fast.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    residual_scale = 1.0 / math.sqrt(2 * model.sizes.n_layers)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            nn.init.zeros_(parameter) if name.endswith(("bias", "expert_bias_E")) else nn.init.ones_(parameter)
            continue
        std = 1.0 / math.sqrt(parameter.shape[-1])
        if "tok_embeddings" in name and not model.enable_weight_tying:
            std = 1.0
        if name.endswith(residual_outputs):
            std *= residual_scale
        parameter.normal_(0.0, std, generator=generator)
