"""The router node: a softmax over the gate's outputs, with `Routes` making the choice. B, L = batch, D = width."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from slipstream.models.routing import Routes, gate_logits
from slipstream.models.titan import TokenChoiceTopKRouter


class ReplayRouter(TokenChoiceTopKRouter):
    """torchtitan's softmax top-k router, with `Routes` making the choice."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        """Same fields as torchtitan's router."""

    routes: Routes
    layer: int

    def forward(self, x_BLD: Tensor, expert_bias_E: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Gate weights `[B, L, K]`, expert ids `[B, L, K]` and all scores `[B, L, E]`."""
        scores_BLE = F.softmax(gate_logits(self.gate, x_BLD), dim=-1)
        ids_TK = self.routes.choose(self.layer, scores_BLE.flatten(0, 1))
        ids_BLK = ids_TK.view(*x_BLD.shape[:2], -1)
        weights_BLK = scores_BLE.gather(-1, ids_BLK)
        return weights_BLK / weights_BLK.sum(-1, keepdim=True), ids_BLK, scores_BLE
