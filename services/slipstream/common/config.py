"""Configuration: pydantic models read from TOML files and flags. The only reader of the environment.

    slipstream-router @ base.toml @ overlay.toml --admission.groups-per-step=8

Defaults < files from left to right < flags from left to right. A docstring under a field is its help text.
"""

from __future__ import annotations

import difflib
import os
import sys
import tomllib
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticUndefined

from slipstream.common.toml import dump_toml

__all__ = ["ENVIRONMENT", "BaseConfig", "ConfigError", "ServiceConfig", "cli", "dump_toml", "load_config"]

ENVIRONMENT = os.environ
"""The process's environment; services take values from here, never from `os`."""

Config = TypeVar("Config", bound="BaseConfig")


class BaseConfig(BaseModel):
    """Base of every config section: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ListenConfig(BaseConfig):
    """Where a service's gRPC server listens."""

    host: str = "127.0.0.1"
    """Address to bind."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port to bind; 0 takes a free one, which the log names."""


class AuthConfig(BaseConfig):
    """How callers are told from strangers."""

    token_file: Path | None = None
    """File with the run's bearer token. Unset: calls are not checked, allowed on loopback only."""


class LogConfig(BaseConfig):
    """Structured log lines."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level written."""

    file: Path | None = None
    """File for JSON lines, appended to. Unset: standard error."""


class RedisConfig(BaseConfig):
    """The Redis or Valkey server that keeps the shared, re-derivable state of a run."""

    url: str = "redis://127.0.0.1:6379/0"
    """URL of the server: redis://, rediss:// or unix://."""


class MetricsConfig(BaseConfig):
    """Prometheus metrics over HTTP."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port to serve metrics on; 0 serves none."""


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
    log: LogConfig = LogConfig()
    redis: RedisConfig = RedisConfig()
    metrics: MetricsConfig = MetricsConfig()

    drain_timeout_s: float = Field(default=10.0, ge=0.0)
    """Longest wait for open calls after SIGTERM."""

    seed: int = 0
    """Seed of everything random in the run."""


class ConfigError(Exception):
    """A config that cannot be used, in one sentence with its place."""


def load_config(config_class: type[Config], files: Sequence[Path | str], overrides: Sequence[str] = ()) -> Config:
    """Build a config from TOML files and `section.field=value` overrides. Raises `ConfigError`."""
    data: dict[str, Any] = {}
    origin: dict[tuple[str, ...], str] = {}
    for file in files:
        values = _normalise(_read_toml(Path(file)), config_class)
        _record(values, str(file), origin)
        _merge(data, values)
    for override in overrides:
        path, _, text = override.partition("=")
        keys = path.split(".")
        names = [key.replace("-", "_") for key in keys]
        values = _normalise(_nest(keys, _parse_value(text, _annotation(config_class, names))), config_class)
        _record(values, f"--{path}", origin)
        _merge(data, values)
    try:
        return config_class.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(config_class, error, origin)) from None


def cli(config_class: type[Config], argv: Sequence[str] | None = None) -> Config:
    """Read the command line of a service. Exits: 0 after `--help` or `--dry-run`, 2 on a config that is wrong."""
    try:
        files, overrides, flags = parse_arguments(sys.argv[1:] if argv is None else argv)
        if "help" in flags:
            print(help_text(config_class))
            sys.exit(0)
        config = load_config(config_class, files, overrides)
    except ConfigError as error:
        _fail(str(error))
    if "dry-run" in flags:
        print(dump_toml(config), end="")
        sys.exit(0)
    return config


