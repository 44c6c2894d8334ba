"""The engines that workers of a cluster can have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from slipstream.engine.embedded.config import EmbeddedConfig
from slipstream.engine.vllm.config import VllmConfig
from slipstream.models.qwen3_moe.config import MoeConfig
from tests.engine.engines import START_TIMEOUT_S

BLOCK_TOKENS = 4
TRANSFER_TTL_S = 60.0


class Kind(Protocol):
    """Builds one kind of engine."""

    sizes: MoeConfig
    """Of the model, unless a test sets others."""
    slow_to_start: bool
    """Seconds, so that bodies share one where they can."""

    def build(self, model_dir: Path, sizes: MoeConfig, config: Any) -> Any:
        """An engine that has not started; `config` is what the test asked for, or None."""
        ...


class Embedded:
    """The default."""

    slow_to_start = False
    sizes = MoeConfig(
        vocab_size=23, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, expert_dim=16, max_context_tokens=512
    )

    def build(self, model_dir: Path, sizes: MoeConfig, config: Any) -> Any:
        from slipstream.engine.embedded.engine import EmbeddedEngine

        default = EmbeddedConfig(block_size_tokens=BLOCK_TOKENS, block_count=1024, max_running_samples=16)
        return EmbeddedEngine(sizes, config or default)


class Vllm:
    """Both pools on vLLM, KV over NIXL. For bodies that count no blocks: those of vLLM are larger."""

    slow_to_start = True
    sizes = MoeConfig(vocab_size=96, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, max_context_tokens=512)

    def build(self, model_dir: Path, sizes: MoeConfig, config: Any) -> Any:
        from slipstream.engine.vllm.engine import VllmEngine

        return VllmEngine(
            model_dir,
            sizes,
            VllmConfig(
                block_count=128,
                max_running_samples=16,
                max_prefill_tokens=64,
                connector="nixl",
                start_timeout_s=START_TIMEOUT_S,
            ),
        )


KINDS: dict[str, Callable[[], Kind]] = {"embedded": Embedded, "vllm": Vllm}
"""By the names of `--engine`."""
