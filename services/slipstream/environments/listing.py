"""`slipstream environments`: what a configuration can name.

slipstream environments [--json]
"""

from __future__ import annotations

import argparse
import inspect
import json
import textwrap
from collections.abc import Sequence
from importlib import metadata
from typing import Any, get_args

from slipstream.environments.config import EnvironmentConfig
from slipstream.environments.reasoning_gym import dataset_names
from slipstream.environments.registry import ENTRY_POINTS, registered

WIDTH = 100


def own_types() -> dict[str, str]:
    """What each `type` is, in a line."""
    union: Any = get_args(EnvironmentConfig)[0]
    return {
        get_args(variant.model_fields["type"].annotation)[0]: (inspect.getdoc(variant) or "").partition("\n")[0]
        for variant in get_args(union)
    }


def run(arguments: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser("slipstream environments", description="List what [[environments]] can name.")
    parser.add_argument("--json", action="store_true", help="as JSON")
    given = parser.parse_args(arguments)
    types, points, datasets = own_types(), registered(), dataset_names()
    if given.json:
        entry_points = {name: point.value for name, point in points.items()}
        print(json.dumps({"types": types, "entry_points": entry_points, "reasoning_gym": datasets}))
        return 0
    print('type = "..."')
    width = max(map(len, types))
    for name, sentence in types.items():
        print(f"  {name:{width}}  {sentence}")
    print(f'\ntype = "entry_point", entry_point = "...": {len(points)} in the group {ENTRY_POINTS}')
    for name, point in sorted(points.items()):
        print(f"  {name}  {point.value}{_version(point)}")
    print(f'\ntype = "reasoning_gym", dataset = "...": {len(datasets)} in reasoning-gym')
    print(textwrap.fill(" ".join(datasets), WIDTH, initial_indent="  ", subsequent_indent="  "))
    return 0


def _version(point: metadata.EntryPoint) -> str:
    return f", of {point.dist.name} {point.dist.version}" if point.dist else ""
