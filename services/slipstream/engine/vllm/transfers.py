"""vLLM's scheduler beside a KV connector: transfers end in time, and rows of transferred positions are unknown.

As with `scheduler.py`, what is used of vLLM's scheduler is not public, and tested for the version that is pinned.
"""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

import time
from typing import Any

import numpy as np
import vllm
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from slipstream.engine.vllm.rows import unknown_row
from slipstream.engine.vllm.versions import version_of

DEADLINE = "slipstream_deadline_s"
"""In a request's transfer parameters: its KV may not be read after this, on the monotonic clock of the host."""
HELD_POLL_S = 0.01
"""Between two looks at what is held, while there is nothing else to do; a new request waits as long at most."""
TIMEOUT = "slipstream_timeout_s"
"""In a request's transfer parameters: the longest time its transfer may take once it began."""
_VERSION = version_of(vllm.__version__)


class TransferMixin(Scheduler):
    """Fails requests whose KV does not come in time, before anything of it is used.

    vLLM itself waits as long as the other side's memory is there to be read.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadlines: dict[str, float] = {}
        """Of requests that wait for KV, before and during its transfer."""
        self._transferring: set[str] = set()
        self._overdue: list[Any] = []

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        deadline_s = (request.kv_transfer_params or {}).get(DEADLINE)
        if deadline_s is not None:
            self._deadlines[request.request_id] = deadline_s

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._deadlines:
            self._end_overdue(time.monotonic())
        if self.requests and not (self.running or any(getattr(self, name) for name in _VERSION.waiting_queues)):
            time.sleep(HELD_POLL_S)  # vLLM looks for the end of what is held in steps that do nothing, 1,000 a second
        return super().schedule(*args, **kwargs)

    def _end_overdue(self, now_s: float) -> None:
        for request_id, deadline_s in list(self._deadlines.items()):
            request: Any = self.requests.get(request_id)
            if request is None or request.is_finished():
                self._forget(request_id)
                continue
            loading = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            if loading and request_id not in self._transferring:
                self._transferring.add(request_id)
                deadline_s = min(deadline_s, now_s + request.kv_transfer_params[TIMEOUT])
                self._deadlines[request_id] = deadline_s
            if now_s > deadline_s:
                self._forget(request_id)
                self._overdue += self.finish_requests(request_id, RequestStatus.FINISHED_ERROR)

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, Any]:
        outputs = super().update_from_output(*args, **kwargs)
        for request in self._overdue:
            news = outputs.setdefault(request.client_index, EngineCoreOutputs())
            ended = EngineCoreOutput(request.request_id, [], finish_reason=request.get_finished_reason())
            news.outputs = [*news.outputs, ended]
        self._overdue = []
        return outputs

    def has_finished_requests(self) -> bool:
        if self._pause_state == PauseState.PAUSED_ALL:  # what is held for others must not keep a pause from beginning
            return bool(self.finished_req_ids)
        return super().has_finished_requests()

    def _update_from_kv_xfer_finished(self, kv_connector_output: Any) -> None:
        """Mooncake also reports requests that were given up before they were scheduled, which ends vLLM's process."""
        for request_ids in (kv_connector_output.finished_recving, kv_connector_output.finished_sending):
            if request_ids:
                request_ids.intersection_update(self.requests)
        super()._update_from_kv_xfer_finished(kv_connector_output)

    def _update_waiting_for_remote_kv(self, request: Any) -> None:
        """The KV is here, and about to be cached: nobody here knows which experts made it."""
        self._forget(request.request_id)
        failed = request.request_id in self.failed_recving_kv_req_ids
        end = request.num_computed_tokens
        super()._update_waiting_for_remote_kv(request)
        if self.enable_return_routed_experts and not failed:
            self._mark_unknown(request, end)

    def _mark_unknown(self, request: Any, end: int) -> None:
        """Rows are kept by block, and a block's last user may have left its own."""
        manager = self.routed_experts_mgr
        start = request.prefill_stats.num_local_cached_tokens if request.prefill_stats is not None else 0
        blocks = self.kv_cache_manager.get_block_ids(request.request_id)[manager.attn_gid]
        positions = np.arange(start, end)
        slots = np.asarray(blocks)[positions // manager.block_size] * manager.block_size
        rows = manager.routed_experts_by_slot
        rows[slots + positions % manager.block_size] = unknown_row(rows.dtype)

    def _forget(self, request_id: str) -> None:
        self._deadlines.pop(request_id, None)
        self._transferring.discard(request_id)
