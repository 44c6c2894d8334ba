"""Starts vLLM with the settings this project needs. Only calling `launch` needs vLLM."""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from slipstream.common.config import ENVIRONMENT, ConfigError
from slipstream.engine.vllm.calls import end_calls_with_core
from slipstream.engine.vllm.config import PROBE_PLACES, VllmConfig, kv_bytes_per_token
from slipstream.engine.vllm.connector import Connector
from slipstream.engine.vllm.families import check_family
from slipstream.engine.vllm.inherited import set_up
from slipstream.engine.vllm.installed import check_connector, check_plugin, find_vllm
from slipstream.engine.vllm.latent import CPU_BLOCK_TOKENS, check_latent, latent_width
from slipstream.engine.vllm.offload.options import HASH_ALGORITHM, offload_options, remove_orphan_regions
from slipstream.engine.vllm.parallel import DataParallelRank, arguments, environment
from slipstream.engine.vllm.starting import starting
from slipstream.models.base import Sizes

_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",  # whole ones, by which blocks can be found
}
"""Read by vLLM when it is imported. What is set already stays."""
_ENVIRONMENT_OF_CPU = {
    "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles the ranking of log-probabilities, 20 s at the first probe
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every engine of a machine takes the same core
}
_ENVIRONMENT_OF_GPU = {"TRITON_F32_DEFAULT": "ieee"}  # else float32 is multiplied with 10 bits of its mantissa


