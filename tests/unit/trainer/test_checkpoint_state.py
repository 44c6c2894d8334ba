"""A checkpoint comes back into the optimizer that wrote it, and into no other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.common.config import ConfigError
from slipstream.trainer.checkpoint_state import Target, load, save_async, wait
from slipstream.trainer.optim_config import OptimConfig
from slipstream.trainer.optimizer import ModelOptimizer

from .tiny import tiny_model

ALGORITHMS = ("adamw", "sgd", "muon")


def stepped(algorithm: str):
    model = tiny_model()
    optimizer = ModelOptimizer(model.named_parameters(), OptimConfig.model_validate({"algorithm": algorithm}))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1)
    return model, optimizer


@pytest.mark.parametrize("other", ALGORITHMS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path, algorithm, other):
    def begin() -> Path:
        (tmp_path / "saved").mkdir()
        return tmp_path / "saved"

    model, optimizer = stepped(algorithm)
    wait(save_async(model, optimizer, {}, Target(begin, tmp_path / "saved", lambda: None), None))
    fresh, own = stepped(other)
    if algorithm == other:
        load(fresh, own, {}, tmp_path / "saved")
        for name, state in optimizer.state.items():
            assert all(torch.equal(value, own.state[name][key]) for key, value in state.items())
    else:
        with pytest.raises(ConfigError, match=f'of another optimizer: .* trainer.optim.algorithm = "{other}" keeps'):
            load(fresh, own, {}, tmp_path / "saved")
