"""Configuration: pydantic models read from TOML files and flags. The only reader of the environment.

    slipstream-router @ base.toml @ overlay.toml --admission.groups-per-step=8

Defaults < files from left to right < flags from left to right. A docstring under a field is its help text.
Reading is in `config_files.py`, messages in `config_errors.py`, help in `config_help.py`.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from slipstream.common.config_errors import ConfigError, suggest
from slipstream.common.config_files import load_config
from slipstream.common.config_help import help_text
from slipstream.common.exits import REFUSED, end
from slipstream.common.toml import dump_toml

__all__ = [
    "ENVIRONMENT",
    "BaseConfig",
    "ConfigError",
    "ServiceConfig",
    "WorkerEndpoint",
    "cli",
    "dump_toml",
    "load_config",
]

ENVIRONMENT = os.environ
"""The process's environment; services take values from here, never from `os`."""

ENVIRONMENT.setdefault("GRPC_VERBOSITY", "ERROR")
"""grpc's own lines on standard error would come between ours; it reads this when it is first imported."""

Config = TypeVar("Config", bound="BaseConfig")

MAX_SECONDS = 1_000_000
"""Longest time that a field may name: eleven days."""
BARE_FLAGS = ("dry-run", "help")


class BaseConfig(BaseModel):
    """Base of every config section: unknown keys are errors, values do not change after loading, numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _fits_a_message(cls, value: Any, info: ValidationInfo) -> Any:
        """Times travel as 32-bit milliseconds."""
        if (info.field_name or "").endswith("_s") and isinstance(value, int | float) and value > MAX_SECONDS:
            raise ValueError(f"must be at most {MAX_SECONDS}")
        return value


class ListenConfig(BaseConfig):
    """Where a service's gRPC server listens."""

    host: str = "127.0.0.1"
    """Address to bind. Anything but loopback needs `auth` and `tls`."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port to bind; 0 takes a free one, which the log names."""

    advertise: str = ""
    """Address host:port at which peers reach this process. Empty: where it listens."""

    def address(self, port: int) -> str:
        """Where peers reach this process, bound to `port`. Raises `ConfigError` where that is not known."""
        if not self.advertise and self.host in ("", "0.0.0.0", "::", "[::]"):
            raise ConfigError(f"listen.advertise is required with listen.host {self.host!r}: peers need an address")
        return self.advertise or host_port(self.host, port)


class WorkerEndpoint(BaseConfig):
    """One prefill or decode worker."""

    replica: str
    """Its name in the run, e.g. "decode-1"."""

    address: str
    """host:port of its gRPC server."""


class AuthConfig(BaseConfig):
    """How callers are told from strangers."""

    token_file: Path | None = None
    """File with the run's bearer token. Unset: calls are not checked, allowed on loopback only."""


class TlsConfig(BaseConfig):
    """Mutual TLS on every channel and server: all three files, or none for plain connections on loopback.

    `slipstream certs` makes them.
    """

    cert_file: Path | None = None
    """File with this process's certificate, PEM."""

    key_file: Path | None = None
    """File with the private key of that certificate, PEM."""

    ca_file: Path | None = None
    """File with the certificate of the authority that every peer's certificate must come from, PEM."""

    @model_validator(mode="after")
    def _all_or_none(self) -> Self:
        missing = [name for name, path in self if path is None]
        if 0 < len(missing) < len(type(self).model_fields):
            raise ValueError(f"{' and '.join(missing)} not set: cert_file, key_file and ca_file go together")
        return self


class LogConfig(BaseConfig):
    """Structured log lines."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level written."""

    file: Path | None = None
    """File for JSON lines, appended to. Unset: standard error."""

    limit_bytes: int = Field(default=64 * 2**20, ge=4096)
    """Size at which the file becomes `<name>.1` and a new one is begun."""

    kept_files: int = Field(default=2, ge=0, le=100)
    """Older files that are kept; the oldest goes."""


class RedisConfig(BaseConfig):
    """The Redis or Valkey server that keeps the shared, re-derivable state of a run."""

    url: str = "redis://127.0.0.1:6379/0"
    """URL of the server: redis://, rediss:// or unix://."""


class MetricsConfig(BaseConfig):
    """Prometheus metrics over HTTP."""

    host: str = "127.0.0.1"
    """Address to bind."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port to serve metrics on; 0 serves none."""


