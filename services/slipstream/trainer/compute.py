"""From `[trainer.compute]` to where and how a rank computes."""

from __future__ import annotations

import torch

from slipstream.common.config import ConfigError
from slipstream.trainer.config import ComputeConfig
from slipstream.trainer.parallel.sharding import Passes


def device_of(config: ComputeConfig, local_rank: int = 0) -> torch.device:
    """The device of a rank, `local_rank` counting those of this machine. Raises `ConfigError` where there is none."""
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError('trainer.compute.device is "cuda", and this PyTorch sees no card')
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def passes_of(config: ComputeConfig) -> Passes:
    """How forward and backward passes compute."""
    return Passes(config.precision == "bfloat16", config.logits_bytes)
