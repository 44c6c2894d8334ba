"""Attention over documents whose tokens are spread over ranks: the contexts (`models/base.py`) of a context group.

*Ulysses* exchanges tokens for heads: every rank computes some of the heads for all tokens, with the single process's
own `Documents`. It needs heads that can be shared out (`Layout.check_heads`), and moves queries as well as keys.

*Ring* (`ring.py`) keeps queries where they are, and passes keys and values from rank to rank. Any number of heads.

S = tokens of this rank, T = tokens of the micro-batch, N = query heads, G = key and value heads, H = head size.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.models.base import Context
from slipstream.models.documents import Documents
from slipstream.trainer.parallel.collectives import swap_heads, swap_tokens
from slipstream.trainer.parallel.layout import ContextKind
from slipstream.trainer.parallel.ring import Ring
from slipstream.trainer.parallel.slices import Slice, rank_index


class Ulysses:
    """Each rank attends with its share of the heads."""

    def __init__(self, part: Slice, group: dist.ProcessGroup, device: torch.device) -> None:
        ranks, total = dist.get_world_size(group), sum(part.lengths)
        # Tokens arrive rank by rank; documents want them in order.
        arriving_T = np.concatenate([rank_index(total, ranks, rank) for rank in range(ranks)])
        self._arriving_T = torch.from_numpy(arriving_T).to(device)
        self._order_T = torch.from_numpy(np.argsort(arriving_T)).to(device)
        self._documents = Documents.of_lengths(part.lengths, device)
        self._group = group

    def attend(self, layer: int, q_1TNH: Tensor, k_1TGH: Tensor, v_1TGH: Tensor, scale: float | None) -> Tensor:
        """Attention output of this rank's tokens."""
        ranks = dist.get_world_size(self._group)
        repeats = max(1, ranks // k_1TGH.shape[2])
        q, k, v = (
            swap_heads(x[0], self._group).index_select(0, self._order_T).unsqueeze(0)
            for x in (q_1TNH, k_1TGH.repeat_interleave(repeats, 2), v_1TGH.repeat_interleave(repeats, 2))
        )
        out = self._documents.attend(layer, q, k, v, scale)[0]
        return swap_tokens(out.index_select(0, self._arriving_T), self._group).unsqueeze(0)


def context_of(part: Slice, kind: ContextKind, group: dist.ProcessGroup | None, device: torch.device) -> Context:
    """What attention layers ask for one micro-batch. Without a group all of it is here."""
    if group is None:
        return Documents.of_lengths(part.lengths, device)
    return Ulysses(part, group, device) if kind == "ulysses" else Ring(part, group, device)
