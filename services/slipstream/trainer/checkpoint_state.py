"""What a checkpoint holds of a model in training, and how it comes back: weights, the optimizer's state, random states.

The schedule is a function of the step, which is in the checkpoint's version. Parameters may be DTensors, saved by so
many ranks and loaded by others. Runs on the torch thread; an asynchronous save returns once everything is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from slipstream.common.config import ConfigError
from slipstream.common.errors import CheckpointFailed, SlipstreamError
from slipstream.common.version import PolicyVersion
from slipstream.models.base import Model
from slipstream.trainer.checkpoint_store import CheckpointStore
from slipstream.trainer.optimizer import ModelOptimizer, plain_name
from slipstream.trainer.tensor_files import SafetensorsReader, SafetensorsWriter

_MODEL, _OPTIMIZER, _OTHERS, _RANDOM = "model/", "optimizer/", "others/", "random/"


@dataclass(frozen=True)
class Target:
    """Where a checkpoint is written."""

    begin: Callable[[], Path]
    """Makes the directory, at rank 0."""
    directory: Path
    commit: Callable[[], None]
    """Called at rank 0 once all ranks have written."""
    discard: Callable[[], None]
    """Removes what a failed save has left, at rank 0."""

    @classmethod
    def of(cls, store: CheckpointStore, version: PolicyVersion, figures: dict[str, float]) -> Self:
        """The store's place for a version."""
        begin, commit = partial(store.begin, version), partial(store.commit, version, figures)
        return cls(begin, store.scratch(version), commit, partial(store.discard, version))


@dataclass(frozen=True)
class Saving:
    """A checkpoint that is being written."""

    _future: Future[Any]
    _discard: Callable[[], None]

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        """Return when it is durable. Blocks. Raises `CheckpointFailed`, and then nothing of it is left."""
        try:
            self._future.result()
        except (CheckpointException, OSError, SlipstreamError) as error:
            self._discard()
            raise CheckpointFailed(f"the checkpoint was not written: {_cause(error)}") from error


def own_group() -> dist.ProcessGroup | None:
    """A group for writing beside the training, whose collectives go on meanwhile. Collective."""
    return cast("dist.ProcessGroup", dist.new_group(backend="gloo")) if dist.is_initialized() else None


def save_async(
    model: Model,
    optimizer: ModelOptimizer,
    others: Mapping[str, Tensor],
    target: Target,
    group: dist.ProcessGroup | None,
) -> Saving:
    """Copy the state, and write the copy in a thread of its own. Collective where there are ranks."""
    writer = SafetensorsWriter(target.begin, target.directory, target.commit)
    state = {**_state(model, optimizer), **_named(others)}
    future = state_dict_saver.async_save(state, storage_writer=writer, process_group=group, no_dist=group is None)
    first = not dist.is_initialized() or dist.get_rank() == 0
    return Saving(cast("Future[Any]", future), target.discard if first else _nothing)


def _nothing() -> None:
    """Rank 0 does it."""


def _cause(error: BaseException) -> str:
    """One line."""
    failures = getattr(error, "failures", {})
    return "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in failures.items()) or str(error)


def load(
    model: Model,
    optimizer: ModelOptimizer,
    others: Mapping[str, Tensor],
    directory: Path,
    section: str = "trainer.optim",
) -> None:
    """Bring a model and its optimizer to a checkpoint, whichever ranks wrote it. Collective where there are ranks.

    `section` configures the optimizer.

    Raises:
        ConfigError: the checkpoint is of another model or optimizer.
        CheckpointFailed: it cannot be read.
    """
    reader = SafetensorsReader(directory)
    weights = _weights(model, reader, directory)
    states = _empty_states(optimizer, reader, directory, section)
    moments = {f"{_OPTIMIZER}{name}/{key}": value for name, state in states.items() for key, value in state.items()}
    random = {
        name: torch.zeros(reader.shapes[name], dtype=torch.uint8) for name in _random_states() if name in reader.shapes
    }
    _read({**weights, **moments, **random, **_named(others)}, reader, directory)
    optimizer.load_state(states)
    optimizer.weights_changed()
    _set_random_states(random)


def load_weights(model: Model, directory: Path) -> None:
    """Bring a model alone to a checkpoint. Raises as `load` does."""
    reader = SafetensorsReader(directory)
    _read(_weights(model, reader, directory), reader, directory)


def _weights(model: Model, reader: SafetensorsReader, directory: Path) -> dict[str, Tensor]:
    """Of the model, for those that are saved to be read into. Raises `ConfigError` where they are of another one."""
    weights = _model_tensors(model)
    saved = {name for name in reader.shapes if name.startswith(_MODEL)}
    wrong = sorted(saved ^ weights.keys()) or [n for n in weights if tuple(weights[n].shape) != reader.shapes[n]]
    if wrong:
        raise ConfigError(f"{directory} is of another model: {', '.join(wrong[:3])}")
    return weights


def _read(tensors: dict[str, Tensor], reader: SafetensorsReader, directory: Path) -> None:
    try:
        state_dict_loader.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise CheckpointFailed(f"{directory} cannot be read: {_cause(error)}", path=directory) from error


def _state(model: Model, optimizer: ModelOptimizer) -> dict[str, Tensor]:
    state = _model_tensors(model)
    for name, values in optimizer.state.items():
        parameter = optimizer.parameters[name]
        state |= {f"{_OPTIMIZER}{name}/{key}": _placed(value, parameter) for key, value in values.items()}
    return state | _random_states()


def _named(others: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whatever else is the same on all ranks."""
    return {f"{_OTHERS}{name}": tensor for name, tensor in others.items() if tensor.numel()}


def _model_tensors(model: Model) -> dict[str, Tensor]:
    """Every parameter once, frozen ones too, by name."""
    return {f"{_MODEL}{plain_name(name)}": p.detach() for name, p in model.named_parameters()}


def _placed(value: Tensor, parameter: Tensor) -> Tensor:
    """A part of a moment as part of a whole, where the optimizer keeps parts in host memory."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or value.ndim != parameter.ndim:
        return value
    return DTensor.from_local(
        value.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _empty_states(
    optimizer: ModelOptimizer, reader: SafetensorsReader, directory: Path, section: str
) -> dict[str, dict[str, Tensor]]:
    """Room for the optimizer's state as it was saved, each moment placed as its parameter."""
    states: dict[str, dict[str, Tensor]] = {}
    for full_name, shape in reader.shapes.items():
        if not full_name.startswith(_OPTIMIZER):
            continue
        name, _, key = full_name.removeprefix(_OPTIMIZER).rpartition("/")
        parameter = optimizer.parameters.get(name)
        if parameter is None or shape not in ((), tuple(parameter.shape)):
            raise ConfigError(f"{directory} is of another optimizer: {full_name}")
        dtype = reader.dtypes[full_name]
        like = torch.zeros_like(parameter.detach(), dtype=dtype)
        states.setdefault(name, {})[key] = like if shape else torch.zeros((), dtype=dtype, device=parameter.device)
    for name, state in states.items():
        kept = optimizer.state_keys(name)
        if state.keys() != kept:
            raise ConfigError(
                f"{directory} is of another optimizer: of {name} it has {', '.join(sorted(state))}, and "
                f'{section}.algorithm = "{optimizer.algorithm}" keeps {", ".join(sorted(kept))}'
            )
    return states


def _random_states() -> dict[str, Tensor]:
    """Of this rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    states = {f"{_RANDOM}{rank}/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{_RANDOM}{rank}/cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: dict[str, Tensor]) -> None:
    for name, state in states.items():
        if name.endswith("/cpu"):
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state)
