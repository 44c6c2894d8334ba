"""`[engine.offload]` as vLLM's own options. Imports neither torch nor vLLM."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path
from typing import Any
from uuid import uuid4

from slipstream.common.config import ConfigError
from slipstream.engine.routes import route_dtype
from slipstream.engine.vllm.config import VllmConfig, kv_bytes_per_token
from slipstream.engine.vllm.installed import check_mooncake, find_vllm
from slipstream.models.base import Sizes

HASH_ALGORITHM = "sha256_cbor"
"""Of block hashes: vLLM's default hashes a pickle, and two processes may disagree."""

REGIONS = Path("/dev/shm")
ENGINE_PREFIX = "slipstream-"
_REGION_PREFIX = f"vllm_offload_{ENGINE_PREFIX}"
"""vLLM's name of a memory tier's file; then comes the process that owns it."""


def offload_options(config: VllmConfig, model_dir: Path, sizes: Sizes) -> dict[str, Any]:
    """The fields of vLLM's `KVTransferConfig`; refuses what cannot work."""
    offload = config.offload
    assert offload is not None
    context_bytes = sizes.max_context_tokens * kv_bytes_per_token(sizes, config.dtype)
    if offload.memory_bytes < context_bytes:
        raise ConfigError(
            f"engine.offload.memory_bytes is {offload.memory_bytes}; one whole context needs {context_bytes}"
        )
    # vLLM captures routes of all layers, one row a token; ids of two bytes above 256 experts.
    row_bytes = sizes.n_layers * sizes.top_k * route_dtype(sizes.n_experts).itemsize
    options: dict[str, Any] = {
        "spec_name": "OffloadSpec",
        "spec_module_path": "slipstream.engine.vllm.offload.spec",
        "cpu_bytes_to_use": offload.memory_bytes,
        "offload_prompt_only": not offload.generated_tokens,
        "blocks_per_chunk": 1,
        "model_digest": hashlib.sha256((model_dir / "config.json").read_bytes()).hexdigest(),
        "engine": f"vllm {find_vllm().partition('+')[0]}",
        "hash_algorithm": HASH_ALGORITHM,
        "route_bytes_per_block": config.block_size_tokens * row_bytes if config.capture_routes else 0,
    }
    if offload.disk_bytes:
        options["disk"] = {
            "directory": str(Path(offload.directory).absolute()),
            "disk_bytes": offload.disk_bytes,
            "io_threads": offload.io_threads,
        }
    if offload.mooncake_bytes:
        find_mooncake()
        options["mooncake"] = {
            "master": offload.mooncake_master,
            "lent_bytes": offload.mooncake_bytes,
            "host": offload.mooncake_host,
            "io_threads": offload.io_threads,
        }
    return {
        "kv_connector": "OffloadConnector",
        "kv_connector_module_path": "slipstream.engine.vllm.offload.connector",
        "kv_role": "kv_both",
        "engine_id": f"{ENGINE_PREFIX}{os.getpid()}-{uuid4().hex[:12]}",
        "kv_connector_extra_config": options,
    }


def find_mooncake(where: str = "engine.offload.mooncake_master") -> None:
    """Refuse a store whose client is not installed, in the name of the setting that asks for it."""
    if importlib.util.find_spec("mooncake") is None:
        raise ConfigError(f"{where} needs Mooncake, which is not installed; run: make install-vllm")
    check_mooncake(f"{where} is set")


def remove_orphan_regions(parent: Path = REGIONS) -> int:
    """Free the memory tiers of engines that were killed; returns how many."""
    removed = 0
    for path in parent.glob(f"{_REGION_PREFIX}*.mmap"):
        owner = path.name.removeprefix(_REGION_PREFIX).partition("-")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            path.unlink(missing_ok=True)
            removed += 1
    return removed
