"""What engines are measured against: full forward passes of the trainer's own model, one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F

from slipstream.models.checkpoint import to_hf
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.model import MoeModel, build_model, init_weights

SIZES = MoeConfig(
    vocab_size=96, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, n_experts=8, max_context_tokens=256
)


kept_dtype = torch.float32
"""Weights are rounded to what the engine under test can hold."""


def near_tie() -> float:
    """Experts chosen by less than this may be others in the engine: it rounds otherwise."""
    return 1e-5 if kept_dtype == torch.float32 else 2e-2


@cache
def weights(seed: int) -> MoeModel:
    """The trainer's flavour of the model, the same for the same seed."""
    model = build_model(SIZES)
    init_weights(model, seed)
    model.to(kept_dtype).to(torch.float32)
    return model.eval().requires_grad_(False)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Copies of all weights by Hugging Face name."""
    return {name: tensor.clone() for name, tensor in to_hf(weights(seed)).items()}


@dataclass(frozen=True)
class Forward:
    """One full forward pass over a sequence."""

    logits_TV: torch.Tensor
    """What follows each token."""
    routes: np.ndarray
    """The experts this pass chose or replayed, uint8 `[T, moe_layers, top_k]`."""
    margin: float
    """By how little an expert was chosen, at the closest; 1 where the routes were replayed."""

    def logprobs(self, token_ids: Sequence[int], first: int, temperature: float = 1.0) -> torch.Tensor:
        """Of `token_ids[first:]`, each given all before it."""
        logprobs_TV = torch.log_softmax(self.logits_TV[first - 1 : len(token_ids) - 1] / (temperature or 1.0), -1)
        return logprobs_TV.gather(1, torch.tensor(token_ids[first:])[:, None]).squeeze(1)


class Oracle:
    """One set of weights."""

    def __init__(self, seed: int) -> None:
        self.model = weights(seed)

    def forward(self, token_ids: Sequence[int], routes: np.ndarray | None = None) -> Forward:
        """`routes`: experts to replay, one row for each token but those at the end that have none."""
        replay = known = None
        if routes is not None:
            padded = np.zeros((len(token_ids), *routes.shape[1:]), routes.dtype)
            padded[: len(routes)] = routes
            replay, known = torch.from_numpy(padded), torch.arange(len(token_ids)) < len(routes)
        self.model.routes.begin(replay_TLK=replay, known_T=known, capture=True, margins=routes is None)
        logits_TV = self.model(torch.tensor([list(token_ids)]))[0]
        return Forward(logits_TV, self.model.routes.captured().numpy(), self.model.routes.margin())

    def assert_greedy(self, prompt: Sequence[int], answer: Sequence[int], tolerance: float) -> None:
        """Every token is the likeliest given those before it; nearly as likely is as good, as rounding differs."""
        logits = self.forward([*prompt, *answer]).logits_TV[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(list(answer))[:, None]).squeeze(1)
        behind = logits.amax(-1) - chosen
        assert behind.max() <= tolerance, f"token {int(behind.argmax())} is {float(behind.max())} behind the best"


class KeptKv:
    """A model's context that keeps the keys and values of all passes, whatever weights computed them."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self, layer: int, q_1TNH: torch.Tensor, k_1TGH: torch.Tensor, v_1TGH: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        if layer in self._layers:
            k, v = self._layers[layer]
            k_1TGH, v_1TGH = torch.cat((k, k_1TGH), 1), torch.cat((v, v_1TGH), 1)
        self._layers[layer] = k_1TGH, v_1TGH
        repeats = q_1TNH.shape[2] // k_1TGH.shape[2]
        k, v = (each.repeat_interleave(repeats, 2).transpose(1, 2) for each in (k_1TGH, v_1TGH))
        queries, keys = q_1TNH.shape[1], k_1TGH.shape[1]
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        return F.scaled_dot_product_attention(q_1TNH.transpose(1, 2), k, v, mask, scale=scale).transpose(1, 2)


def crossing(token_ids: Sequence[int], bounds: Sequence[tuple[int, int]], routes: np.ndarray | None = None) -> Forward:
    """A sequence whose weights were swapped under way, with the KV kept: `bounds` are (end position, seed)."""
    kv, start, parts = KeptKv(), 0, []
    for end, seed in bounds:
        if end == start:
            continue
        model = weights(seed)
        replay = None if routes is None else torch.from_numpy(routes[start:end])
        model.routes.begin(replay_TLK=replay, capture=True, margins=routes is None)
        tokens, positions = torch.tensor([list(token_ids[start:end])]), torch.arange(start, end).unsqueeze(0)
        logits_TV = model.logits(model.hidden(tokens, positions, kv)[0])
        parts.append(Forward(logits_TV, model.routes.captured().numpy(), model.routes.margin()))
        start = end
    logits_TV = torch.cat([part.logits_TV for part in parts])
    return Forward(logits_TV, np.concatenate([part.routes for part in parts]), min(part.margin for part in parts))
