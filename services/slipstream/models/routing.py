"""Which experts tokens take: chosen from scores, recorded, or replayed as recorded elsewhere.

Every model has one `Routes` object, `model.routes`, which the router nodes of all layers ask. Set it up before a
forward pass and read it afterwards:

    model.routes.begin(capture=True)                      # engine: record the chosen experts
    model(tokens_1T, positions_1T, documents)
    rows_TLK = model.routes.captured()                    # [tokens, moe_layers, top_k], uint8 or uint16

    model.routes.begin(replay_TLK=rows_TLK, balance=True)  # trainer: routing replay
    logits = model(tokens_1T, positions_1T, documents)
    loss = loss + 0.001 * model.routes.balance_loss()

Replay takes the recorded expert ids in place of the top-k choice, but gathers the gate weights from this model's own
scores, so that the gate still learns. Tokens that `known_T` leaves out are routed live. `T` counts tokens in the order
of the flattened `[B, L]` input; a state set by `begin` holds for one forward pass.

T = tokens, L = MoE layers, K = experts a token, E = experts, D = width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Routes:
    """What the routers of one model replay, and what they recorded in the last forward pass."""

    def __init__(self, moe_layers: int, top_k: int, expert_count: int) -> None:
        self.moe_layers = moe_layers
        self.top_k = top_k
        self.expert_count = expert_count
        self.begin()

    def begin(
        self,
        *,
        replay_TLK: Tensor | None = None,
        known_T: Tensor | None = None,
        capture: bool = False,
        balance: bool = False,
        margins: bool = False,
        token_mask_T: Tensor | None = None,
        share_LE: Tensor | None = None,
    ) -> None:
        """Say what the next forward pass does.

        `known_T` (bool): tokens whose rows of `replay_TLK` count; None means all. `token_mask_T` (bool) leaves padding
        out of the balance loss and of margins. `share_LE`: the part of a step's choices that each expert got; the
        balance loss is then a sum over tokens, which the caller divides by those of the step, so that it comes out the
        same however tokens are dealt out.
        """
        self.capture = capture
        self.balance = balance
        self.margins = margins
        self.token_mask_T = token_mask_T
        self.share_LE = share_LE
        self.replay_TLK = replay_TLK
        self.known_T1 = None if known_T is None or bool(known_T.all()) else known_T.unsqueeze(1)
        # By layer, as a layer that is computed again for its gradient comes by once more.
        self._chosen: dict[int, Tensor] = {}
        self._balance_terms: dict[int, Tensor] = {}
        self._margins: dict[int, float] = {}
        self._counts: dict[int, Tensor] = {}

    def choose(self, layer: int, scores_TE: Tensor, choice_TE: Tensor | None = None) -> Tensor:
        """Expert ids `[T, K]` of one layer: replayed where known, else the top k of `choice_TE`, or of `scores_TE`."""
        choice_TE = scores_TE if choice_TE is None else choice_TE
        if self.replay_TLK is None:
            ids_TK = torch.topk(choice_TE, self.top_k, dim=-1).indices
        else:  # as wide as an index one layer at a time: all at once would be eight times the rows
            ids_TK = self.replay_TLK[:, layer].to(torch.int64)
            if self.known_T1 is not None:
                ids_TK = torch.where(self.known_T1, ids_TK, torch.topk(choice_TE, self.top_k, dim=-1).indices)
        if self.capture:
            self._chosen[layer] = ids_TK
        if self.balance:
            real_TK = ids_TK if self.token_mask_T is None else ids_TK[self.token_mask_T]
            self._counts[layer] = _counted(real_TK.reshape(-1), self.expert_count)
            # One of a layer that is computed again would keep all that was computed again for as long as it is here.
            self._balance_terms.setdefault(layer, self._balance_term(layer, scores_TE))
        if self.margins and scores_TE.shape[-1] > self.top_k:
            real_TE = choice_TE if self.token_mask_T is None else choice_TE[self.token_mask_T]
            best_TK = torch.topk(real_TE, self.top_k + 1, dim=-1).values
            self._margins[layer] = min(1.0, *(best_TK[:, -2] - best_TK[:, -1]).tolist())
        return ids_TK

    def captured(self) -> Tensor:
        """The experts chosen in the last forward pass, `[T, L, K]`, uint8 up to 256 experts, else uint16."""
        if not self.moe_layers:
            return torch.empty(1, 0, 0, dtype=torch.uint8)  # of any number of tokens
        return torch.stack(list(self._chosen.values()), dim=1).to(
            torch.uint8 if self.expert_count <= 256 else torch.uint16
        )

    def balance_loss(self) -> Tensor:
        """Switch-style load-balance loss, the mean over layers: 1 when experts are used evenly, up to E / K.

        0 where no layer has experts.
        """
        if not self.moe_layers:
            return torch.zeros(())
        return torch.stack(list(self._balance_terms.values())).mean()

    def margin(self) -> float:
        """The least by which the last expert chosen was ahead of the best of the others; 1 if there were none."""
        return min(self._margins.values(), default=1.0)

    def choice_counts(self) -> Tensor:
        """How often each expert was taken in the last forward pass with `balance`, `[L, E]`, padding left out."""
        if not self._counts:
            return torch.zeros(0, self.expert_count, dtype=torch.int64)
        return torch.stack([self._counts[layer] for layer in sorted(self._counts)])

    def _balance_term(self, layer: int, scores_TE: Tensor) -> Tensor:
        if self.token_mask_T is not None:
            scores_TE = scores_TE[self.token_mask_T]
        if self.share_LE is not None:
            return self.expert_count * (scores_TE * self.share_LE[layer]).sum()
        counts_E = self._counts[layer]
        return self.expert_count * (counts_E / counts_E.sum() * scores_TE.mean(0)).sum()


def gate_logits(gate: Any, x: Tensor) -> Tensor:
    """A router's logits in its weight's dtype, also where autocast multiplies in less: rounded, they choose others."""
    kind = x.device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return gate(x)
    with torch.autocast(kind, enabled=False):
        return gate(x.to(gate.weight.dtype))


def _counted(ids_N: Tensor, expert_count: int) -> Tensor:
    """How often each id is there. On a card without `bincount`, which waits for all work queued so far."""
    if ids_N.device.type == "cpu":
        return torch.bincount(ids_N, minlength=expert_count)
    counts_E = torch.zeros(expert_count, dtype=torch.int64, device=ids_N.device)
    return counts_E.scatter_add_(0, ids_N, torch.ones_like(ids_N))
