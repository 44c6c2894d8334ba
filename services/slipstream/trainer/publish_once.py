"""Publish a model directory as version 1.0, and end: `python -m slipstream.trainer.publish_once @ trainer.toml`.

What serves weights without training any, such as `slipstream eval`, starts it once the broadcaster is up. Nothing is
trained, and nothing but the version is written.
"""

from __future__ import annotations

import asyncio

import structlog
import torch

from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.config import ConfigError, cli
from slipstream.common.errors import SlipstreamError
from slipstream.common.exits import FAILED, REFUSED, end
from slipstream.common.telemetry import setup_logging
from slipstream.common.version import PolicyVersion
from slipstream.models.checkpoint import load_model
from slipstream.models.registry import load_sizes
from slipstream.trainer.compute import device_of, passes_of
from slipstream.trainer.config import TrainerConfig
from slipstream.trainer.frozen import FrozenModels
from slipstream.trainer.probe import choose_probe, probe_prompts
from slipstream.trainer.step import Learner
from slipstream.weights.manifest import Probe
from slipstream.weights.transport import GrpcWeightTransport

log = structlog.get_logger()


def load(config: TrainerConfig) -> Learner:
    """The model of `initial_model`; `<run_dir>/model` has its sizes. Raises `ConfigError`."""
    if config.initial_model is None:
        raise ConfigError("initial_model is required: there is nothing else to publish")
    model = load_model(load_sizes(config.model_dir), config.initial_model)
    tree: torch.nn.Module = model  # pyright: ignore[reportAssignmentType] models are modules
    tree.to(device_of(config.compute))
    return Learner(model, config.optim, config.loss, FrozenModels(), passes=passes_of(config.compute))


async def publish(config: TrainerConfig) -> None:
    """Load and publish. Raises `SlipstreamError`."""
    learner = load(config)
    prompts = probe_prompts(learner.model.sizes.vocab_size, config.probe_tokens, config.seed)
    prompt, logps = choose_probe(prompts, learner.probe)
    version = PolicyVersion(config.incarnation, 0)
    async with open_channel(config.broadcaster, Access.from_config(config)) as channel:
        transport = GrpcWeightTransport(channel)
        await transport.publish(version, learner.export(), Probe(prompt, tuple(logps), config.probe_tolerance))
    log.info("published", version=str(version), model=str(config.initial_model))


def main() -> None:
    config = cli(TrainerConfig)
    setup_logging(config, "trainer")
    torch.set_num_threads(config.torch_threads)
    try:
        asyncio.run(publish(config))
    except ConfigError as error:
        end(REFUSED, str(error))
    except SlipstreamError as error:
        end(FAILED, str(error))


if __name__ == "__main__":
    main()
