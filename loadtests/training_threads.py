"""One optimizer step at the demo's sizes with so many torch threads: `python loadtests/training_threads.py 2`.

Prints the seconds of the fastest of several steps of 256 sequences, the one that others disturbed least. Small
operators may lose more to handing work over than a second core gives; the faster count is what a synchronous run, which
has both cores free while it trains, should use.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch

from slipstream.common.version import PolicyVersion
from slipstream.engine.routes import RouteRows
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.model import build_model, init_weights
from slipstream.trainer.loss_config import ClippedLossConfig
from slipstream.trainer.optim_config import OptimConfig
from slipstream.trainer.sequence import TrainSequence, version_number
from slipstream.trainer.step import Learner

SIZES = MoeConfig(vocab_size=101)
BASE = version_number(PolicyVersion(1, 0))
SEQUENCES, MICRO_BATCH, TOKENS, PROMPT = 256, 100, 20, 11
STEPS = 10


def sequence(seed: int) -> TrainSequence:
    """A random rollout of a prompt as long as the demo's and a word's letters."""
    rng = np.random.default_rng(seed)
    count = TOKENS - PROMPT
    routes = rng.random((TOKENS - 1, SIZES.n_layers, SIZES.n_experts)).argsort(-1)[..., : SIZES.top_k]
    return TrainSequence(
        token_ids=rng.integers(0, SIZES.vocab_size, TOKENS).astype(np.int32),
        target_positions=np.arange(PROMPT, TOKENS),
        engine_logps=np.full(count, -3.0, dtype=np.float32),
        sampled_at=np.full(count, BASE),
        kv_oldest=np.full(count, BASE),
        routes=RouteRows(routes.astype(np.uint8), 0),
        advantage=1.0,
    )


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    model = build_model(SIZES)
    init_weights(model, 0)
    learner = Learner(model, OptimConfig(), ClippedLossConfig())
    sequences = [sequence(seed) for seed in range(SEQUENCES)]
    batches = [sequences[start : start + MICRO_BATCH] for start in range(0, SEQUENCES, MICRO_BATCH)]
    times = []
    for step in range(1, STEPS + 1):
        started_s = time.perf_counter()
        learner.train(batches, step=step, loss_token_count=SEQUENCES * (TOKENS - PROMPT), trained=BASE)
        times.append(time.perf_counter() - started_s)
    print(f"{min(times):.4f}")


if __name__ == "__main__":
    main()
