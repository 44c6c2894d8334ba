"""What replay is worth against an engine that rounds: the same weights in bfloat16."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from slipstream.models.documents import Documents
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.model import MoeModel, build_model, init_weights


def kl(p_TV: Tensor, q_TV: Tensor) -> float:
    """Of log-probabilities, the mean over tokens of the whole distributions."""
    return float((p_TV.exp() * (p_TV - q_TV)).sum(-1).mean())


@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (32, 4)])
@torch.no_grad()
def test_replay_leaves_a_third_of_the_mismatch_with_an_engine_in_bfloat16(experts, top_k):
    model = build_model(
        MoeConfig(vocab_size=64, n_layers=4, n_experts=experts, top_k=top_k, expert_dim=32, max_context_tokens=64)
    )
    init_weights(model, 0)
    engine = copy.deepcopy(model).to(torch.bfloat16)
    documents = Documents.of_lengths([48] * 24)
    tokens_1T = torch.randint(0, 64, (1, 48 * 24), generator=torch.Generator().manual_seed(1))

    def logps(of: MoeModel, replay_TLK: Tensor | None = None) -> Tensor:
        of.routes.begin(replay_TLK=replay_TLK, capture=True)
        return torch.log_softmax(of.logits(of.hidden(tokens_1T, documents.positions_1T, documents)[0]).float(), -1)

    engine_TV = logps(engine)
    recorded_TLK = engine.routes.captured()
    live_TV = logps(model)
    live_TLK = model.routes.captured()
    replayed_TV = logps(model, recorded_TLK)
    assert (recorded_TLK.sort(-1).values != live_TLK.sort(-1).values).any()  # near-ties that rounding turned
    assert kl(engine_TV, live_TV) > 3 * kl(engine_TV, replayed_TV)
    # What replay takes away is routing: the rest is rounding, with replay or without.
    assert kl(replayed_TV, live_TV) == pytest.approx(kl(engine_TV, live_TV) - kl(engine_TV, replayed_TV), rel=0.2)