class TracingConfig(BaseConfig):
    """Traces: what became of single rollouts, across all services. `slipstream trace RUN` makes a file of them."""

    sample_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the groups whose rollouts are traced, chosen by name. 0 traces nothing and costs nothing."""

    otlp_endpoint: str = Field(default="", pattern=r"^(https?://.+)?$")
    """An OpenTelemetry collector that spans are sent to as well, OTLP over HTTP, such as http://127.0.0.1:4318.
    Empty: they stay in the run directory. Needs the extra `tracing`."""

    limit_bytes: int = Field(default=64 * 2**20, ge=4096)
    """Bytes of a service's files under timeline/; the older half goes when they are reached. Those of workers and
    trainer have `timeline_limit_bytes`."""


class ServiceConfig(BaseConfig):
    """What every service is told."""

    run_id: str = Field(default="local", min_length=1, max_length=128)
    """Name of the run; first part of every Redis key and KV salt."""

    run_dir: Path = Path("runs/local")
    """Directory of the run."""

    replica: str = Field(default="", max_length=64)
    """Name of this process among its kind, such as "decode-1"."""

    listen: ListenConfig = ListenConfig()
    auth: AuthConfig = AuthConfig()
    tls: TlsConfig = TlsConfig()
    log: LogConfig = LogConfig()
    redis: RedisConfig = RedisConfig()
    metrics: MetricsConfig = MetricsConfig()
    tracing: TracingConfig = TracingConfig()

    drain_timeout_s: float = Field(default=10.0, ge=0.0)
    """Longest wait for open calls after SIGTERM."""

    seed: int = 0
    """Seed of everything random in the run."""


def host_port(host: str, port: int) -> str:
    """One address; an IPv6 host gets its brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


class Arguments(NamedTuple):
    """A command line, taken apart."""

    files: list[Path]
    overrides: list[str]
    """`section.field=value`."""
    dry_run: bool = False
    help: str | None = None
    """The section asked for, empty for all of them."""


def cli(config_class: type[Config], argv: Sequence[str] | None = None) -> Config:
    """Read the command line of a service. Exits: 0 after `--help` or `--dry-run`, 2 on a config that is wrong."""
    try:
        arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
        if arguments.help is not None:
            print(help_text(config_class, Path(sys.argv[0]).name, arguments.help))
            sys.exit(0)
        config = load_config(config_class, arguments.files, arguments.overrides)
    except ConfigError as error:
        end(REFUSED, str(error))
    if arguments.dry_run:
        print(dump_toml(config), end="")
        sys.exit(0)
    return config


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Split a command line into config files, overrides and bare flags. Raises `ConfigError` with what was meant."""
    files: list[Path] = []
    overrides: list[str] = []
    dry_run, topic = False, None
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if argument.startswith("@"):
            file = argument[1:] or (rest.pop(0) if rest else "")
            if not file:
                raise ConfigError("a config file must follow '@'")
            files.append(Path(file))
        elif argument == "--dry-run":
            dry_run = True
        elif argument in ("--help", "-h") or argument.startswith("--help="):
            word = argument.partition("=")[2] or (rest.pop(0) if rest and rest[0][:1] not in ("-", "@") else "")
            topic = word.removeprefix("--")
        elif argument.startswith("--") and argument[2:3] not in ("", "="):
            overrides.append(_override(argument[2:], rest))
        else:
            raise ConfigError(f"unexpected argument {argument!r}{_meant(argument)}")
    return Arguments(files, overrides, dry_run, topic)


def _override(argument: str, rest: list[str]) -> str:
    """`name=value` of a flag; its value may be the next argument."""
    name, equals, value = argument.partition("=")
    file = value or (rest[0] if rest else "")
    if "." not in name and file.endswith(".toml"):
        raise ConfigError(f"--{name}: a config file follows an '@': @ {file}")
    near = difflib.get_close_matches(name, BARE_FLAGS, n=1, cutoff=0.75) if "." not in name else []
    if near and (name in BARE_FLAGS or not equals):
        takes = "takes no value" if name in BARE_FLAGS else f"is no flag{suggest([f'--{near[0]}'])}"
        raise ConfigError(f"--{name} {takes}")
    if not equals:
        if not rest or rest[0].startswith("--") or rest[0] == "@":
            raise ConfigError(f"--{name} needs a value: --{name}=VALUE")
        value = rest.pop(0)
    return f"{name}={value}"


def _meant(argument: str) -> str:
    if argument.endswith(".toml") or Path(argument).is_file():
        return f"; a config file follows an '@': @ {argument}"
    if "=" in argument:
        return f"; did you mean '--{argument.lstrip('-')}'?"
    if argument.startswith("-"):
        return "; flags are --section.field=VALUE, --dry-run and --help"
    return "; expected '@ FILE.toml' or '--section.field=VALUE'"
