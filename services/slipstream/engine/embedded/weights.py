"""The live parameters: replaced in place while the engine pauses, put back when a check fails."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from slipstream.models.base import Model
from slipstream.models.checkpoint import load_hf, to_hf


class LiveWeights:
    """The weights an engine computes with, and a second copy to go back to."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._parameters = list(model.parameters())
        self._previous = [torch.empty_like(parameter) for parameter in self._parameters]

    @contextmanager
    def replaced(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[float]:
        """Copy `tensors` (Hugging Face names) in; an exception in the body puts the old ones back."""
        started = time.monotonic()
        accepted = False
        for kept, parameter in zip(self._previous, self._parameters, strict=True):
            kept.copy_(parameter)
        try:
            load_hf(self._model, tensors)
            yield time.monotonic() - started
            accepted = True
        finally:
            if not accepted:
                for kept, parameter in zip(self._previous, self._parameters, strict=True):
                    parameter.copy_(kept)

    def arrays(self) -> dict[str, np.ndarray]:
        """Parameters by Hugging Face name; some share memory with the live ones."""
        return {name: tensor.numpy() for name, tensor in to_hf(self._model).items()}
