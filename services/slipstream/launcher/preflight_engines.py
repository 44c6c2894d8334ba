"""What vLLM's pools need of the machine and the build they are to run on, before any of them is started."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

from slipstream.common.config import ConfigError
from slipstream.common.config_errors import Origins
from slipstream.engine.vllm.installed import build_device, check_connector, check_judge, find_vllm
from slipstream.engine.vllm.offload.options import REGIONS, find_mooncake
from slipstream.engine.vllm.parallel import Case, refusals
from slipstream.launcher.config import RunConfig


def check_engines(config: RunConfig, origins: Origins, regions: Path = REGIONS) -> None:
    """Raise `ConfigError` for the first thing that an engine would say only when it starts."""
    teacher: Any = config.section("teacher")
    if teacher.replicas and teacher.engine.type == "vllm":
        check_judge(origins.located("teacher.engine.type"), teacher.device)
    pool: Literal["prefill", "decode"]
    for pool in ("prefill", "decode"):
        if pool not in config.pools_with("vllm"):
            continue
        find_vllm(where=origins.located(f"{pool}.engine.type"))
        section: Any = config.section(pool)
        engine = section.engine
        check_connector(engine, origins.located(f"{pool}.engine.connector"))
        _device(config, pool, engine, origins)
        if engine.offload is not None:
            _offload(config, pool, engine.offload, origins, regions)


def _device(config: RunConfig, pool: Literal["prefill", "decode"], engine: Any, origins: Origins) -> None:
    built_for = build_device()
    if engine.device not in ("auto", built_for):
        where = origins.located(f"{pool}.engine.device")
        raise ConfigError(f'{where} is "{engine.device}", and the vLLM that is installed runs on "{built_for}"')
    if engine.quantization != "none" and built_for == "cpu":
        where = origins.located(f"{pool}.engine.quantization")
        raise ConfigError(
            f'{where} is "{engine.quantization}" and needs a GPU; the vLLM that is installed runs on "cpu"'
        )
    spread = engine.parallel.model_copy(update={"data_parallel_size": config.data_parallel_size(pool)})
    for option, sentence in refusals(Case(spread, pool, built_for, engine.quantization, None)):
        raise ConfigError(f"{origins.located(f'{pool}.engine.{option}', f'{pool}.data_parallel_size')} {sentence}")


def _offload(config: RunConfig, pool: str, offload: Any, origins: Origins, regions: Path) -> None:
    field = f"{pool}.engine.offload"
    workers = config.replicas(pool) * config.data_parallel_size(pool)
    room = shutil.disk_usage(regions).total
    if offload.memory_bytes * workers > room:
        raise ConfigError(
            f"{origins.located(f'{field}.memory_bytes')} is {offload.memory_bytes}; {workers} worker(s) take that from "
            f"{regions}, which has {room} bytes in all"
        )
    if offload.directory:
        where = origins.located(f"{field}.directory")
        sentence = why_unusable(Path(offload.directory))
        if sentence:
            raise ConfigError(f"{where}: {sentence}")
    if offload.mooncake_master:
        find_mooncake(origins.located(f"{field}.mooncake_master"))


def why_unusable(directory: Path) -> str:
    """Why nothing could be written below a directory, which is made when the engine starts; empty if it could."""
    there = directory.absolute()
    try:  # the rights alone say nothing of a file system that is read-only, or takes no files
        while not there.exists() and there != there.parent:
            there = there.parent
        if not there.is_dir():
            return f"{str(there)!r} is no directory"
        with tempfile.TemporaryFile(dir=there):
            return ""
    except OSError as error:
        return f"{str(there)!r} cannot be written to: {(error.strerror or str(error)).lower()}"
