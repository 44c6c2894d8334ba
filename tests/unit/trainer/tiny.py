"""A small model and sequences for trainer tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream.common.version import PolicyVersion
from slipstream.engine.routes import Ranges, RouteRows
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.model import MoeModel, build_model, init_weights
from slipstream.trainer.optim_config import OptimConfig
from slipstream.trainer.sequence import TrainSequence, version_number

VOCAB = 24
SIZES = MoeConfig(
    vocab_size=VOCAB, dim=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, expert_dim=16, max_context_tokens=32
)
BASE = version_number(PolicyVersion(1, 0))
OPTIM = OptimConfig(lr=1e-3, warmup_steps=0, total_steps=10)


def tiny_model(seed: int = 0) -> MoeModel:
    model = build_model(SIZES)
    init_weights(model, seed)
    return model


def sequence(
    seed: int,
    length: int = 10,
    prompt: int = 5,
    advantage: float = 1.0,
    routes: np.ndarray | None = None,
    unknown_ranges: Ranges = (),
    recomputed_from: int | None = None,
) -> TrainSequence:
    """A random rollout sampled at the base version, with random distinct routes unless given."""
    rng = np.random.default_rng(seed)
    count = length - prompt
    token_ids = rng.integers(0, VOCAB, length).astype(np.int32)
    if routes is None:
        routes = rng.random((length - 1, SIZES.n_layers, SIZES.n_experts)).argsort(-1)[..., : SIZES.top_k]
    return TrainSequence(
        token_ids=token_ids,
        target_positions=np.arange(prompt, length),
        engine_logps=np.full(count, -3.0, dtype=np.float32),
        sampled_at=np.full(count, BASE),
        kv_oldest=np.full(count, BASE),
        routes=RouteRows(routes.astype(np.uint8), 0, unknown_ranges, recomputed_from),
        advantage=advantage,
    )


@dataclass(frozen=True)
class TinyExample:
    prompt_ids: list[int]
    answer_ids: list[int]


class Reversals:
    """Answer = the prompt's three tokens reversed, then 1; the prompt ends in 0."""

    def _make(self, seed: int, count: int) -> list[TinyExample]:
        rng = np.random.default_rng(seed)
        words = rng.integers(2, VOCAB, (count, 3)).tolist()
        return [TinyExample([*word, 0], [*word[::-1], 1]) for word in words]

    def batch(self, step: int, size: int) -> list[TinyExample]:
        return self._make(step, size)

    def validation(self) -> list[TinyExample]:
        return self._make(10**6, 32)
