"""vLLM engines that run on while worker after worker is built on them: starting one takes seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.engine.vllm.engine import VllmEngine
from slipstream.models.qwen3_moe.config import MoeConfig
from tests.integration.workers.kinds import Kind

IDLE_TIMEOUT_S = 30.0


class LentEngine:
    """A running engine that begins anew: without a version, a request, or anything in its cache."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def start(self) -> None:
        self._engine._version = None
        self._engine.drain_kv_events()
        self._engine.drain_busy()
        for key in list(self._engine._routes._rows):
            self._engine.release_routes(key)

    async def stop(self) -> None:
        """Return when nothing is left of this life; fail if something stays."""
        await self._engine._prefills.stop()  # whoever took them has no server to give them back to
        async with self._engine._swapping:
            deadline_s = time.monotonic() + IDLE_TIMEOUT_S
            while left := self._left():
                assert time.monotonic() < deadline_s, left
                await asyncio.sleep(0.005)
            assert await self._engine._llm.reset_prefix_cache()

    def _left(self) -> dict[str, int]:
        load = self._engine.load()
        counts = {
            name: getattr(load, name) for name in ("blocks_used", "running_samples", "waiting_requests", "kv_transfers")
        }
        return {name: count for name, count in counts.items() if count}


class Lending:
    """A kind of which some engines run already: those are lent first, each once; then it builds some of its own."""

    def __init__(self, kind: Kind, running: Sequence[VllmEngine], model_dir: Path) -> None:
        self.sizes = kind.sizes
        self._kind = kind
        self._model_dir = model_dir
        self._left = list(running)

    def build(self, model_dir: Path, sizes: MoeConfig, config: Any) -> Any:
        if config is None and sizes == self.sizes and self._left:
            return LentEngine(self._left.pop(0))
        # NIXL moves KV between engines of one model only, which is told by its path.
        model_dir = self._model_dir if sizes == self.sizes else model_dir
        return self._kind.build(model_dir, sizes, config)
