"""Imports torchtitan without what only its compiler, pipelines and checkpoints need.

torchtitan's model files name classes of torch's compiler, pipeline schedules and distributed checkpoints, mostly in
annotations. Importing those costs three quarters of a process's start: about 4 seconds of processor time, in every
prefill, decode and trainer process and in every test of them. `light_imports` puts placeholders in their places while
torchtitan is imported, and takes them away again, so that a later `import torch._dynamo` gets the real module.

Whoever comes to need one of them in torchtitan's own code (compilation, pipelines) takes it off `LEFT_OUT`; until
then, using a placeholder raises and says so.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NoReturn

import torch

LEFT_OUT = frozenset(
    {
        "torch._inductor.compile_fx",
        "torch.distributed.checkpoint",
        "torch.distributed.pipelining",
        "torch.distributed.tensor.experimental",
        "torch.nn.attention.flex_attention",
        "torch.nn.attention.varlen",
        "torchtitan.components.optimizer",
        "torchtitan.distributed.compile",
        "torchtitan.distributed.minimal_async_ep",
        "torchtitan.distributed.pipeline_parallel",
        "torchtitan.models.deepseek_v3.parallelize",
        "torchtitan.models.llama3.parallelize",
        "torchtitan.models.qwen3.parallelize",
    }
)
"""Modules, with all below them, that get a placeholder."""


class _Refusing(type):
    """Classes that stand for something that was not imported: fine in annotations, nothing else."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise ImportError(f"{cls.__module__}.{cls.__name__} is left out by slipstream.models.light_import")


def _compiled(*_: Any, **__: Any) -> Any:
    return _Refusing("compiled", (), {"__module__": "torch"})


class _Placeholder(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Refusing(name, (), {"__module__": self.__name__})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds placeholders for `LEFT_OUT`."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(fullname == name or fullname.startswith(name + ".") for name in LEFT_OUT):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        self.made.append(spec.name)
        return _Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: attributes are made when they are asked for."""


@contextmanager
def light_imports() -> Iterator[None]:
    """Within the block, modules of `LEFT_OUT` that are not imported yet are placeholders."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    compile_, torch.compile = torch.compile, _compiled  # torchtitan compiles flex attention as it is imported
    try:
        yield
    finally:
        torch.compile = compile_
        sys.meta_path.remove(finder)
        for name in finder.made:
            placeholder = sys.modules.pop(name, None)
            parent, _, child = name.rpartition(".")
            if getattr(sys.modules.get(parent), "__dict__", {}).get(child) is placeholder:
                delattr(sys.modules[parent], child)
