"""Weights of any model by Hugging Face names: in place, without copies where the layout allows, and as files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from slipstream.common.config import ConfigError
from slipstream.common.disk import replace_file
from slipstream.models.base import Model, Sizes
from slipstream.models.registry import find_architecture, save_sizes

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def to_hf(model: Model) -> dict[str, Tensor]:
    """Contiguous float32 tensors by Hugging Face name. Some share memory with the live parameters: copy to keep."""
    return {
        name: (view.reshape(-1, view.shape[-1]) if view.ndim > 2 else view).contiguous()
        for name, view in model.hf_views().items()
    }


@torch.no_grad()
def load_hf(model: Model, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors of any dtype into the live parameters. Names and shapes must match; else nothing is written."""
    views = model.hf_views()
    if views.keys() != tensors.keys():
        missing, extra = sorted(views.keys() - tensors.keys()), sorted(tensors.keys() - views.keys())
        raise ValueError(f"state dict does not match the model: missing {missing[:3]}, unexpected {extra[:3]}")
    for name, view in views.items():
        expected = (view.numel() // view.shape[-1], view.shape[-1]) if view.ndim > 2 else tuple(view.shape)
        if tuple(tensors[name].shape) != expected:
            raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}, expected {expected}")
    for name, view in views.items():
        view.copy_(tensors[name].view_as(view))


def save_model(model: Model, model_dir: Path) -> None:
    """Write `config.json` and `model.safetensors`, each whole or not at all. Raises `DiskFull`."""
    save_sizes(model.sizes, model_dir)
    replace_file(model_dir / WEIGHTS_FILE, save(to_hf(model), metadata={"format": "pt"}))


def load_model(sizes: Sizes, model_dir: Path) -> Model:
    """Build the model of these sizes and load the directory's weights, in one file or in the files of an index."""
    model = find_architecture(sizes.architecture).build_model(sizes)
    try:
        load_hf(model, {name: tensor for file in _weight_files(model_dir) for name, tensor in load_file(file).items()})
    except ValueError as error:
        raise ConfigError(f"{model_dir}: {error}") from None
    return model


def _weight_files(model_dir: Path) -> list[Path]:
    index = model_dir / INDEX_FILE
    if not index.exists():
        return [model_dir / WEIGHTS_FILE]
    names: set[str] = set(json.loads(index.read_text())["weight_map"].values())
    return [model_dir / Path(name).name for name in sorted(names)]
