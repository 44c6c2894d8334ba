"""Configuration of a replay. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from slipstream.trainer.config import TrainerConfig


class ReplayConfig(TrainerConfig):
    """The trainer's configuration, and what it is to train."""

    recorded: Path
    """Directory of the run whose rollouts are trained."""

    plans: Path
    """Directory with a file for each step, `<step>.plan`: the sealed plan, as on the wire."""