def parse_arguments(argv: Sequence[str]) -> tuple[list[Path], list[str], set[str]]:
    """Split a command line into config files, `section.field=value` overrides and bare flags."""
    files: list[Path] = []
    overrides: list[str] = []
    flags: set[str] = set()
    rest = iter(argv)
    for argument in rest:
        if argument == "@" or (argument.startswith("@") and len(argument) > 1):
            file = argument[1:] or next(rest, None)
            if file is None:
                raise ConfigError("a config file must follow '@'")
            files.append(Path(file))
        elif argument in ("--help", "-h", "--dry-run"):
            flags.add("dry-run" if argument == "--dry-run" else "help")
        elif argument.startswith("--") and len(argument) > 2:
            name, equals, value = argument[2:].partition("=")
            if not equals:
                following = next(rest, None)
                if following is None:
                    raise ConfigError(f"--{name} needs a value: --{name}=VALUE")
                value = following
            overrides.append(f"{name}={value}")
        else:
            raise ConfigError(f"unexpected argument {argument!r}; expected '@ FILE.toml' or '--section.field=VALUE'")
    return files, overrides, flags


def help_text(config_class: type[BaseConfig], program: str | None = None) -> str:
    """All fields with type, default and help, one section after another."""
    program = program or Path(sys.argv[0]).name
    lines = [f"usage: {program} [@ FILE.toml]... [--section.field=VALUE]... [--dry-run] [--help]", ""]
    if config_class.__doc__:
        lines += [config_class.__doc__.strip().splitlines()[0], ""]
    for path, annotation, default, text in _fields(config_class, ()):
        shown = "" if default is PydanticUndefined else f" (default {default!r})" if default != "" else ""
        lines.append(f"  --{'.'.join(path).replace('_', '-')}  {_type_name(annotation)}{shown}")
        lines += [f"      {line}" for line in (text or "").splitlines()]
    return "\n".join(lines)


