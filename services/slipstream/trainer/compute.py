"""From `[trainer.compute]` to where and how a rank computes."""

from __future__ import annotations

import torch

from slipstream.common.config import ConfigError
from slipstream.trainer.config import ComputeConfig
from slipstream.trainer.parallel.sharding import Passes


def device_of(config: ComputeConfig, place: int = 0) -> torch.device:
    """The device of the rank with this number on its machine; of cards, the one that torch uses from now on.

    Raises `ConfigError` where there is none.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError('trainer.compute.device is "cuda", and this PyTorch sees no card')
    count = torch.cuda.device_count()
    if place >= count:
        raise ConfigError(
            f'trainer.compute.device is "cuda": rank {place} of this machine has no card, there are {count}'
        )
    torch.cuda.set_device(place)
    return torch.device("cuda", place)


def passes_of(config: ComputeConfig) -> Passes:
    """How forward and backward passes compute."""
    return Passes(config.precision == "bfloat16", config.logits_bytes, config.round_once)
