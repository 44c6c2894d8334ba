"""Configuration of a prefill worker. Imports no torch."""

from __future__ import annotations

from slipstream.engine.worker.config import WorkerConfig


class PrefillConfig(WorkerConfig):
    """A worker that computes prompts."""
