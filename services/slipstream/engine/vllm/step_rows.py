"""The expert routes of each step on their way to the scheduler, for versions of vLLM that keep them by content.

From 0.31 on vLLM's worker keeps routes under the hashes of blocks. What is not there ends its process: so are rows of
blocks that came over a connector. And only its second model runner, which does not run on the CPU, captures at all.
Here the worker hands out the rows of each step, as it did before, from both runners; `slots.py` keeps them.
"""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.distributed.aux_output_connector.worker import PendingAuxOutput
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.fused_moe import routed_experts_capturer

STEP = "slipstream-step"
"""Under which the rows stand among what vLLM's model runner says of its requests."""
_MENDED = "_slipstream_mended"
_capturer: Any = routed_experts_capturer


@dataclass
class StepRows:
    """Rows of one step, request after request."""

    number: int
    """Of the step, as the scheduler counts them."""
    request_ids: list[str]
    first_positions: list[int]
    ends: list[int]
    """Where the rows of each request end."""
    rows: np.ndarray


@dataclass
class _Pending(PendingAuxOutput):
    """Rows that are being copied from the device."""

    number: int = 0


class StepCapture:
    """In place of vLLM's `AuxOutputWorkerConnector`."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        token_count = vllm_config.scheduler_config.max_num_batched_tokens
        self._capturer = _capturer.RoutedExpertsCapturer(max_num_batched_tokens=token_count, vllm_config=vllm_config)
        _capturer.bind_routed_experts_capturer(model, self._capturer)
        self._number: int | None = None

    def begin_step(self, number: int | None) -> None:
        """`number`: what the scheduler sent with the step; None if nothing is computed in it."""
        self._number = number

    def prepare_output(self, batch: Any) -> _Pending | None:
        if self._number is None or not get_tp_group().is_first_rank:
            return None
        ends = batch.query_start_loc_np[: len(batch.req_ids) + 1]
        return _Pending(
            connector=self,
            request_ids=list(batch.req_ids),
            token_starts=batch.num_computed_tokens_np,
            query_start_loc=ends,
            routed_experts_gpu=self._capturer.snapshot_routing_data(int(ends[-1])),
            number=self._number,
        )

    def process_output(self, pending: _Pending) -> dict[str, StepRows]:
        """Once the copy is there."""
        count, rows = len(pending.request_ids), pending.routed_experts
        assert rows is not None
        starts, ends = pending.token_starts[:count].tolist(), pending.query_start_loc[1 : count + 1].tolist()
        return {STEP: StepRows(pending.number, pending.request_ids, starts, ends, rows)}

    def close(self) -> None:
        """It keeps nothing."""


def mend_cpu_capture() -> None:
    """Let the first model runner capture, on the CPU, where it runs one step at a time."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if hasattr(CPUModelRunner, _MENDED):
        return
    initialize, execute, sample = (
        CPUModelRunner.initialize_kv_cache,
        CPUModelRunner.execute_model,
        CPUModelRunner.sample_tokens,
    )

    def initialize_kv_cache(self: Any, kv_cache_config: Any, is_profiling: bool = False, **named: Any) -> None:
        initialize(self, kv_cache_config, is_profiling, **named)
        if self.vllm_config.aux_output_config.enabled and not is_profiling:
            self._slipstream_capture = StepCapture(self.model, self.vllm_config)

    def execute_model(self: Any, scheduler_output: Any, *rest: Any, **named: Any) -> Any:
        if (capture := getattr(self, "_slipstream_capture", None)) is not None:
            capture.begin_step(scheduler_output.aux_output_connector_metadata)
        return execute(self, scheduler_output, *rest, **named)

    def sample_tokens(self: Any, *args: Any, **named: Any) -> Any:
        capture = getattr(self, "_slipstream_capture", None)
        pending = None
        if capture is not None and self.execute_model_state is not None:
            batch = self.input_batch  # what sampling changes of it is copied
            pending = capture.prepare_output(
                SimpleNamespace(
                    req_ids=batch.req_ids,
                    query_start_loc_np=self.query_start_loc.np,
                    num_computed_tokens_np=batch.num_computed_tokens_cpu.copy(),
                )
            )
        output = sample(self, *args, **named)
        if pending is not None:
            nothing = np.empty(0)
            pending.enqueue_cpu_copy(nothing, nothing)
            output.aux_output_connector_output = pending.process_output()
        return output

    for function in (initialize_kv_cache, execute_model, sample_tokens):
        setattr(CPUModelRunner, function.__name__, function)
    setattr(CPUModelRunner, _MENDED, True)


def mend_capture() -> None:
    """Let the second model runner capture by step."""
    from vllm.v1.worker.gpu import model_runner

    def capture(model: torch.nn.Module, vllm_config: Any, kv_cache_config: Any) -> StepCapture:
        return StepCapture(model, vllm_config)

    model_runner.get_aux_output_connector = capture  # type: ignore[assignment]
