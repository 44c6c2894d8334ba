"""The renderer of a run."""

from __future__ import annotations

from pathlib import Path

from slipstream.common.config import ConfigError
from slipstream.environments.chat import Chat
from slipstream.environments.config_renderer import FamilyConfig, RendererConfig
from slipstream.environments.renderer import Renderer
from slipstream.environments.tokenizer import TextCodec

INSTALL = 'pip install "slipstream[renderers]"'


def load_renderer(model_dir: Path, codec: TextCodec, config: RendererConfig) -> Renderer:
    """What a section says, for the tokenizer of a model directory. Raises `ConfigError`."""
    if not isinstance(config, FamilyConfig):
        return Chat.load(model_dir, codec)
    try:
        from slipstream.environments.families import FamilyRenderer
    except ModuleNotFoundError as error:
        raise ConfigError(f"runner.renderer: {error.name} is not installed: {INSTALL}") from None
    return FamilyRenderer.load(model_dir, codec, config)
