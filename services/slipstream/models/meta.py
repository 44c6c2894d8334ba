"""Models on torch's device "meta": names and shapes of parameters, without memory and without arithmetic.

Arithmetic on "meta" imports torch's compiler, which is most of a second and a fifth of an engine's start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode

_DRAWN = frozenset({init.kaiming_uniform_, init.normal_, init.uniform_})


class _NothingDrawn(TorchFunctionMode):
    """Leaves parameters as they are made."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}
    ) -> Any:
        return kwargs["tensor"] if func in _DRAWN else func(*args, **kwargs)


@contextmanager
def on_meta() -> Iterator[None]:
    """Within the block, what is built takes no memory."""
    with torch.device("meta"), _NothingDrawn():
        yield
