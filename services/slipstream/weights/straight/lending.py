"""A trainer's side of a straight transport before it has a model: the server starts first. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.common.errors import WeightVersionUnknown
from slipstream.weights.config import WeightsConfig
from slipstream.weights.straight.source import WeightSourceServicer

if TYPE_CHECKING:
    import torch

    from slipstream.weights.straight.lender import Lender


class Lending:
    """Serves loans from the start; there is nothing to lend before `begin`."""

    def __init__(self, config: WeightsConfig) -> None:
        self._config = config
        self._lender: Lender | None = None
        self.address = ""
        """host:port at which readers reach this process."""
        self.servicer = WeightSourceServicer(config.transport, self.lender)

    def begin(self, device: torch.device) -> Lender:
        """From now on weights of this device can be kept. Raises `ConfigError` where they cannot."""
        from slipstream.weights.straight.lender import Lender

        self._lender = Lender(self._config, device, self.address)
        return self._lender

    def lender(self) -> Lender:
        """Raises `WeightVersionUnknown` before `begin`."""
        if self._lender is None:
            raise WeightVersionUnknown("nothing is published yet")
        return self._lender

    def close(self) -> None:
        if self._lender is not None:
            self._lender.close()
