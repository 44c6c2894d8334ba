"""Configuration of evaluations."""

from __future__ import annotations

from pydantic import Field

from slipstream.common.config import BaseConfig


class EvaluationConfig(BaseConfig):
    """How held-out problems are asked."""

    samples: int = Field(default=1, ge=1, le=256)
    """Answers to each problem; more than one also give pass@k."""

    temperature: float | None = Field(default=None, ge=0, le=10)
    """Of their sampling; 0 is greedy. Unset: greedy where each problem is asked once, and the temperature of the
    environment's training otherwise."""

    share: float = Field(default=0.25, gt=0, le=1)
    """While training goes on, the part of the slots of runners and of the admission bound that an evaluation may take:
    of groups, and of samples. One group may run in any case."""

    timeout_s: float = Field(default=3600.0, gt=0)
    """An evaluation that takes longer ends with the answers it has; pauses of the run do not count."""

    def temperature_for(self, own: float) -> float:
        """Of the sampling of an environment whose own temperature this is."""
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.samples == 1 else own
