"""What vLLM's processes must not leave behind, however the worker that started them ends: themselves, and sockets."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from slipstream.common.runtime import die_with_parent

PREFIX = "slipstream-vllm-"
"""Of directories; then comes the process that owns one."""

TELL = signal.SIGUSR2
"""Has one of these processes write on its standard error where its threads stand."""

_STORE = "get_file_store_init_method"
_MEMORY = "store_"
"""How what ranks on the CPU share in memory begins: it is called after their store, and vLLM leaves it behind."""
_SHARED = Path("/dev/shm")

_parent: int | None = None
"""Of processes that are forked now; 0 of none."""


@contextmanager
def dying_with_us() -> Iterator[None]:
    """Have the kernel kill each process forked within as soon as this thread ends.

    vLLM does the same only once an engine is up, and a worker that is stopped meanwhile would leave half of one behind.
    """
    global _parent
    _watch_forks()
    try:
        yield
    finally:
        _parent = 0


def die_as_forked(parent: int) -> None:
    """In a process that was spawned: end with `parent` as one forked within `dying_with_us`, and so do its own."""
    die_with_parent(parent)
    _tell_when_asked()
    _watch_forks()


def _watch_forks() -> None:
    global _parent
    if _parent is None:  # a hook cannot be taken off again
        os.register_at_fork(after_in_child=_forked)
    _parent = os.getpid()


def _forked() -> None:
    global _parent
    if _parent:
        die_with_parent(_parent)
        _parent = os.getpid()  # of the ranks that it forks in turn
        _tell_when_asked()
        gc.freeze()  # what is garbage was its parent's, whose threads and connections are none here


def _tell_when_asked() -> None:
    faulthandler.register(TELL, file=2, all_threads=True)


def keep_stores_in(directory: Path) -> None:
    """Have those of vLLM's processes that this one starts meet in this directory. It would leave files in TMPDIR."""
    for name in ("uniproc_executor", "multiproc_executor"):
        executor = importlib.import_module(f"vllm.v1.executor.{name}")
        if hasattr(executor, _STORE):  # by name, as they imported it
            setattr(executor, _STORE, lambda: f"file://{directory}/{_MEMORY}{directory.name}_{uuid4().hex}")


class SocketDirectory:
    """Where vLLM's processes meet: nobody else may enter. Those of workers that were killed are removed by the next."""

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        _remove_orphans(parent)
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))

    def close(self) -> None:
        _remove(self.path.name, self.path.parent)


def _remove_orphans(parent: Path) -> None:
    for directory in parent.glob(f"{PREFIX}*-*"):
        owner = directory.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            _remove(directory.name, parent)


def _remove(name: str, parent: Path) -> None:
    for memory in _SHARED.glob(f"{_MEMORY}{name}_*"):
        memory.unlink(missing_ok=True)
    shutil.rmtree(parent / name, ignore_errors=True)
