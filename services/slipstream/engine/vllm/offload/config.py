"""`[decode.engine.offload]` and `[prefill.engine.offload]`. Imports neither torch nor vLLM."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from slipstream.common.config import BaseConfig


class NativeOffloadConfig(BaseConfig):
    """KV blocks are kept in host memory when the engine's pool evicts them and, if wanted, on disk."""

    type: Literal["native"] = "native"
    """Which store this is: vLLM's own tiers."""

    memory_bytes: int = Field(default=1 << 30, ge=1 << 16)
    """Host memory of this worker for blocks, in /dev/shm. All that goes to disk or comes from there passes it."""

    disk_bytes: int = Field(default=0, ge=0)
    """Bytes on disk; the least recently written or read blocks go beyond. 0: no disk. All users of a directory count
    together and should say the same."""

    directory: str = ""
    """Where the blocks on disk are. Workers of one host that name the same directory hit each other's blocks."""

    mooncake_master: str = Field(default="", pattern=r"^$|^[^:\s]+:\d+$")
    """host:port of the master of a Mooncake store, in which workers of all hosts hit each other's blocks. On loopback
    the launcher starts it. It asks nobody who they are: keep it and the workers in a network of their own."""

    mooncake_bytes: int = Field(default=0, ge=0)
    """Host memory that this worker lends to the Mooncake store."""

    mooncake_host: str = "127.0.0.1"
    """Where other workers reach what this one lends."""

    io_threads: int = Field(default=2, ge=1, le=64)
    """Threads for each of disk and store that read and write there."""

    generated_tokens: bool = True
    """Whether blocks of sampled tokens are kept too, not only prompts: the next turn of a rollout begins with them."""

    @field_validator("mooncake_master")
    @classmethod
    def _has_a_port(cls, value: str) -> str:
        if value and not 1 <= int(value.rpartition(":")[2]) <= 65535:
            raise ValueError("must be host:port, with a port from 1 to 65535")
        return value

    @model_validator(mode="after")
    def _stores_have_a_place(self) -> NativeOffloadConfig:
        if bool(self.disk_bytes) != bool(self.directory):
            raise ValueError("directory and disk_bytes go together: set both or neither")
        if bool(self.mooncake_bytes) != bool(self.mooncake_master):
            raise ValueError("mooncake_master and mooncake_bytes go together: set both or neither")
        return self
