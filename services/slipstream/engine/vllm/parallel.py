"""How a vLLM engine is spread over ranks, as our options and as vLLM's, and what cannot be. Imports no vLLM.

The rules are asked before any engine starts: by the launcher for a whole run, and by each worker for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from slipstream.common.config import BaseConfig
from slipstream.models.base import Sizes

DEEPEP_BACKENDS = ("deepep_high_throughput", "deepep_low_latency")
LOW_LATENCY_HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
"""What DeepEP's low-latency kernels were compiled for."""
FP8_BLOCK = 128


class ParallelConfig(BaseConfig):
    """Over how many ranks an engine is spread, and with which kernels."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share each matrix."""

    data_parallel_size: int = Field(default=1, ge=1, le=1024)
    """Ranks that share the experts and have requests of their own: one worker each, one group together."""

    expert_parallel: bool = False
    """Whole experts are spread over all ranks, instead of a part of each on every rank."""

    all2all_backend: Literal["allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency"] = (
        "allgather_reducescatter"
    )
    """How tokens reach their experts: DeepEP's high-throughput kernels suit prefill, its low-latency ones decode."""

    deep_gemm: bool = False
    """Matrix products of DeepGEMM, for weights in block FP8: `quantization = "fp8_per_block"`."""


@dataclass(frozen=True)
class DataParallelRank:
    """One rank's place in a data-parallel vLLM engine."""

    rank: int
    size: int
    host: str
    port: int
    """Where the ranks find each other; rank 0 listens there."""


def arguments(config: ParallelConfig, rank: DataParallelRank | None) -> dict[str, Any]:
    """vLLM's engine arguments. Each data-parallel rank is a process of ours: vLLM balances no load between them."""
    given: dict[str, Any] = {
        "tensor_parallel_size": config.tensor_parallel_size,
        "enable_expert_parallel": config.expert_parallel,
        "all2all_backend": config.all2all_backend,
    }
    if config.deep_gemm:
        given["moe_backend"] = "deep_gemm"
    if rank is not None:
        given |= {
            "data_parallel_size": rank.size,
            "data_parallel_rank": rank.rank,  # makes the balancing external
            "data_parallel_address": rank.host,
            "data_parallel_rpc_port": rank.port,
            "distributed_executor_backend": "uni" if config.tensor_parallel_size == 1 else "mp",
        }
    return given


def environment(config: ParallelConfig) -> dict[str, str]:
    """What vLLM reads from the environment."""
    use = "1" if config.deep_gemm else "0"
    return {"VLLM_USE_DEEP_GEMM": use, "VLLM_MOE_USE_DEEP_GEMM": use}


@dataclass(frozen=True)
class Case:
    """What the rules look at. Without sizes (they are not known yet) only the rules without them are asked."""

    config: ParallelConfig
    role: Literal["prefill", "decode"]
    device: str = "auto"
    """ "auto": not known here."""
    quantization: str = "none"
    sizes: Sizes | None = None

    @property
    def ranks(self) -> int:
        return self.config.tensor_parallel_size * self.config.data_parallel_size

    @property
    def deepep(self) -> bool:
        return self.config.all2all_backend in DEEPEP_BACKENDS


Refusal = tuple[str, str]
"""The option of the engine, and what is wrong with it."""


def refusals(case: Case) -> Iterator[Refusal]:
    """Everything that cannot work, the most telling first."""
    for rule in RULES:
        for option, sentence in rule(case):
            yield option if option == "quantization" else f"parallel.{option}", sentence


def _device(case: Case) -> Iterator[Refusal]:
    if case.device != "cpu":
        return
    config = case.config
    if case.deepep:
        named = f'is "{config.all2all_backend}"'
        yield "all2all_backend", f"{named}, and DeepEP runs on CUDA only; this engine is on the CPU"
    if config.deep_gemm:
        yield "deep_gemm", "is true, and DeepGEMM runs on CUDA only; this engine is on the CPU"


def _deepep(case: Case) -> Iterator[Refusal]:
    config = case.config
    if not case.deepep:
        return
    named = f'is "{config.all2all_backend}"'
    if not config.expert_parallel:
        yield (
            "all2all_backend",
            f"{named}, which moves tokens between experts' ranks; set expert_parallel = true",
        )
    if config.data_parallel_size == 1:
        yield "all2all_backend", f"{named}, and with data_parallel_size = 1 there is no rank to move tokens to"
    if config.all2all_backend == "deepep_low_latency":
        if case.role == "prefill":
            yield (
                "all2all_backend",
                f"{named}, whose buffers hold few tokens a rank and no prompts; prefill takes deepep_high_throughput",
            )
        width = getattr(case.sizes, "dim", None)
        if width is not None and width not in LOW_LATENCY_HIDDEN_SIZES:
            known = ", ".join(map(str, LOW_LATENCY_HIDDEN_SIZES))
            yield (
                "all2all_backend",
                f"{named}, whose kernels know the widths {known}, not this model's {width}",
            )


def _fp8(case: Case) -> Iterator[Refusal]:
    if case.config.deep_gemm and case.quantization != "fp8_per_block":
        yield (
            "deep_gemm",
            f'is true, and DeepGEMM takes fp8_per_block alone; quantization is "{case.quantization}"',
        )
    if case.quantization == "fp8_per_block":
        for name in ("dim", "expert_dim"):
            width = getattr(case.sizes, name, 0)
            if width % FP8_BLOCK:
                yield (
                    "quantization",
                    f'is "fp8_per_block", in blocks of {FP8_BLOCK}, and {name} = {width} is no multiple',
                )


def _sizes(case: Case) -> Iterator[Refusal]:
    config, sizes = case.config, case.sizes
    if sizes is None:
        return
    tensor = config.tensor_parallel_size
    if sizes.n_heads % tensor:
        yield (
            "tensor_parallel_size",
            f"is {tensor}, which does not divide the model's {sizes.n_heads} attention heads",
        )
    elif sizes.n_kv_heads % tensor and tensor % sizes.n_kv_heads:
        heads = sizes.n_kv_heads
        yield (
            "tensor_parallel_size",
            f"is {tensor}, which neither divides the {heads} KV heads nor is a multiple",
        )
    if config.expert_parallel and sizes.n_experts % case.ranks:
        yield (
            f"{'data' if config.data_parallel_size > 1 else 'tensor'}_parallel_size",
            f"makes {case.ranks} ranks, which do not divide the model's {sizes.n_experts} experts",
        )


def _updates(case: Case) -> Iterator[Refusal]:
    """What runs in vLLM, but not with weights that change under it."""
    config = case.config
    if config.tensor_parallel_size > 1:
        yield (
            "tensor_parallel_size",
            f"is {config.tensor_parallel_size}, and a weight update checks the live weights of whole matrices alone; "
            "spread the experts with data_parallel_size instead",
        )
    if config.data_parallel_size > 1 and not config.expert_parallel:
        yield (
            "data_parallel_size",
            f"is {config.data_parallel_size}, and without expert parallelism each rank holds a part of every expert, "
            "which a weight update cannot check; set expert_parallel = true",
        )
    if config.expert_parallel and config.data_parallel_size == 1:
        yield "expert_parallel", "is true, and there is one data-parallel rank, which holds all experts anyhow"


RULES: tuple[Callable[[Case], Iterator[Refusal]], ...] = (_device, _deepep, _fp8, _sizes, _updates)
