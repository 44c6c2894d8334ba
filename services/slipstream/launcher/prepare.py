"""`slipstream prepare`: everything a run's processes need, for whoever starts them elsewhere: compose, or a person.

    slipstream prepare --certs @ examples/demo.toml @ deploy/compose.toml

Makes the run directory with a token, a configuration for each process, and with `--certs` certificates for the hosts
named. Starts nothing. Each process then listens on all addresses of its host and is known by the name in `endpoints`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field, create_model

from slipstream.common.config import ConfigError, RedisConfig, dump_toml
from slipstream.launcher.certs import DEFAULT_DAYS, CertificateFiles, make_certificates
from slipstream.launcher.cli import load, shown
from slipstream.launcher.config import RUN_CONFIG, RunConfig
from slipstream.launcher.errors import RunDirError
from slipstream.launcher.ports import write_endpoints
from slipstream.launcher.resolve import replicas_of, resolve
from slipstream.launcher.rundir import RunDir, create_run_dir
from slipstream.launcher.services import write_configs

_MODULES = ("reasoning_gym", "tokenizers")
"""What looking at the environments takes; the processes themselves run elsewhere."""
_ENDPOINTS = "host:port of every process, such as decode-1, as its peers reach it."
_FIELDS: dict[str, Any] = {
    "endpoints": (dict[str, str], Field(description=_ENDPOINTS)),
    "redis": (RedisConfig, RedisConfig()),
}
PREPARE_CONFIG: type[RunConfig] = create_model(
    "PrepareConfig", __base__=RUN_CONFIG, __doc__="A run whose processes are started elsewhere.", **_FIELDS
)


def run_prepare(arguments: Sequence[str]) -> int:
    """The command; returns the exit code. A repeat with the same configuration keeps what is there."""
    with_certificates = "--certs" in arguments
    rest = [argument for argument in arguments if argument != "--certs"]
    config = load(rest, "slipstream prepare", PREPARE_CONFIG, _MODULES, workers_here=False)
    if config is None:
        return 0
    endpoints: dict[str, str] = config.model_dump()["endpoints"]
    _check_endpoints(config, endpoints)
    run = RunDir(config.run.directory.absolute() / config.run.name)
    files = CertificateFiles(run.path / "certs")
    if with_certificates:
        config = config.model_copy(update={"tls": files.tls})
    if config.tls.ca_file is None:
        raise ConfigError("processes on several hosts need mutual TLS: give --certs, or a [tls] of your own")
    if run.path.exists():
        return _keep(run, config)
    create_run_dir(config.run.directory, config.run.name)
    if with_certificates:
        hosts = sorted({address.rpartition(":")[0] for address in endpoints.values()})
        make_certificates(files.directory, hosts, DEFAULT_DAYS)
        files.authority_key.unlink()  # nothing of this run needs another certificate
    redis_url = config.model_dump()["redis"]["url"]
    write_configs(run, resolve(config, run, endpoints, redis_url=redis_url, elsewhere=True))
    write_endpoints(run.endpoints_file, endpoints)
    run.record("run_prepared")
    run.config_file.write_text(dump_toml(config))  # last: it makes the directory a run
    print(f"prepared {shown(run.path)}: start each process with its file in {shown(run.path / 'configs')}")
    return 0


def _check_endpoints(config: RunConfig, endpoints: dict[str, str]) -> None:
    replicas = replicas_of(config)
    for name, address in endpoints.items():
        if name not in replicas:
            raise ConfigError(f"endpoints.{name}: this run has no such process; it has {', '.join(replicas)}")
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"endpoints.{name}: {address!r} is no host:port")
    missing = [name for name in replicas if name not in endpoints]
    if missing:
        raise ConfigError(f"endpoints.{missing[0]} is required: where peers reach it, as host:port")


def _keep(run: RunDir, config: RunConfig) -> int:
    if run.config_file.exists() and run.config_file.read_text() == dump_toml(config):
        print(f"{shown(run.path)} is prepared already; kept")
        return 0
    raise RunDirError(f"{run.path} was not made from this configuration: take another run.name, or remove it")
