"""What fine-tuning goes on from: weights and the optimizer's state, in a directory a step.

Killed at any moment, the last whole one stays: `checkpoint.json` is written last, and a directory without it is none.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.common.config import ConfigError
from slipstream.common.disk import full_disk_named, make_directory, replace_file, sync_directory, sync_file
from slipstream.models.base import Model
from slipstream.trainer.optimizer import ModelOptimizer, plain_name

RECORD_FILE, WEIGHTS_FILE, OPTIMIZER_FILE = "checkpoint.json", "weights.safetensors", "optimizer.safetensors"


@dataclass(frozen=True)
class Record:
    """Where a run was."""

    step: int
    skipped_steps: int
    plan_digest: str
    """Of what the steps learn from, in their order."""


class Checkpoints:
    """Those of one run."""

    def __init__(self, directory: Path, keep_last: int) -> None:
        self._directory = directory
        self._keep_last = keep_last

    def save(self, record: Record, model: Model, optimizer: ModelOptimizer) -> None:
        """Write one, on disk before it counts, and drop the oldest. Raises `DiskFull`."""
        target = self._directory / f"step-{record.step:08d}"
        make_directory(target)
        weights = {plain_name(name): parameter.detach() for name, parameter in model.named_parameters()}
        state = {f"{key}/{name}": tensor for name, held in optimizer.state.items() for key, tensor in held.items()}
        for file, tensors in ((WEIGHTS_FILE, weights), (OPTIMIZER_FILE, state)):
            with full_disk_named(target):
                save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / file)
            sync_file(target / file)
        replace_file(target / RECORD_FILE, json.dumps(asdict(record)).encode() + b"\n")
        sync_directory(self._directory)
        for old in self._whole()[: -self._keep_last]:
            (old / RECORD_FILE).unlink()  # from now on it is none
            shutil.rmtree(old)

    def newest(self) -> Record | None:
        """The newest whole one's record."""
        whole = self._whole()
        return Record(**json.loads((whole[-1] / RECORD_FILE).read_text())) if whole else None

    @torch.no_grad()
    def load(self, record: Record, model: Model, optimizer: ModelOptimizer) -> None:
        """Put weights and state back. Raises `ConfigError` where they are another model's."""
        source = self._directory / f"step-{record.step:08d}"
        weights = load_file(source / WEIGHTS_FILE)
        parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        if {n: tuple(t.shape) for n, t in weights.items()} != {n: tuple(p.shape) for n, p in parameters.items()}:
            raise ConfigError(f"{source} is of another model")
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
        optimizer.load_state(_by_parameter(load_file(source / OPTIMIZER_FILE)))
        optimizer.weights_changed()

    def _whole(self) -> list[Path]:
        return sorted(path.parent for path in self._directory.glob(f"step-*/{RECORD_FILE}"))


def _by_parameter(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    for path, tensor in state.items():
        key, _, name = path.partition("/")
        found.setdefault(name, {})[key] = tensor
    return found
