"""Starts vLLM with the settings this project needs. Only calling `launch` needs vLLM."""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.common.config import ENVIRONMENT
from slipstream.engine.vllm.config import VllmConfig
from slipstream.engine.vllm.connector import check_connector, transfer_config
from slipstream.engine.vllm.installed import find_vllm
from slipstream.engine.vllm.offload.options import HASH_ALGORITHM, offload_options, remove_orphan_regions
from slipstream.engine.vllm.process import dying_with_us
from slipstream.models.base import Sizes

_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles the ranking of log-probabilities, 20 s at the first probe
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every engine of a machine takes the same core
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",  # whole ones, by which blocks can be found
}
"""Read by vLLM when it is imported. What is set already stays."""


def launch(model_dir: Path, sizes: Sizes, config: VllmConfig, stat_logger: Any, sockets: Path) -> Any:
    """An `AsyncLLM` without weights; takes seconds. Call it on the event loop that will use it.

    It forks, so nothing of this process may have begun that a fork would cut in half: above all no gRPC.
    """
    ENVIRONMENT["VLLM_RPC_BASE_PATH"] = str(sockets)
    for name, value in {**_ENVIRONMENT, "OMP_NUM_THREADS": str(config.torch_threads)}.items():
        ENVIRONMENT.setdefault(name, value)
    find_vllm()
    check_connector(config)
    from vllm.config import KVEventsConfig, KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from slipstream.engine.vllm.merging import keep_routes_when_merging
    from slipstream.engine.vllm.plugin import register

    keep_routes_when_merging()
    transfer = transfer_config(config)
    if config.offload is not None:
        remove_orphan_regions()
        transfer = KVTransferConfig(**offload_options(config, model_dir, sizes))
    if transfer is not None:
        register()
    engine_config = AsyncEngineArgs(
        model=str(model_dir),
        load_format="dummy",  # the first update brings the weights
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        seed=0,
        max_model_len=sizes.max_context_tokens + 1,
        # vLLM samples one token after a prompt whose log-probabilities are asked for, so a probe of the whole context
        # needs a position more.
        hf_overrides={"max_position_embeddings": sizes.max_context_tokens + 1},
        max_num_seqs=config.max_running_samples,
        max_num_batched_tokens=max(config.max_prefill_tokens, config.max_running_samples),
        enable_chunked_prefill=True,
        block_size=config.block_size_tokens,
        num_gpu_blocks_override=config.block_count,
        enable_prefix_caching=True,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),  # our scheduler takes them
        prefix_caching_hash_algo=HASH_ALGORITHM,
        logprobs_mode="processed_logprobs",
        enable_return_routed_experts=True,
        kv_transfer_config=transfer,
        worker_extension_cls="slipstream.engine.vllm.worker.WorkerExtension",
        scheduler_cls="slipstream.engine.vllm.scheduler.ProbeScheduler",
    ).create_engine_config()
    # The platform has just chosen "spawn", which takes 20 s more to start and does not end cleanly.
    ENVIRONMENT["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    with dying_with_us():
        return AsyncLLM.from_vllm_config(engine_config, stat_loggers=[stat_logger], enable_log_requests=False)
