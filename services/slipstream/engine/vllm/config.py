"""Sizes of a vLLM engine. Imports neither torch nor vLLM."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from slipstream.common.config import BaseConfig
from slipstream.engine.vllm.latent import latent_width
from slipstream.engine.vllm.layout import ITEM_BYTES
from slipstream.engine.vllm.offload.config import NativeOffloadConfig
from slipstream.engine.vllm.parallel import ParallelConfig
from slipstream.models.base import Sizes

PROBE_PLACES = 1
"""Samples beside those that run: a probe finds a place while all of them are paused."""

BLOCK_MULTIPLE = 32
"""vLLM's attention on the CPU takes no other block size."""


def kv_bytes_per_token(sizes: Sizes, dtype: str) -> int:
    """Keys and values of one token in all layers; of latent attention what they are made of, as vLLM keeps it."""
    width = latent_width(sizes) or 2 * sizes.n_kv_heads * sizes.head_dim
    return sizes.n_layers * width * ITEM_BYTES[dtype]


class VllmConfig(BaseConfig):
    """How much a vLLM engine holds and runs at once."""

    type: Literal["vllm"] = "vllm"
    """Which engine this is."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What vLLM is to run on: the build that is installed decides, and another than this one is refused."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights, activations and KV."""

    quantization: Literal["none", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"] = "none"
    """How linear layers and experts are quantised at each update, by vLLM's names; the routers never are. GPU only."""

    cuda_graphs: bool = True
    """Replay decode steps as CUDA graphs; captured at the start."""

    compiled: bool = True
    """Compile the model with torch.compile; on a GPU only, where it takes a minute at the first start."""

    capture_routes: bool = True
    """Record which experts each token took. Off only where nothing is trained on the answers."""

    gpu_memory_fraction: float = Field(default=0.9, gt=0, lt=1)
    """Part of the GPU's memory that must be free at the start, and that this engine stays within."""

    block_size_tokens: int = Field(default=BLOCK_MULTIPLE, ge=BLOCK_MULTIPLE, multiple_of=BLOCK_MULTIPLE)
    """Tokens of one KV block. Only full blocks are shared and cached."""

    block_count: int = Field(default=1024, ge=8)
    """KV blocks in the pool."""

    max_running_samples: int = Field(default=128, ge=1)
    """Samples decoded together."""

    max_waiting_requests: int = Field(default=1024, ge=1)
    """Requests that wait for room; one more is refused."""

    max_prefill_tokens: int = Field(default=2048, ge=1)
    """Tokens computed in one forward pass; longer prompts are computed in chunks."""

    torch_threads: int = Field(default=1, ge=1)
    """Threads of the operators on the CPU."""

    route_bytes: int = Field(default=64 << 20, ge=0)
    """Expert routes kept for the trainer; the oldest are dropped beyond."""

    transfer_ttl_s: float = Field(default=60.0, gt=0)
    """KV of a prefill that nobody released is freed after this long, counted anew when a decode worker claims it."""

    transfer_timeout_s: float = Field(default=10.0, gt=0)
    """Longest time for one prompt's KV to come by the connector; then the request fails and is placed again."""

    connector: Literal["none", "nixl", "mooncake"] = "none"
    """How KV moves from prefill to decode workers; the same in both pools. "none": decode computes the prompts."""

    side_channel_host: str = "127.0.0.1"
    """Where decode workers reach this one's connector, before the first transfer."""

    side_channel_port: int = Field(default=0, ge=0, le=65535)
    """A port of this worker alone; 0 takes a free one."""

    parallel: ParallelConfig = ParallelConfig()
    """Over how many ranks it is spread, and with which kernels."""

    start_timeout_s: float = Field(default=600.0, gt=0)
    """Longest time for vLLM's processes to come up; then they write where they stand into the log and are killed."""

    update_timeout_s: float = Field(default=120.0, gt=0)
    """Longest time for each part of a weight update: the swap, the read back, the probe."""

    silence_s: float = Field(default=10.0, gt=0)
    """Longest time without a sign of life between two steps; then the worker takes no requests, until one comes."""

    offload: NativeOffloadConfig | None = None
    """`[engine.offload]`: KV that the pool evicts is kept in host memory and on disk. Unset: it is not."""

    @model_validator(mode="after")
    def _one_connector(self) -> VllmConfig:
        if self.offload is not None and self.connector == "mooncake":
            raise ValueError(
                "offload and connector = 'mooncake' exclude each other: the tiers were tried beside NIXL only; set "
                "connector = 'nixl'"
            )
        return self

    @model_validator(mode="after")
    def _check(self) -> VllmConfig:
        if self.quantization != "none" and (self.device == "cpu" or self.dtype == "float32"):
            raise ValueError("quantization: needs a GPU, and dtype bfloat16 or float16")
        return self
