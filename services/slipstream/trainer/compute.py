"""From `[trainer.compute]` to where and how a rank computes."""

from __future__ import annotations

import torch

from slipstream.common.config import ConfigError
from slipstream.trainer.config import ComputeConfig
from slipstream.trainer.parallel.sharding import Passes


def device_of(config: ComputeConfig) -> torch.device:
    """The device of a rank. Raises `ConfigError` where there is none."""
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError('trainer.compute.device is "cuda", and this PyTorch sees no card')
    return torch.device("cuda", 0)


def passes_of(config: ComputeConfig) -> Passes:
    """How forward and backward passes compute."""
    return Passes(config.precision == "bfloat16", config.logits_bytes)
