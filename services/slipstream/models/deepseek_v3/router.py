"""The router node: sigmoids, a bias that only the choice sees, and a choice within the best groups.

B, L = batch, D = width, E = experts, K = experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.models.routing import Routes, gate_logits
from slipstream.models.titan import TokenChoiceTopKRouter


class ReplayRouter(TokenChoiceTopKRouter):
    """torchtitan's router of groups, with `Routes` making the choice."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        """Same fields as torchtitan's router."""

    routes: Routes
    layer: int

    def forward(self, x_BLD: Tensor, expert_bias_E: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Gate weights `[B, L, K]`, expert ids `[B, L, K]` and all scores `[B, L, E]`."""
        scores_BLE = torch.sigmoid(gate_logits(self.gate, x_BLD))
        choice_BLE = scores_BLE if expert_bias_E is None else scores_BLE + expert_bias_E
        choice_BLE = self._get_node_limited_routing_scores(choice_BLE)
        shares_BLE = scores_BLE / scores_BLE.sum(-1, keepdim=True)  # the balance loss wants parts of a whole
        ids_TK = self.routes.choose(self.layer, shares_BLE.flatten(0, 1), choice_BLE.flatten(0, 1))
        ids_BLK = ids_TK.view(*x_BLD.shape[:2], -1)
        weights_BLK = scores_BLE.gather(-1, ids_BLK)
        if self.route_norm:
            weights_BLK = weights_BLK / (weights_BLK.sum(-1, keepdim=True) + 1e-20)
        return weights_BLK * self.route_scale, ids_BLK, scores_BLE
