"""What a connector of vLLM holds for others, in vLLM's worker process: inner state, of the version that is pinned."""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any


def release_held(request_ids: Sequence[str]) -> list[str]:
    """Let the connector report these as sent, so that the scheduler frees their blocks; what was read is free already.

    Returns those of which it does not know yet that they are held: ask again after its next step.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    (connector, *_) = getattr(connector, "sub_connectors", (connector,))  # the one that moves KV comes first
    worker = connector.connector_worker
    if hasattr(worker, "sender_loop"):
        return asyncio.run_coroutine_threadsafe(_expire(worker, set(request_ids)), worker.sender_loop).result()
    for request_id in request_ids:
        if request_id in worker._reqs_to_process:
            _report_sent(worker, request_id)
    return []


def _report_sent(worker: Any, request_id: str) -> None:
    """NIXL."""
    worker._reqs_to_process.discard(request_id)
    worker._reqs_to_send.pop(request_id, None)
    worker.consumer_notification_counts_by_req.pop(request_id, None)
    worker.expected_consumer_notifications_by_req.pop(request_id, None)
    worker._replicated_pcp_done_sending.add(request_id)  # what the next step reports beside what was read


async def _expire(worker: Any, request_ids: set[str]) -> list[str]:
    """Mooncake, on its own loop."""
    held = [each for each in worker.reqs_need_send.values() if each.p_req_id in request_ids]
    for each in held:
        if each.ready.is_set():
            each.expire_time = 0.0
    return [each.p_req_id for each in held if not each.ready.is_set()]
