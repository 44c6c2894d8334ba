"""A checkpoint comes back into the optimizer that wrote it, and into no other."""

from __future__ import annotations

import shutil

import pytest
import torch

from slipstream.common.config import ConfigError, dump_toml
from slipstream.common.errors import CheckpointFailed
from slipstream.common.version import PolicyVersion
from slipstream.launcher.evaluate import weights_at
from slipstream.launcher.rundir import RunDir
from slipstream.models.checkpoint import load_model, to_hf
from slipstream.models.lora.adapters import attach
from slipstream.models.lora.config import LoraConfig
from slipstream.models.registry import load_sizes, save_sizes
from slipstream.trainer.checkpoint_export import export
from slipstream.trainer.checkpoint_state import Target, load, save_async
from slipstream.trainer.checkpoint_store import CheckpointStore
from slipstream.trainer.config import TrainerConfig
from slipstream.trainer.optim_config import OptimConfig
from slipstream.trainer.optimizer import ModelOptimizer

from .tiny import tiny_model

ALGORITHMS = ("adamw", "sgd", "muon")


def stepped(algorithm: str, adapters: bool):
    model = tiny_model()
    if adapters:  # all that is trained are matrices then
        attach(model, LoraConfig(rank=2), 0)
    optimizer = ModelOptimizer(model.named_parameters(), OptimConfig.model_validate({"algorithm": algorithm}))
    for parameter in optimizer.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1)
    return model, optimizer


@pytest.mark.parametrize("adapters", [False, True], ids=["weights", "adapters"])
@pytest.mark.parametrize("other", ALGORITHMS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path, algorithm, other, adapters):
    target = Target.of(CheckpointStore(tmp_path), PolicyVersion(1, 1), {})
    model, optimizer = stepped(algorithm, adapters)
    save_async(model, optimizer, {}, target, None).wait()
    fresh, own = stepped(other, adapters)
    if algorithm == other:
        load(fresh, own, {}, tmp_path / "1.1")
        for name, state in optimizer.state.items():
            assert all(torch.equal(value, own.state[name][key]) for key, value in state.items())
    else:
        with pytest.raises(ConfigError, match=f'of another optimizer: .* trainer.optim.algorithm = "{other}" keeps'):
            load(fresh, own, {}, tmp_path / "1.1")


@pytest.mark.parametrize("adapters", [False, True], ids=["weights", "adapters"])
def test_a_checkpoint_becomes_a_model_directory_with_its_adapters_merged(tmp_path, adapters):
    model, optimizer = stepped("adamw", adapters)
    (tmp_path / "model").mkdir()
    save_sizes(model.sizes, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    target = Target.of(CheckpointStore(tmp_path / "checkpoints"), PolicyVersion(1, 1), {})
    save_async(model, optimizer, {}, target, None).wait()
    config = TrainerConfig(run_dir=tmp_path, lora=LoraConfig(rank=2) if adapters else None)
    with pytest.raises(CheckpointFailed, match=r"1\.2: it has no COMPLETE"):
        export(config, PolicyVersion(1, 2))
    export(config, PolicyVersion(1, 1))
    exported = tmp_path / "checkpoints" / "exported" / "1.1"
    assert (exported / "tokenizer.json").read_text() == "{}"
    found, meant = to_hf(load_model(load_sizes(exported), exported)), to_hf(model)
    assert found.keys() == meant.keys()
    assert all(torch.equal(found[name], meant[name]) for name in meant)


def test_a_checkpoint_of_a_copied_run_becomes_a_model_directory_in_the_copy(tmp_path):
    model, optimizer = stepped("adamw", adapters=False)
    original = RunDir(tmp_path / "original")
    (original.path / "configs").mkdir(parents=True)
    (original.path / "model").mkdir()
    save_sizes(model.sizes, original.path / "model")
    target = Target.of(CheckpointStore(original.path / "checkpoints"), PolicyVersion(1, 1), {})
    save_async(model, optimizer, {}, target, None).wait()
    original.service_config("trainer").write_text(dump_toml(TrainerConfig(run_dir=original.path)))
    copy = RunDir(tmp_path / "elsewhere" / "copy")
    shutil.copytree(original.path, copy.path)
    said: list[str] = []
    exported = weights_at(copy, "newest", said.append)
    assert exported == copy.path / "checkpoints" / "exported" / "1.1"
    assert (exported / "config.json").exists()
    assert not (original.path / "checkpoints" / "exported").exists()
