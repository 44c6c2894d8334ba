"""vLLM's Mooncake connector, as this project needs it: without an accelerator, on one interface, and bounded in time.

vLLM 0.30.0 asks torch for the accelerator's index, which raises where there is none; its bootstrap server listens on
all interfaces; and a decode worker waits for a prefill worker that is gone as long as for one that is slow
(`answers.py`). Named by `connector.py`; loaded in vLLM's own process.
"""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

import time
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream
from vllm.utils.network_utils import get_ip

from slipstream.engine.vllm.answers import Answers, waiting
from slipstream.engine.vllm.connector import HELD, TIMEOUT_OPTION
from slipstream.engine.vllm.transfers import DEADLINE, TIMEOUT

ROUNDING_S = 1.0
"""vLLM takes the time for which a prompt is held in whole seconds."""

_bootstrap_server: Any = upstream.MooncakeBootstrapServer  # type: ignore[attr-defined]


class TimedPointers(list[int]):
    """Addresses that may be read and sent until then, by the clock that vLLM uses for it."""

    until_s = float("inf")


class HostWorker(upstream.MooncakeConnectorWorker):
    """Both ends of a transfer."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self._timeout_s: float = vllm_config.kv_transfer_config.kv_connector_extra_config[TIMEOUT_OPTION]
        super().__init__(vllm_config, *args, **kwargs)

    async def receive_kv_from_single_worker(self, worker_addr: str, pull_metas: dict[str, Any]) -> None:
        waiting.set((max(pull.expire_time for pull in pull_metas.values()), self._timeout_s))
        await super().receive_kv_from_single_worker(worker_addr, pull_metas)

    async def _build_transfer_params(self, ready_reqs: list[Any], *args: Any) -> Any:
        """Leave out what is held no longer: the other side may have given its blocks to others since."""
        now_s = time.perf_counter()
        timely = [(request_id, held) for request_id, held in ready_reqs if held.expire_time > now_s]
        late = [request_id for request_id, held in ready_reqs if held.expire_time <= now_s]
        sources, targets, lengths, failed, why = await super()._build_transfer_params(timely, *args)
        sources = TimedPointers(sources)
        sources.until_s = min((held.expire_time for _, held in timely), default=now_s)
        return sources, targets, lengths, [*failed, *late], "asked too late" if late else why

    def _send_blocks(self, remote_session: str, src_ptrs: list[int], *args: Any) -> int:
        if isinstance(src_ptrs, TimedPointers) and time.perf_counter() > src_ptrs.until_s:  # the process stood still
            return -1
        return super()._send_blocks(remote_session, src_ptrs, *args)


class HostMooncakeConnector(upstream.MooncakeConnector):
    """Moves KV from memory to memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        index = torch.accelerator.current_device_index
        upstream.MooncakeBootstrapServer = _own_interface  # type: ignore[misc]
        upstream.MooncakeConnectorWorker = HostWorker  # type: ignore[misc]
        upstream.make_zmq_socket = Answers  # type: ignore[attr-defined]  # used for pulls alone
        if not torch.accelerator.is_available():
            torch.accelerator.current_device_index = lambda: 0
        try:
            super().__init__(*args, **kwargs)
        finally:
            torch.accelerator.current_device_index = index

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Tell the worker until when what it asks for may be written."""
        scheduler: Any = self.connector_scheduler
        asked = {
            request_id: request.kv_transfer_params for request_id, (request, _) in scheduler._reqs_need_recv.items()
        }
        meta: Any = super().build_connector_meta(scheduler_output)
        for pulls in meta.reqs_to_recv.values():
            for request_id, pull in pulls.items():
                params = asked[request_id]
                pull.expire_time = params[DEADLINE] + params[HELD] + ROUNDING_S + params[TIMEOUT]
        return meta


def _own_interface(host: str, port: int) -> Any:
    return _bootstrap_server(get_ip(), port)