def _fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], n=1)
        raise ConfigError(f"{path}: no such file{_suggest(near)}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None


def _normalise(value: Any, annotation: Any) -> Any:
    """Write dashes in field names as underscores; keys of free tables, such as names of peers, stay as they are."""
    if isinstance(value, list):
        return [_normalise(item, annotation) for item in value]
    if not isinstance(value, dict):
        return value
    models = _models(annotation)
    if any(get_origin(member) is dict for member in _members(annotation)):
        item_annotation = next(get_args(m)[1] for m in _members(annotation) if get_origin(m) is dict)
        return {key: _normalise(item, item_annotation) for key, item in value.items()}
    if not models:
        return value
    table = {}
    for key, item in value.items():
        name = key.replace("-", "_")
        field = next((m.model_fields[name] for m in models if name in m.model_fields), None)
        table[name] = _normalise(item, field.annotation if field else None)
    return table


def _merge(base: dict[str, Any], over: dict[str, Any]) -> None:
    """Lay `over` on `base`: tables merge, a table of another variant and everything else replaces."""
    for key, value in over.items():
        old = base.get(key)
        other_variant = isinstance(value, dict) and isinstance(old, dict) and value.get("type", old.get("type"))
        if isinstance(value, dict) and isinstance(old, dict) and other_variant == old.get("type"):
            _merge(old, value)
        else:
            base[key] = value


def _record(values: dict[str, Any], place: str, origin: dict[tuple[str, ...], str], at: tuple[str, ...] = ()) -> None:
    for key, value in values.items():
        origin[(*at, key)] = place
        if isinstance(value, dict):
            _record(value, place, origin, (*at, key))


def _nest(keys: list[str], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    return value


def _parse_value(text: str, annotation: Any) -> Any:
    """A flag's text as a TOML value; text that is not TOML, or that a string field takes, is a string."""
    if annotation is not None and _takes_only_text(annotation):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _takes_only_text(annotation: Any) -> bool:
    kinds = set(_members(annotation)) - {type(None)}
    return bool(kinds) and all(kind in (str, Path) for kind in kinds)


def _members(annotation: Any) -> Iterator[Any]:
    """The alternatives of a type: of `A | B`, of `Annotated[A | B, ...]`."""
    if get_origin(annotation) is Annotated:
        yield from _members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for argument in get_args(annotation):
            yield from _members(argument)
    else:
        yield annotation


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The config classes that a field, or each item of a list or table field, can hold."""
    found: list[type[BaseModel]] = []
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            found.append(member)
        elif get_origin(member) in (list, tuple, dict):
            for argument in get_args(member):
                found += _models(argument)
    return found


def _annotation(config_class: type[BaseModel], keys: list[str]) -> Any:
    """Type of the field at `keys`, or None where there is none."""
    models: list[type[BaseModel]] = [config_class]
    annotation = None
    for key in keys:
        field = next((m.model_fields[key] for m in models if key in m.model_fields), None)
        if field is None:
            return None
        annotation = field.annotation
        models = _models(annotation)
    return annotation


def _fields(
    config_class: type[BaseModel], at: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any, Any, str | None]]:
    """Every leaf field below `config_class`: path, type, default, help."""
    for name, field in config_class.model_fields.items():
        nested = [m for m in _members(field.annotation) if isinstance(m, type) and issubclass(m, BaseModel)]
        if nested:
            for model in nested:
                yield from _fields(model, (*at, name))
        else:
            default = PydanticUndefined if field.is_required() else field.get_default(call_default_factory=True)
            yield (*at, name), field.annotation, default, field.description


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "|".join(str(value) for value in get_args(annotation))
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return annotation.__name__
    return str(annotation).replace("typing.", "").replace("pathlib._local.", "").replace("pathlib.", "")


def _explain(config_class: type[BaseModel], error: ValidationError, origin: dict[tuple[str, ...], str]) -> str:
    """The first problem of a validation error as one line: place, key, what is wrong, what was meant."""
    problems = error.errors(include_url=False)
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    keys = _real_keys(config_class, problem["loc"])
    dotted = ".".join(keys) or config_class.__name__
    place = next((origin[tuple(keys[:n])] for n in range(len(keys), 0, -1) if tuple(keys[:n]) in origin), "")
    prefix = f"{place}: " if place else ""
    if problem["type"] == "extra_forbidden":
        return f"{prefix}unknown key {dotted!r}{_suggest(_near_keys(config_class, keys))}"
    if problem["type"] == "missing":
        return f"{prefix}{dotted!r} is required"
    message = problem["msg"].removeprefix("Value error, ")
    shown = problem.get("input")
    got = "" if isinstance(shown, dict | BaseModel) else f" (got {shown!r})"
    return f"{prefix}{dotted}: {message[:1].lower()}{message[1:]}{got}"


def _real_keys(config_class: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Keys as written in TOML: pydantic puts the tag or class name of a union's variant into its location."""
    models: list[type[BaseModel]] = [config_class]
    keys: list[str] = []
    for index, part in enumerate(loc):
        fields = [m.model_fields[str(part)] for m in models if str(part) in m.model_fields]
        if fields:
            models = [n for field in fields for n in _models(field.annotation)]
        elif isinstance(part, str) and index < len(loc) - 1 and keys and (_is_tag(models, part) or "[" in part):
            models = [m for m in models if _has_tag(m, part)] or models
            continue
        keys.append(str(part))
    return keys


def _is_tag(models: list[type[BaseModel]], part: str) -> bool:
    return any(_has_tag(model, part) for model in models)


def _has_tag(model: type[BaseModel], part: str) -> bool:
    field = model.model_fields.get("type")
    return model.__name__ == part or (field is not None and part in get_args(field.annotation))


def _near_keys(config_class: type[BaseModel], keys: list[str]) -> list[str]:
    """What may have been meant by a wrong last key: a sibling first, else the same name elsewhere."""
    models: list[type[BaseModel]] = [config_class]
    for key in keys[:-1]:
        models = [n for m in models if key in m.model_fields for n in _models(m.model_fields[key].annotation)] or models
    siblings = [name for model in models for name in model.model_fields]
    near = difflib.get_close_matches(keys[-1], siblings, n=1)
    if near:
        return [".".join([*keys[:-1], near[0]])]
    every = {".".join(path): path[-1] for path, *_ in _fields(config_class, ())}
    return [dotted for dotted, name in every.items() if name == keys[-1]][:1] or difflib.get_close_matches(
        ".".join(keys), every, n=1
    )


def _suggest(near: Sequence[str]) -> str:
    return f"; did you mean {near[0]!r}?" if near else ""
