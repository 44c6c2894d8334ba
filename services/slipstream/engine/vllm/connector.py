"""KV from one vLLM engine to another by a connector of vLLM's own. Imports vLLM where it is launched only.

The prefill engine holds a prompt's blocks, the decode engine reads them from its memory. vLLM frees what is held when
it was read, or after a time of its own; here the holder decides: `prefills.py` leases what is held to one taker, and
frees it by `slipstream_release_kv` when nobody may read it any more.
"""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

import importlib.util
import json
import socket
import time
from typing import Any

import torch

from slipstream.common.config import ENVIRONMENT, ConfigError
from slipstream.common.errors import KvMismatch
from slipstream.engine.base import KvReference
from slipstream.engine.vllm.config import VllmConfig
from slipstream.engine.vllm.installed import REMEDY

CLASSES = {"nixl": "NixlConnector", "mooncake": "MooncakeConnector"}
_PACKAGES = {"nixl": "nixl", "mooncake": "mooncake"}
_BACKSTOP_S = 3600
"""vLLM's own lease on what is held, far beyond ours."""
HOLD = {"do_remote_decode": True, "do_remote_prefill": False}
"""Transfer parameters of a prefill whose blocks are to be held."""


def check_connector(config: VllmConfig, where: str = "engine.connector") -> None:
    """Refuse a connector whose package is not installed, in the name of the setting that asks for it."""
    if config.connector != "none" and importlib.util.find_spec(_PACKAGES[config.connector]) is None:
        raise ConfigError(f'{where} is "{config.connector}", which is not installed; {REMEDY}')


def transfer_config(config: VllmConfig) -> Any:
    """What vLLM is told of the connector, or None. The engine's name for its peers is another at each start."""
    if config.connector == "none":
        return None
    from vllm.config import KVTransferConfig

    _set_environment(config)
    return KVTransferConfig(
        kv_connector=CLASSES[config.connector],
        kv_role="kv_both",
        kv_buffer_device="cpu" if torch.version.cuda is None else "cuda",
        kv_load_failure_policy="fail",  # the caller asks another worker; a long prompt computed here would hold up all
        kv_connector_extra_config={"kv_lease_duration": _BACKSTOP_S},
    )


def _set_environment(config: VllmConfig) -> None:
    """Read by the connector in vLLM's process, which inherits it."""
    host, port = config.side_channel_host, config.side_channel_port or _free_port(config.side_channel_host)
    ENVIRONMENT["VLLM_NIXL_SIDE_CHANNEL_HOST"], ENVIRONMENT["VLLM_NIXL_SIDE_CHANNEL_PORT"] = host, str(port)
    ENVIRONMENT.setdefault("UCX_TLS", "tcp,self" if torch.version.cuda is None else "cuda_ipc,cuda_copy,sm,tcp,self")


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def encode_params(params: dict[str, Any]) -> bytes:
    return json.dumps(params).encode()


def load_params(reference: KvReference, timeout_s: float) -> dict[str, Any]:
    """Transfer parameters of a request whose KV is to be read."""
    from slipstream.engine.vllm.transfers import DEADLINE, TIMEOUT

    try:
        params = json.loads(reference.params)
    except ValueError:
        params = None
    if not isinstance(params, dict):
        raise KvMismatch("what the connector is to read is no JSON object", field="connector_params")
    return {**params, DEADLINE: time.monotonic() + reference.lease_s, TIMEOUT: timeout_s}
