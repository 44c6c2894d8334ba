"""What both kinds of worker are told. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator

from slipstream.common.config import BaseConfig, ServiceConfig
from slipstream.common.rank_groups import RankGroup
from slipstream.engine.embedded.config import EmbeddedConfig
from slipstream.engine.vllm.config import VllmConfig
from slipstream.weights.config import WeightsConfig


def _engine_type(value: Any) -> str:
    """The engine that a table, or a configuration already read, is of."""
    named = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return "embedded" if named is None else str(named)


EngineConfig = Annotated[
    Annotated[EmbeddedConfig, Tag("embedded")] | Annotated[VllmConfig, Tag("vllm")], Discriminator(_engine_type)
]
"""`type = "embedded"` (the default) or `type = "vllm"`; the rest are that engine's sizes."""


class RankGroupConfig(BaseConfig):
    """The data-parallel group that a worker is a rank of: updated as one, and healthy as one."""

    group_id: str = ""
    """Its name in the run, e.g. "decode-1". Empty: the worker stands alone."""

    rank: int = Field(default=0, ge=0)
    """This worker's rank. Rank 0 leads."""

    addresses: list[str] = Field(default_factory=list)
    """host:port of every rank's gRPC server, by rank."""

    rendezvous: str = ""
    """host:port where ranks that step together find each other (vLLM); bound by rank 0."""

    vote_timeout_s: float = Field(default=30.0, gt=0)
    """Longest time that a rank stands paused while the others swap and check; then the old weights go back."""

    @model_validator(mode="after")
    def _rank_has_an_address(self) -> RankGroupConfig:
        if self.group_id and self.rank >= len(self.addresses):
            raise ValueError(f"rank {self.rank} of {self.group_id} has no address: {len(self.addresses)} are given")
        return self

    @property
    def place(self) -> RankGroup | None:
        if not self.group_id:
            return None
        return RankGroup(self.group_id, self.rank, len(self.addresses), self.addresses[0])


class WorkerConfig(ServiceConfig):
    """One engine behind one endpoint."""

    broadcaster: str = "127.0.0.1:7001"
    """host:port of the broadcaster."""

    engine: EngineConfig = EmbeddedConfig()
    """Which engine, and its sizes."""

    group: RankGroupConfig = RankGroupConfig()
    """Its data-parallel group."""

    weights: WeightsConfig = WeightsConfig()
    """How weights come; the trainer's own."""

    fetch_timeout_s: float = Field(default=60.0, gt=0)
    """Time to fetch one version of the weights."""

    timeline_limit_bytes: int = Field(default=64 * 2**20, ge=4096)
    """Bytes of this worker's files under timeline/; the older half goes when they are reached."""

    model_timeout_s: float = Field(default=120.0, ge=0)
    """Time to wait at start for `<run_dir>/model/config.json`."""

    @model_validator(mode="after")
    def _group_is_the_engine_s(self) -> WorkerConfig:
        if isinstance(self.engine, VllmConfig):
            ranks = max(len(self.group.addresses), 1)
            if self.engine.parallel.data_parallel_size != ranks:
                size = self.engine.parallel.data_parallel_size
                raise ValueError(f"engine.parallel.data_parallel_size is {size}, and the group has {ranks} rank(s)")
        return self

    @model_validator(mode="after")
    def _weights_fit_the_engine(self) -> WorkerConfig:
        dtype = self.engine.dtype if isinstance(self.engine, VllmConfig) else "float32"
        if self.weights.straight and self.weights.dtype != dtype:
            raise ValueError(
                f"weights.dtype is {self.weights.dtype!r}, and the engine computes in {dtype!r}: "
                f"{self.weights.transport} takes no other than the engine's"
            )
        if self.weights.transport == "cuda_ipc" and not isinstance(self.engine, VllmConfig):
            raise ValueError("weights.transport: cuda_ipc needs an engine on a card, and the embedded one has none")
        return self

    @property
    def model_dir(self) -> Path:
        """Where the model's `config.json` is."""
        return self.run_dir / "model"
