"""Weights of any model by Hugging Face names: in place, without copies where the layout allows, and as files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from slipstream.common.config import ConfigError
from slipstream.models.base import Model, Sizes
from slipstream.models.lora.adapters import adapters_of
from slipstream.models.meta import on_meta
from slipstream.models.registry import BUILT_IN, find_architecture, save_sizes
from slipstream.models.shards import SHARD_BYTES, ShardReader, check_layers, check_shapes, write_shards

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def to_hf(model: Model, *, merged: bool = True) -> dict[str, Tensor]:
    """Contiguous float32 tensors by Hugging Face name, with what adapters add unless they are not to be `merged`.

    Some share memory with the live parameters: copy to keep.
    """
    return {
        name: (_weight(model, name, view) if merged else _matrix(view)).contiguous()
        for name, view in model.hf_views().items()
    }


def shapes_of(model: Model) -> dict[str, tuple[int, ...]]:
    """Shapes of a checkpoint by name."""
    return {
        name: (view.numel() // view.shape[-1], view.shape[-1]) if view.ndim > 2 else tuple(view.shape)
        for name, view in model.hf_views().items()
    }


def expected_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Shapes of a whole checkpoint by name, from the model's own code; no memory is taken."""
    with on_meta():
        return shapes_of(find_architecture(sizes.architecture).build_model(sizes))


@torch.no_grad()
def load_hf(model: Model, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors of any dtype into the live parameters. Names and shapes must match; else nothing is written."""
    check_shapes(shapes_of(model), {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    for name, view in model.hf_views().items():
        view.copy_(tensors[name].view_as(view))


def save_model(model: Model, model_dir: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write `config.json` and the weights, adapters merged, each file whole or not at all. Raises `DiskFull`."""
    save_sizes(model.sizes, model_dir)
    views = model.hf_views()
    sizes_bytes = {name: view.numel() * view.element_size() for name, view in views.items()}
    write_shards(model_dir, sizes_bytes, lambda name: _weight(model, name, views[name]), shard_bytes)


def save_tensors(sizes: Sizes, tensors: Mapping[str, Tensor], model_dir: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """The same of weights by name."""
    save_sizes(sizes, model_dir)
    sizes_bytes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    write_shards(model_dir, sizes_bytes, lambda name: tensors[name], shard_bytes)


@torch.no_grad()
def load_model(sizes: Sizes, model_dir: Path) -> Model:
    """Build the model of these sizes and copy the directory's weights into it, a file at a time.

    Raises:
        ConfigError: a tensor is missing, unexpected or of another shape; all names are told.
    """
    reader = ShardReader(model_dir)
    try:
        if sizes.architecture in BUILT_IN:  # one of somebody's own names its layers as it likes
            check_layers(sizes.n_layers, reader.shapes)
        model = find_architecture(sizes.architecture).build_model(sizes)
        check_source(shapes_of(model), reader)
    except ValueError as error:
        raise ConfigError(f"{model_dir}: {error}") from None
    views = model.hf_views()
    for name in reader.shapes:
        if name in views:
            views[name].copy_(reader.read(name).view_as(views[name]))
    return model


def check_source(expected: Mapping[str, tuple[int, ...]], reader: ShardReader) -> None:
    """Raise `ValueError` unless the tensors are those expected; a tied head may be there once more."""
    found = dict(reader.shapes)
    if HEAD in found and HEAD not in expected:
        if found[HEAD] != found.get(EMBEDDING) or not torch.equal(reader.read(HEAD).clone(), reader.read(EMBEDDING)):
            raise ValueError(f"{HEAD} is not {EMBEDDING}, though config.json says tie_word_embeddings")
        del found[HEAD]
    check_shapes(expected, found)


def _weight(model: Model, name: str, view: Tensor) -> Tensor:
    adapters = adapters_of(model)
    return _matrix(view) if adapters is None else adapters.merged(name, _matrix(view))


def _matrix(view: Tensor) -> Tensor:
    return view.reshape(-1, view.shape[-1]) if view.ndim > 2 else view
