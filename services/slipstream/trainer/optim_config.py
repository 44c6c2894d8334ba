"""Which optimizer takes the steps, at which rates. Imports no torch."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from slipstream.common.config import BaseConfig

Beta = Annotated[float, Field(ge=0, lt=1)]


class ParameterGroupConfig(BaseConfig):
    """Parameters that are treated otherwise than the rest."""

    pattern: str = Field(min_length=1)
    """Regular expression, looked for anywhere in a parameter's name. The first group that matches counts."""

    lr_factor: float = Field(default=1.0, ge=0)
    """Multiplies the learning rate. 0 freezes them."""

    weight_decay: float | None = Field(default=None, ge=0)
    """In place of the optimizer's. Unset keeps that one."""

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from None
        return pattern


class OptimConfig(BaseConfig):
    """The optimizer, its rates, and what a gradient is held to."""

    algorithm: Literal["adamw", "sgd", "muon"] = "adamw"
    """`muon` orthogonalises the updates of matrices, each expert's by itself; embeddings, head, gates and what is no
    matrix are AdamW's, at the same rate."""

    lr: float = Field(default=1e-3, gt=0)
    """Learning rate after the warm-up."""

    betas: tuple[Beta, Beta] = (0.9, 0.99)
    """AdamW's decay of the first and second moments."""

    eps: float = Field(default=1e-8, gt=0)
    """Added to AdamW's denominator."""

    momentum: Beta = 0.95
    """Of SGD and Muon, with Nesterov's correction."""

    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay, of matrices and norms alike; `groups` may say otherwise. With SGD it is added to the
    gradient."""

    groups: list[ParameterGroupConfig] = Field(default_factory=list, max_length=64)
    """Parameters with a rate or weight decay of their own."""

    warmup_steps: int = Field(default=5, ge=0)
    """Steps over which the rate rises to `lr`."""

    schedule: Literal["constant", "linear", "cosine", "wsd"] = "linear"
    """From `lr` after the warm-up to `final_lr_fraction` of it at `total_steps`. `wsd` (warm-up, stable, decay) keeps
    `lr` until the last `decay_steps`; `constant` never falls."""

    decay_steps: int = Field(default=20, ge=1)
    """Steps of the fall at the end of `wsd`."""

    total_steps: int = Field(default=100, ge=1)
    """Steps of the run: the decay ends here."""

    final_lr_fraction: float = Field(default=0.05, ge=0, le=1)
    """Rate of the last step, as a part of `lr`."""

    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""

    balance_coefficient: float = Field(default=1e-3, ge=0)
    """Weight of the experts' load-balance loss."""

    offload_state: bool = False
    """Keep the optimizer's state, and copies of the weights, in host memory and take its steps there. Not with Muon,
    whose matrix products a processor is too slow for."""

    offload_activations: bool = False
    """Keep what the backward pass needs in host memory until then."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.offload_state and self.algorithm == "muon":
            raise ValueError('offload_state: not with algorithm = "muon"')
        return self
