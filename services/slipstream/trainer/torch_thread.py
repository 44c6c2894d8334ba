"""The one thread that runs torch. Imports no torch itself: that costs seconds, and is done on the thread, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class TorchThread:
    """Runs functions one after another; the event loop only awaits them."""

    def __init__(self, torch_threads: int) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self._torch_threads = torch_threads
        self.guard: Callable[[], AbstractContextManager[None]] = nullcontext
        """Entered around every function: where collectives may fail, it says whose fault it is."""

    async def start(self) -> None:
        """Import torch and torchtitan."""
        await self.run(_import, self._torch_threads)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Await `function(*args, **kwargs)`, run on the thread. It runs to its end even if the waiter is cancelled."""

        def guarded() -> T:
            with self.guard():
                return function(*args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._executor, guarded)

    def close(self) -> None:
        """Let the thread end; does not wait for what it is doing."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _import(torch_threads: int) -> None:
    import torch

    torch.set_num_threads(torch_threads)
    import slipstream.trainer.step  # noqa: F401 the slow import
