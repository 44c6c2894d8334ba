"""KV from one vLLM engine to another by a connector of vLLM's own. Imports vLLM where it is launched only.

The prefill engine holds a prompt's blocks, the decode engine reads them from its memory. vLLM frees what is held when
it was read, or after a time of its own; here the holder decides: `prefills.py` leases what is held to one taker, and
frees it by `slipstream_release_kv` when nobody may read it any more.
"""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

import json
import math
import socket
import time
from typing import Any
from uuid import uuid4

import torch

from slipstream.common.config import ENVIRONMENT
from slipstream.common.errors import KvMismatch
from slipstream.engine.base import KvPayload, KvReference
from slipstream.engine.vllm.config import VllmConfig

HELD = "slipstream_held_s"
"""In Mooncake's transfer parameters: how long before its lease, and how long under it, a prompt is held at most."""
TIMEOUT_OPTION = "slipstream_timeout_s"
"""In the options of Mooncake's connector: `transfer_timeout_s`."""
_BACKSTOP_S = 3600
"""vLLM's own lease on what is held, far beyond ours."""
_COUNT_ELSEWHERE = "remote_prefill_cached_tokens"
"""vLLM, from 0.31 on, tells this in place of the cached tokens of the engine that decodes."""


class Connector:
    """One engine's end of it."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._engine_id = uuid4().hex
        """Another at each start: so nothing is read from an engine that is gone, nor from the next one in its place."""
        self._port = config.side_channel_port or _free_port(config.side_channel_host)

    def options(self) -> dict[str, Any] | None:
        """The fields of vLLM's `KVTransferConfig`, or None. The rest it reads from the environment, in its process."""
        if self._config.connector == "none":
            return None
        host, port = self._config.side_channel_host, str(self._port)
        common: dict[str, Any] = {
            "engine_id": self._engine_id,
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu" if torch.version.cuda is None else "cuda",
            # The caller asks another worker; a long prompt computed here would hold up all.
            "kv_load_failure_policy": "fail",
        }
        if self._config.connector == "nixl":
            ENVIRONMENT["VLLM_NIXL_SIDE_CHANNEL_HOST"], ENVIRONMENT["VLLM_NIXL_SIDE_CHANNEL_PORT"] = host, port
            ways = "sm,tcp,self" if torch.version.cuda is None else "cuda_ipc,cuda_copy,sm,tcp,self"
            ENVIRONMENT.setdefault("UCX_TLS", ways)
            extra = {"kv_lease_duration": _BACKSTOP_S}
            return {"kv_connector": "NixlConnector", "kv_connector_extra_config": extra, **common}
        ENVIRONMENT["VLLM_HOST_IP"], ENVIRONMENT["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = host, port
        # Longest time that Mooncake holds for others; it begins to send nothing after it.
        ENVIRONMENT["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"] = str(math.ceil(2 * self._config.transfer_ttl_s))
        return {
            "kv_connector": "HostMooncakeConnector",
            "kv_connector_module_path": "slipstream.engine.vllm.mooncake",
            "kv_connector_extra_config": {
                "mooncake_protocol": "tcp",
                TIMEOUT_OPTION: self._config.transfer_timeout_s,
            },
            **common,
        }

    def hold(self) -> dict[str, Any]:
        """Transfer parameters of a prefill whose blocks are to be held."""
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        return params if self._config.connector == "nixl" else {**params, "transfer_id": uuid4().hex}

    def take(self, held: dict[str, Any], answer: dict[str, Any] | None) -> bytes:
        """What a decode engine needs to read them: NIXL says it with its answer, with Mooncake one has to know."""
        if answer is None:
            address = f"http://{self._config.side_channel_host}:{self._port}"
            answer = {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "transfer_id": held["transfer_id"],
                "remote_engine_id": self._engine_id,
                "remote_bootstrap_addr": address,
                HELD: self._config.transfer_ttl_s,
            }
        return json.dumps(answer).encode()


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def load_params(kv: KvPayload | KvReference | None, timeout_s: float) -> dict[str, Any] | None:
    """Transfer parameters of a request whose KV is to be read; None where there is none to read."""
    from slipstream.engine.vllm.transfers import DEADLINE, TIMEOUT

    if not isinstance(kv, KvReference) or not kv.token_count:
        return None
    try:
        params = json.loads(kv.params)
    except ValueError:
        params = None
    if not isinstance(params, dict):
        raise KvMismatch("what the connector is to read is no JSON object", field="connector_params")
    if kv.transport == "mooncake" and not isinstance(params.get(HELD), float):
        raise KvMismatch(f"{HELD} is not among what the connector is to read", field="connector_params")
    params.pop(_COUNT_ELSEWHERE, None)
    return {**params, DEADLINE: time.monotonic() + kv.lease_s, TIMEOUT: timeout_s}
