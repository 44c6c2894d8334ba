"""KV that comes from another engine by NIXL and KV that comes back from the offload tiers, in one engine.

vLLM's `MultiConnector` lets the first connector that knows tokens of a request load them, and all of them save. NIXL is
the first: a request that names a prefill engine gets all its tokens from there. Which of the two loaded decides whether
the routes of the loaded positions are known: those of the tiers came with their blocks, those of NIXL stayed behind.
"""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from slipstream.engine.vllm.offload.connector import OffloadConnector

_TRANSFER, _OFFLOAD = 0, 1
"""Places of the two in vLLM's options."""

# By its name vLLM finds whose figures it logs, where it logs them: with VLLM_LOGGING_LEVEL=INFO.
KVConnectorFactory.register_connector(OffloadConnector.__name__, OffloadConnector.__module__, OffloadConnector.__name__)


def beside(transfer: dict[str, Any], offload: dict[str, Any]) -> dict[str, Any]:
    """The fields of vLLM's `KVTransferConfig` for both, out of those for either. The tiers name the engine."""
    parts = [{key: value for key, value in each.items() if key != "engine_id"} for each in (transfer, offload)]
    common = {key: value for key, value in parts[_TRANSFER].items() if key != "kv_connector_extra_config"}
    return {
        **common,
        "engine_id": offload["engine_id"],
        "kv_connector": "TransferAndOffload",
        "kv_connector_module_path": "slipstream.engine.vllm.offload.beside",
        "kv_connector_extra_config": {"connectors": parts},
    }


class TransferAndOffload(MultiConnector):
    """One engine's two."""

    @property
    def offload(self) -> OffloadConnector:
        child = self._connectors[_OFFLOAD]
        assert isinstance(child, OffloadConnector)
        return child

    def transferred(self, request_id: str) -> bool:
        """Whether what was loaded for a request came from another engine."""
        return self._requests_to_connector.get(request_id) == _TRANSFER
