"""What a connector of vLLM holds for others, in vLLM's worker process: inner state, of the version that is pinned."""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def release_held(request_ids: Sequence[str]) -> None:
    """Let NIXL report these as sent, so that the scheduler frees their blocks."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    worker = connector.connector_worker
    for request_id in request_ids:
        if request_id not in worker._reqs_to_process:  # read already
            continue
        worker._reqs_to_process.discard(request_id)
        worker._reqs_to_send.pop(request_id, None)
        worker.consumer_notification_counts_by_req.pop(request_id, None)
        worker.expected_consumer_notifications_by_req.pop(request_id, None)
        worker._replicated_pcp_done_sending.add(request_id)  # what the next step reports beside what was read
