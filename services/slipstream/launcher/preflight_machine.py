"""What a configuration asks of this machine: cards, disk, memory, processors. Looked at before any start."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.common.config import ENVIRONMENT, ConfigError
from slipstream.common.config_errors import Origins
from slipstream.launcher.cards import VISIBLE, devices_of
from slipstream.launcher.config import ON_CARDS, RunConfig
from slipstream.launcher.memory import MIB, PROC, total_bytes
from slipstream.launcher.needs import needed_bytes
from slipstream.launcher.preflight_engines import why_unusable

DEVICES = Path("/dev")
THREADS = (
    "trainer.torch_threads",
    "teacher.torch_threads",
    "prefill.engine.torch_threads",
    "decode.engine.torch_threads",
)
THREADS_A_PROCESSOR = 16
"""More threads of one process than this, for each processor, are a slip of the pen."""


def check_machine(config: RunConfig, origins: Origins, *, workers_here: bool = True, devices: Path = DEVICES) -> None:
    """Raise `ConfigError` for the first thing that this machine does not have.

    `workers_here`: also what the processes need, which otherwise run on other machines.
    """
    _run_directory(config, origins)
    if workers_here:
        _cards(config, origins, devices)
        _memory(config, origins)
        _threads(config, origins)


def _run_directory(config: RunConfig, origins: Origins) -> None:
    where = origins.located("run.directory")
    if sentence := why_unusable(config.run.directory):
        raise ConfigError(f"{where}: {sentence}")
    there = config.run.directory.absolute()
    while not there.exists():
        there = there.parent
    least, total = _section(config, "orchestrator").disk.min_free_bytes, shutil.disk_usage(there).total
    if least and least >= total:  # some file systems tell no size
        where = origins.located("orchestrator.disk.min_free_bytes", "run.directory")
        raise ConfigError(f"{where} is {least}; the disk of {str(there)!r} has {total} bytes in all")


def _cards(config: RunConfig, origins: Origins, devices: Path, proc: Path = PROC) -> None:
    """Named cards must be there. A run that names none may be looked at where there is none."""
    if (devices / "dxg").exists():  # Windows gives its cards another name, all of them one
        return
    count = _card_count(devices, proc)
    for service in ON_CARDS:
        absent = [card for card in devices_of(config, service) if card >= count]
        if absent:
            there = f"this machine has {count}, from 0" if count else "this machine has none"
            raise ConfigError(f"{origins.located(f'{service}.devices')}: there is no card {absent[0]}; {there}")


def _card_count(devices: Path, proc: Path) -> int:
    """As many as numbers may name: cards, or what the launcher is shown of them, as are parts of one card (MIG)."""
    files = devices.glob("nvidia[0-9]*")  # made by the driver's own tools, which may not have run since the start
    listed = (proc / "driver" / "nvidia" / "gpus").glob("*")
    there, shown = max(len(list(files)), len(list(listed))), ENVIRONMENT.get(VISIBLE, "")
    return len(shown.split(",")) if there and shown else there


def _memory(config: RunConfig, origins: Origins, total: Callable[[], int] = total_bytes) -> None:
    """What no emptying of this machine would make room for; what is free now is looked at when the run starts."""
    needed = needed_bytes(config)
    if config.launcher.check_memory and needed > (there := total()):
        keys = [f"{pool}.{name}" for pool in ("decode", "prefill") for name in ("engine.block_count", "replicas")]
        where = next((origins.located(key) for key in keys if origins.located(key) != key), keys[0])
        raise ConfigError(
            f"{where}: the run needs about {needed // MIB} MiB of memory, and this machine has {there // MIB} MiB; "
            "lower replicas or block counts, or set launcher.check_memory = false"
        )


def _threads(config: RunConfig, origins: Origins) -> None:
    limit = THREADS_A_PROCESSOR * (os.cpu_count() or 1)
    for key in THREADS:
        service, *names = key.split(".")
        asked: Any = config.section(service)
        for name in names:
            asked = getattr(asked, name)
        if config.replicas(service) and asked > limit:
            raise ConfigError(f"{origins.located(key)} is {asked}; on {os.cpu_count()} processors at most {limit}")


def _section(config: RunConfig, service: str) -> Any:
    return config.section(service)
