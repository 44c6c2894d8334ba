"""Learning rates by step."""

from __future__ import annotations

import math

from slipstream.trainer.optim_config import OptimConfig


def rate_factor(step: int, config: OptimConfig) -> float:
    """Factor of the learning rate at `step` (from 1): linear rise to 1, then as the schedule says.

    Steps after `total_steps` stay at what that one has.
    """
    if step <= config.warmup_steps:
        return step / (config.warmup_steps + 1)
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            return _between(1.0 - _done(step, config.warmup_steps, config.total_steps), config)
        case "cosine":
            done = _done(step, config.warmup_steps, config.total_steps)
            return _between(0.5 + 0.5 * math.cos(math.pi * done), config)
        case "wsd":
            start = max(config.warmup_steps, config.total_steps - config.decay_steps)
            return _between(1.0 - _done(step, start, config.total_steps), config)


def _done(step: int, start: int, end: int) -> float:
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))


def _between(height: float, config: OptimConfig) -> float:
    return config.final_lr_fraction + (1.0 - config.final_lr_fraction) * height
