"""Configuration of the runner."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from slipstream.common.config import BaseConfig, ServiceConfig, WorkerEndpoint
from slipstream.environments.config import EnvironmentConfig
from slipstream.environments.config_renderer import RendererConfig, TemplateConfig


class SessionLimits(BaseConfig):
    """What one session of an outside agent may take of its runner. What would be more is refused by name."""

    max_turns: int = Field(default=1000, ge=1, le=65536)
    """Turns of a session."""

    max_samples: int = Field(default=128, ge=1, le=65536)
    """Training samples of a session: one begins with each history that goes on from none before it."""

    max_text_bytes: int = Field(default=64 * 2**20, ge=4096)
    """Bytes of a session's prompts as text, of all its turns, which stay in memory until it ends."""

    max_running_turns: int = Field(default=16, ge=1, le=1024)
    """Turns of a session that run at once."""


class RunnerConfig(ServiceConfig):
    """Everything the runner reads."""

    orchestrator_address: str = "127.0.0.1:0"
    """host:port of the orchestrator."""

    router_address: str = "127.0.0.1:0"
    """host:port of the router."""

    sandbox_address: str = ""
    """host:port of the sandbox executor; empty when no environment executes code."""

    model_dir: Path = Path("model")
    """Directory with tokenizer.json."""

    environments: list[EnvironmentConfig] = Field(default_factory=list)
    """Environments this runner can run."""

    renderer: RendererConfig = TemplateConfig()
    """How conversations become tokens, and tokens messages."""

    max_running_groups: int = Field(default=64, ge=1, le=4096)
    """Groups run at once."""

    block_size_tokens: int = Field(default=8, ge=1)
    """KV block size of the workers, in tokens: what prefix hashes are computed over."""

    prefill_timeout_s: float = Field(default=30.0, gt=0)
    """Longest time that a prefill worker may take for one prompt, its queue included; then the turn is placed again.
    One that the router hears nothing of for `router.worker_silence_s` is given up then, if there is another."""

    spool_limit_bytes: int = Field(default=256 * 2**20, ge=2**20)
    """Bytes on disk of rows held for the trainer and of groups under way; above it no new group is taken."""

    sessions: SessionLimits = SessionLimits()

    environment_timeout_s: float = Field(default=60.0, gt=0)
    """Longest time environment code may take for one call, in seconds."""

    teacher_workers: list[WorkerEndpoint] = Field(default_factory=list[WorkerEndpoint])
    """Teacher workers that judge what is sampled for training; none unless the run distils from a pool of them."""

    teacher_timeout_s: float = Field(default=60.0, gt=0)
    """Longest time to have a group judged by the teacher, in seconds: then it fails, and is run again."""

    environment_blocked_timeout_s: float = Field(default=30.0, gt=0)
    """Longest time environment code may hold its process without awaiting anything, in seconds; taken as half of
    `environment_timeout_s` if that is less. Then the process is replaced."""

    report_period_s: float = Field(default=0.02, gt=0)
    """Finished groups are collected for this long before they are reported together, in seconds."""

    rollout_log_limit_bytes: int = Field(default=256 * 2**20, ge=4096)
    """Bytes of this runner's rollouts on disk, compressed; the older half goes when they are reached. Those of
    evaluations may take as many again."""

    rollout_buffer_bytes: int = Field(default=64 * 2**20, ge=2**20)
    """Rollouts that wait in memory while the disk is full, in bytes. No group is taken meanwhile."""
