"""What vLLM's stat logger tells, as the counters and intervals of the engine protocol."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

from slipstream.engine.base import BusyInterval, OffloadLoad
from slipstream.engine.embedded.busy import BusyLog
from slipstream.engine.vllm.cache import NEWS, CacheNews
from slipstream.engine.vllm.direct import DirectSamples
from slipstream.engine.vllm.offload.names import FIGURES

_LONGEST_STEP_S = 1.0
"""A longer time since the last step was idle, for the most part."""
_SHORTEST_STEP_S = 0.001


class Counters:
    """Counts the steps of an engine. Called in this process once a step, after it."""

    def __init__(self, direct: DirectSamples) -> None:
        self._direct = direct
        self.running = self.waiting = 0
        self.kv_usage = 0.0
        self.decoded_tokens = self.decode_steps = self.preemptions = 0
        self.prefix_hit_tokens = self.prefix_query_tokens = self.prefilled_tokens = 0
        """Of requests, not of their samples: counted by the engine."""
        self.offload = OffloadLoad()
        self.busy_log = BusyLog()
        self.cache = CacheNews()
        self._last_s = -_LONGEST_STEP_S
        self._recorded = asyncio.Event()

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> Counters:
        """vLLM asks for a factory: there is one engine, so one logger."""
        return self

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        now_s = time.monotonic()
        if scheduler_stats is not None:
            self.running = scheduler_stats.num_running_reqs
            self.waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self.kv_usage = scheduler_stats.kv_cache_usage
            if (news := (scheduler_stats.kv_connector_stats or {}).pop(NEWS, None)) is not None:
                self.cache.absorb(news)
            if (figures := (scheduler_stats.kv_connector_stats or {}).pop(FIGURES, None)) is not None:
                self.offload = OffloadLoad(**figures)
        generated, prompts, longest_s = self._direct.take_count(), 0, _SHORTEST_STEP_S
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs
            generated += iteration_stats.num_generation_tokens
            prompts = iteration_stats.prompt_token_stats.total
            longest_s = max(iteration_stats.time_to_first_tokens_iter, default=_SHORTEST_STEP_S)
        if generated:
            self.decoded_tokens += generated
            self.decode_steps += 1
            self._log_step("prefill" if prompts else "decode", now_s, longest_s)
        self._last_s = now_s
        self._recorded.set()
        self._recorded = asyncio.Event()

    def _log_step(self, kind: Literal["prefill", "decode"], now_s: float, longest_s: float) -> None:
        """vLLM says when a step ended. It began when the one before it ended, or else with its first request."""
        recent = now_s - self._last_s < _LONGEST_STEP_S
        start_s = self._last_s if recent else now_s - min(longest_s, _LONGEST_STEP_S)
        if start_s < now_s:
            end_s = time.time()
            self.busy_log.add(BusyInterval(kind, end_s - (now_s - start_s), end_s))

    async def next_record(self) -> None:
        """Return after the next step."""
        await self._recorded.wait()

    def log_engine_initialized(self) -> None: ...

    def log(self) -> None: ...

    def record_sleep_state(self, is_awake: int, level: int) -> None: ...
