"""What tokens in flight must be: one sequence, whose weights change at a token while the KV so far is kept."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F


class KeptContext:
    """Plain attention over all KV so far, whichever weights it came from."""

    def __init__(self, n_layers: int) -> None:
        self._keys: list[list[torch.Tensor]] = [[] for _ in range(n_layers)]
        self._values: list[list[torch.Tensor]] = [[] for _ in range(n_layers)]

    def attend(
        self, layer: int, q_1TNH: torch.Tensor, k_1TGH: torch.Tensor, v_1TGH: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        self._keys[layer].append(k_1TGH)
        self._values[layer].append(v_1TGH)
        k_1GCH = torch.cat(self._keys[layer], 1).transpose(1, 2)
        v_1GCH = torch.cat(self._values[layer], 1).transpose(1, 2)
        new, total = q_1TNH.shape[1], k_1GCH.shape[2]
        mask_TC = torch.arange(total) <= torch.arange(total - new, total)[:, None]
        q_1NTH = q_1TNH.transpose(1, 2)
        out = F.scaled_dot_product_attention(q_1NTH, k_1GCH, v_1GCH, attn_mask=mask_TC, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)


@torch.no_grad()
def logprobs_over_swaps(models: Sequence[Any], prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """Log-probabilities `[len(answer), vocab]` of what follows; `models[i]` samples `answer[i]`.

    The first model computes the prompt. The model that samples a token computes the KV of the token before it.
    """
    context = KeptContext(models[0].sizes.n_layers)
    inputs = [*prompt, *answer[:-1]]
    owners = [models[0]] * (len(prompt) - 1) + list(models)
    rows, start = [], 0
    for _, run in itertools.groupby(owners, key=id):  # a run of tokens under the same weights is one pass
        count = len(list(run))
        tokens, positions = inputs[start : start + count], torch.arange(start, start + count)[None]
        owner = owners[start]
        owner.routes.begin()
        hidden_1TD = owner.hidden(torch.tensor([tokens]), positions, context)
        rows.append(torch.log_softmax(owner.logits(hidden_1TD[0]), -1))
        start += count
    return torch.cat(rows)[len(prompt) - 1 :]
