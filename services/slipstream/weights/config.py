"""How weights travel from the trainer to the engines: agreed on by all of a run. Imports no torch."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, model_validator

from slipstream.common.config import BaseConfig

Transport = Literal["grpc", "shm", "cuda_ipc", "nccl", "nixl"]
TRANSPORTS: tuple[str, ...] = get_args(Transport)
WireDtype = Literal["float32", "bfloat16", "float16"]


class WeightsConfig(BaseConfig):
    """One for the run: the trainer publishes by it, and workers refuse what comes by another."""

    transport: Transport = "grpc"
    """grpc: bytes through the broadcaster. The others straight from the trainer's memory, the manifest alone through
    it: shm and cuda_ipc on one host, nccl and nixl anywhere. Adapters go by grpc in any case."""

    dtype: WireDtype = "float32"
    """Of the bytes on the way. Straight ones must be the engines' own."""

    keep_versions: int = Field(default=2, ge=1, le=8)
    """Copies of published weights that each rank of the trainer keeps for readers, where it computes."""

    lease_s: float = Field(default=60.0, gt=0, le=600)
    """Longest time that a reader keeps a copy from being overwritten. An update waits for it no longer, either."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Of the process groups of nccl: nccl between cards, gloo elsewhere."""

    link_host: str = "127.0.0.1"
    """Address of this trainer at which readers meet it, for nccl."""

    @property
    def straight(self) -> bool:
        """Whether bytes bypass the broadcaster."""
        return self.transport != "grpc"

    @model_validator(mode="after")
    def _grpc_is_float32(self) -> WeightsConfig:
        if not self.straight and self.dtype != "float32":
            raise ValueError('dtype: transport "grpc" carries float32, from which each engine takes its own')
        return self
