"""Adapters as a directory that peft and vLLM load: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from slipstream.common.disk import make_directory, replace_file
from slipstream.models.lora.adapters import Adapters

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


def save_adapters(adapters: Adapters, halves: Mapping[str, Tensor], base_model: str, directory: Path) -> None:
    """Write both files, each whole or not at all, the configuration last. Raises `DiskFull`.

    `halves`: what `adapters.tensors()` gives, for which all ranks take part.

    Experts have an adapter each, under the names of a checkpoint; peft fuses them where transformers has.
    """
    make_directory(directory)
    tensors = {name: tensor.cpu().clone() for name, tensor in halves.items()}
    replace_file(directory / WEIGHTS_FILE, save(tensors, metadata={"format": "pt"}))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapters.config.rank,
        "lora_alpha": adapters.config.alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name in adapters.modules}),
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    replace_file(directory / CONFIG_FILE, json.dumps(config, indent=2).encode() + b"\n")
