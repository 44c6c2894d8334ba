"""vLLM's Mooncake connector where there is no accelerator, and on no other interface than it is told.

vLLM 0.30.0 asks torch for the accelerator's index, which raises where there is none, and its bootstrap server listens
on all interfaces. Named by `connector.py`; loaded in vLLM's own process.
"""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream
from vllm.utils.network_utils import get_ip

_bootstrap_server: Any = upstream.MooncakeBootstrapServer  # type: ignore[attr-defined]


def _own_interface(host: str, port: int) -> Any:
    return _bootstrap_server(get_ip(), port)


class HostMooncakeConnector(upstream.MooncakeConnector):
    """Moves KV from memory to memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        index = torch.accelerator.current_device_index
        upstream.MooncakeBootstrapServer = _own_interface  # type: ignore[misc]
        if not torch.accelerator.is_available():
            torch.accelerator.current_device_index = lambda: 0
        try:
            super().__init__(*args, **kwargs)
        finally:
            torch.accelerator.current_device_index = index