def launch(
    model_dir: Path,
    sizes: Sizes,
    config: VllmConfig,
    stat_logger: Any,
    sockets: Path,
    connector: Connector,
    rank: DataParallelRank | None = None,
) -> Any:
    """An `AsyncLLM` without weights; takes seconds. Call it on the event loop that will use it.

    It forks, so nothing of this process may have begun that a fork would cut in half: above all no gRPC. Where this
    process has used a GPU already vLLM spawns instead (`inherited.py`).

    Raises:
        ConfigError: this vLLM cannot run it.
        ServiceFailed: it was not up within `config.start_timeout_s`.
    """
    set_environment(sockets, {"OMP_NUM_THREADS": str(config.torch_threads), **environment(config.parallel)})
    find_vllm()
    check_connector(config)
    check_family(sizes, "engine.type")
    device = _find_device(config)
    if device != "cpu":
        check_plugin()
    offloads = config.offload is not None
    check_latent(sizes, config.connector, offloads, config.quantization, device, config.dtype)
    from vllm import envs
    from vllm.config import KVEventsConfig, KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from slipstream.engine.vllm.merging import keep_routes_when_merging
    from slipstream.engine.vllm.plugin import WORKER_EXTENSION, register

    envs.disable_envs_cache()  # of an engine that was started before, whose environment may have been another
    set_up(sockets, config.torch_threads, config.connector == "nixl")
    keep_routes_when_merging()
    register()
    options = connector.options()
    if config.offload is not None:
        from slipstream.engine.vllm.offload.beside import beside

        remove_orphan_regions()
        offload = offload_options(config, model_dir, sizes)
        options = offload if options is None else beside(options, offload)
    transfer = KVTransferConfig(**options) if options is not None else None
    engine_config = AsyncEngineArgs(
        model=str(model_dir),
        load_format="dummy",  # the first update brings the weights
        dtype=config.dtype,
        skip_tokenizer_init=True,
        seed=0,
        max_model_len=sizes.max_context_tokens + 1,
        # vLLM samples one token after a prompt whose log-probabilities are asked for, so a probe of the whole context
        # needs a position more.
        hf_overrides={"max_position_embeddings": sizes.max_context_tokens + 1},
        max_num_seqs=config.max_running_samples + PROBE_PLACES,
        max_num_batched_tokens=max(config.max_prefill_tokens, config.max_running_samples + PROBE_PLACES),
        enable_chunked_prefill=True,
        block_size=config.block_size_tokens,
        num_gpu_blocks_override=_block_count(device, sizes, config),
        enable_prefix_caching=True,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),  # our scheduler takes them
        prefix_caching_hash_algo=HASH_ALGORITHM,
        logprobs_mode="processed_logprobs",
        enable_return_routed_experts=config.capture_routes and sizes.moe_layers > 0,
        kv_transfer_config=transfer,
        worker_extension_cls=WORKER_EXTENSION,
        **{**_options_of_device(device, sizes, config), **arguments(config.parallel, rank)},
    ).create_engine_config()
    # The platform of the CPU has just chosen "spawn", which takes 20 s more to start and does not end cleanly.
    ENVIRONMENT["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    with starting(config.torch_threads, config.start_timeout_s):
        llm = AsyncLLM.from_vllm_config(engine_config, stat_loggers=[stat_logger], enable_log_requests=False)
    envs.enable_envs_cache()  # vLLM asks for variables with each output: a tenth of what it does in this process
    alone(llm.logger_manager)
    end_calls_with_core(llm)
    return llm


def alone(loggers: Any) -> None:
    """Leave of an `AsyncLLM`'s loggers the one that was given to it. vLLM's own would count parts of steps alone."""
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    del loggers.stat_loggers[1:]
    unregister_vllm_metrics()


def set_environment(sockets: Path, own: Mapping[str, str]) -> None:
    """What vLLM reads when it is imported. `own`: variables of this engine alone."""
    ENVIRONMENT["VLLM_RPC_BASE_PATH"] = str(sockets)
    variables = _ENVIRONMENT | (_ENVIRONMENT_OF_CPU if torch.version.cuda is None else _ENVIRONMENT_OF_GPU)
    for name, value in {**variables, **own}.items():
        ENVIRONMENT.setdefault(name, value)


def _find_device(config: VllmConfig) -> str:
    """What vLLM's build runs on; refused if the configuration says another."""
    from vllm.platforms import current_platform

    device: str = current_platform.device_type
    if config.device not in ("auto", device):
        raise ConfigError(f"engine.device is {config.device!r}, and the vLLM that is installed runs on {device!r}")
    if config.quantization != "none" and device != "cuda":
        raise ConfigError(f"engine.quantization needs a GPU; vLLM runs on {device!r}")
    return device


def _block_count(device: str, sizes: Sizes, config: VllmConfig) -> int:
    """Of the size that vLLM takes them in."""
    if device == "cpu" and latent_width(sizes):
        return config.block_count * config.block_size_tokens // CPU_BLOCK_TOKENS
    return config.block_count


def _options_of_device(device: str, sizes: Sizes, config: VllmConfig) -> dict[str, Any]:
    """Arguments for vLLM that are not the same on all devices."""
    if device == "cpu":
        return {"enforce_eager": True, "scheduler_cls": "slipstream.engine.vllm.scheduler.ProbeScheduler"}
    options: dict[str, Any] = {
        "scheduler_cls": "slipstream.engine.vllm.scheduler.AsyncProbeScheduler",
        "gpu_memory_utilization": config.gpu_memory_fraction,
        "kv_cache_memory_bytes": config.block_count
        * config.block_size_tokens
        * kv_bytes_per_token(sizes, config.dtype),
        # Its parameters lie as in a checkpoint, so that updates copy straight into them; the others reorder them.
        "moe_backend": "triton",
        "enable_flashinfer_autotune": False,  # minutes at the start, for kernels that are not used
        "enforce_eager": not config.cuda_graphs and not config.compiled,
    }
    if not options["enforce_eager"] and not (config.cuda_graphs and config.compiled):
        graphs = "FULL_DECODE_ONLY" if config.cuda_graphs else "NONE"
        options["compilation_config"] = {"mode": 3 if config.compiled else 0, "cudagraph_mode": graphs}
    if config.quantization != "none":
        name = config.quantization
        options["quantization"] = name
        options["quantization_config"] = {"linear": name, "moe": name, "ignore": ["re:.*\\.mlp\\.gate$"]}
    return options
