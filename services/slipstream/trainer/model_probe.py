"""Whether what is trained, and how, is there in the model: targets of adapters and FP8, and groups of parameters.

The model is built without memory for its weights. As a process of its own, for those who import no torch: reads one
JSON object on standard input; the last line of standard output is a JSON list of problems, each a key and a sentence.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import TypeAdapter

from slipstream.common.config import ConfigError
from slipstream.models.base import Sizes
from slipstream.models.fp8.config import Fp8Config
from slipstream.models.fp8.modules import convert
from slipstream.models.lora.adapters import attach
from slipstream.models.lora.config import AdapterConfig, LoraConfig
from slipstream.models.meta import on_meta
from slipstream.models.registry import find_architecture, sizes_of
from slipstream.trainer.optim_config import ParameterGroupConfig

Problem = tuple[str, str]
NAMES_SHOWN = 3


def problems(
    sizes: Sizes, lora: AdapterConfig | None, fp8: Fp8Config | None, groups: Sequence[ParameterGroupConfig]
) -> list[Problem]:
    """The first thing that a model of these sizes does not have, if any: the key that names it, and a sentence."""
    if lora is None and fp8 is None and not groups:
        return []
    with on_meta():
        model = find_architecture(sizes.architecture).build_model(sizes)
    try:
        if fp8 is not None:
            convert(model, fp8)
        if lora is not None:
            attach(model, lora, seed=0)
    except ConfigError as error:
        key, _, sentence = str(error).partition(": ")
        return [(key, sentence)]
    return _unmatched([name for name, p in model.named_parameters() if p.requires_grad], groups)


def _unmatched(names: Sequence[str], groups: Iterable[ParameterGroupConfig]) -> list[Problem]:
    shown = ", ".join(names[:: max(1, len(names) // NAMES_SHOWN)][:NAMES_SHOWN])
    return [
        (
            f"trainer.optim.groups.{index}.pattern",
            f"{group.pattern!r} matches none of the {len(names)} parameters that are trained, such as {shown}",
        )
        for index, group in enumerate(groups)
        if not any(re.search(group.pattern, name) for name in names)
    ]


def main() -> None:
    asked: dict[str, Any] = json.load(sys.stdin)
    found = problems(
        sizes_of(asked["architecture"], asked["sizes"]),
        TypeAdapter[LoraConfig | None](LoraConfig | None).validate_python(asked["lora"]),
        TypeAdapter[Fp8Config | None](Fp8Config | None).validate_python(asked["fp8"]),
        [ParameterGroupConfig.model_validate(group) for group in asked["groups"]],
    )
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
