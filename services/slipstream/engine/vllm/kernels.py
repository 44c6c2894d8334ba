"""Whether DeepSeek's expert kernels are here. Packages of the same names that are not theirs get installed by mistake.

Looks without importing vLLM, which takes seconds.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slipstream.engine.vllm.parallel import DEEPEP_BACKENDS, ParallelConfig

_BUILD = "build it from github.com/deepseek-ai/{repository}"
DEEPEP_STEP = f"{_BUILD.format(repository='DeepEP')} (vLLM's tools/ep_kernels does), not from a package index"
DEEPGEMM_STEP = f"{_BUILD.format(repository='DeepGEMM')}, or install vLLM's CUDA wheel, which carries it"


@dataclass(frozen=True)
class Kernels:
    """What was found of one library."""

    name: str
    state: Literal["there", "absent", "another package", "broken"]
    detail: str
    step: str
    """What to do to have it."""

    @property
    def there(self) -> bool:
        return self.state == "there"


def find_deep_ep() -> Kernels:
    """DeepSeek's DeepEP: vLLM calls `deep_ep.Buffer`."""
    return _find("DeepEP", "deep_ep", "Buffer", DEEPEP_STEP)


def find_deep_gemm() -> Kernels:
    """DeepSeek's DeepGEMM, on its own or in vLLM's CUDA wheel. vLLM prefers the one on its own, whatever that is."""
    found = _find("DeepGEMM", "deep_gemm", "fp8_gemm_nt", DEEPGEMM_STEP)
    if found.state == "absent" and (carried := _carried_by_vllm()) is not None:
        return Kernels("DeepGEMM", "there", str(carried), DEEPGEMM_STEP)
    return found


def missing(config: ParallelConfig) -> list[Kernels]:
    """What a configuration needs and this machine lacks."""
    needed = [find_deep_ep] if config.all2all_backend in DEEPEP_BACKENDS else []
    needed += [find_deep_gemm] if config.deep_gemm else []
    return [found for find in needed if not (found := find()).there]


def _find(name: str, module: str, attribute: str, step: str) -> Kernels:
    if importlib.util.find_spec(module) is None:
        return Kernels(name, "absent", f"{module} is not installed", step)
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # it loads CUDA libraries: anything may be wrong with them
        return Kernels(name, "broken", f"{module} cannot be imported: {type(error).__name__}: {error}", step)
    if not hasattr(imported, attribute):
        return Kernels(
            name, "another package", f"the package {module} here has no {attribute}: it is not DeepSeek's", step
        )
    return Kernels(name, "there", str(getattr(imported, "__file__", module)), step)


def _carried_by_vllm() -> Path | None:
    spec = importlib.util.find_spec("vllm")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        start = Path(location, "third_party", "deep_gemm", "__init__.py")
        if start.exists() and "fp8_gemm_nt" in start.read_text(errors="replace"):
            return start
    return None
