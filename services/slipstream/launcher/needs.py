"""What a run needs of memory, from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slipstream.common.config import ConfigError
from slipstream.launcher.config import RunConfig
from slipstream.launcher.memory import MIB, available_bytes
from slipstream.models.qwen3_moe.config import MoeConfig

BASE_MIB = {"orchestrator": 58, "broadcaster": 58, "router": 48, "sandbox": 40, "prefill": 255, "decode": 255,
            "gateway": 52, "teacher": 250, "runner": 46, "trainer": 350, "valkey": 8}  # fmt: skip
"""Proportional set size of each process beside weights and KV, a little below what the demo shows in training: 1685 MiB
together, of which this file accounts for 1576."""
ENVIRONMENT_MIB = 52
"""Of each of a runner's processes for an environment, beside what the environment itself holds."""
TRAINER_COPIES = 6
"""Weights, gradients, two moments, and the copies that are published and saved."""
WORKER_COPIES = 3
"""Weights served, weights fetched, and the bytes they came in."""


VLLM_MIB = 1200
"""The same of a worker with vLLM, its two processes together: the demo shows 470 and 870 MiB with their KV."""
VLLM_COPIES = 6
"""The above, the version in use as vLLM reads it, its parameters, and those packed for its kernels."""
TRAINER_COPIES_ON_CARD = 2
"""Of a trainer that computes on a card: page-locked copies that are published, in turn."""
VLLM_COPIES_ON_CARD = 3
"""Of an engine on a card: weights fetched, and two versions in its own dtype, which is narrower."""


def needed_bytes(config: RunConfig, sizes: MoeConfig | None = None) -> int:
    """A lower bound of what all processes of a run take together."""
    sizes = sizes or config.model
    weights = 4 * sizes.parameter_count(sizes.vocab_size or 128)
    total = MIB * (BASE_MIB["valkey"] + BASE_MIB["orchestrator"] + BASE_MIB["broadcaster"])
    trainer: Any = config.section("trainer")
    on_card = trainer.compute.device == "cuda"
    total += MIB * (BASE_MIB["router"] + BASE_MIB["trainer"])
    total += (TRAINER_COPIES_ON_CARD if on_card else TRAINER_COPIES) * weights
    total += weights if trainer.loss.reference_kl_coefficient and not on_card else 0
    for pool in ("prefill", "decode"):
        engine: Any = getattr(config.section(pool), "engine", None)
        tokens = engine.block_count * engine.block_size_tokens
        kv = 4 * tokens * sizes.n_layers * 2 * sizes.n_kv_heads * sizes.head_dim
        base, copies = (VLLM_MIB, VLLM_COPIES) if engine.type == "vllm" else (BASE_MIB[pool], WORKER_COPIES)
        if engine.type == "vllm" and engine.device == "cuda":
            kv, copies = 0, VLLM_COPIES_ON_CARD
        if engine.type == "vllm" and engine.offload is not None:
            kv += engine.offload.memory_bytes + engine.offload.mooncake_bytes
        total += config.replicas(pool) * config.data_parallel_size(pool) * (MIB * base + copies * weights + kv)
    teacher: Any = config.section("teacher")
    on_vllm = teacher.engine.type == "vllm"
    total += config.replicas("teacher") * (MIB * (VLLM_MIB if on_vllm else BASE_MIB["teacher"]) + weights)
    total += MIB * config.replicas("runner") * ENVIRONMENT_MIB * max(1, sum(e.workers for e in config.environments))
    return total + MIB * sum(config.replicas(name) * BASE_MIB[name] for name in ("runner", "gateway", "sandbox"))


def check_memory(config: RunConfig, available: Callable[[], int] = available_bytes) -> None:
    """Raise `ConfigError` where a run would only start to be killed."""
    needed, left = needed_bytes(config), available()
    if config.launcher.check_memory and left < needed:
        raise ConfigError(
            f"the run needs about {needed // MIB} MiB of memory and {left // MIB} MiB are available; end other "
            "programs, lower replicas or block counts, or set launcher.check_memory = false"
        )
