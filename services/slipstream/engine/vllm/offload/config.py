"""`[decode.engine.offload]` and `[prefill.engine.offload]`. Imports neither torch nor vLLM."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

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

    io_threads: int = Field(default=2, ge=1, le=64)
    """Threads that read and write the disk."""

    generated_tokens: bool = True
    """Whether blocks of sampled tokens are kept too, not only prompts: the next turn of a rollout begins with them."""

    @model_validator(mode="after")
    def _disk_has_a_place(self) -> NativeOffloadConfig:
        if bool(self.disk_bytes) != bool(self.directory):
            raise ValueError("directory and disk_bytes go together: set both or neither")
        return self
