"""Which models vLLM runs for us: the built-in families, all updated in flight there. Imports neither it nor torch."""

from __future__ import annotations

from slipstream.common.config import ConfigError
from slipstream.models.base import Sizes
from slipstream.models.registry import BUILT_IN


def why_not(architecture: str) -> str | None:
    """Why a model of this architecture does not run on vLLM; None where it does."""
    return None if architecture in BUILT_IN else "whose code vLLM does not run"


def check_family(sizes: Sizes, where: str) -> None:
    """Refuse a model that vLLM would compute otherwise, in the name of the setting that asks for vLLM."""
    why = why_not(sizes.architecture)
    if why is not None:
        raise ConfigError(f'{where} is "vllm", and the model is of "{sizes.architecture}", {why}')
    if sizes.architecture == "qwen3" and sizes.to_hf().get("attention_bias"):
        raise ConfigError(f'{where} is "vllm", which leaves out the bias of attention\'s output in a "qwen3" model')
