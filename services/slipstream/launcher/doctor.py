"""`slipstream doctor`: whether this machine can carry a run, one line a check."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from slipstream.common.config import ConfigError, parse_arguments
from slipstream.common.config_files import load_with_origins
from slipstream.engine.vllm.parallel import DEEPEP_BACKENDS
from slipstream.launcher import doctor_machine as machine
from slipstream.launcher import doctor_run as of_run
from slipstream.launcher.config import GROUPED, RUN_CONFIG, RunConfig
from slipstream.launcher.doctor_machine import Finding
from slipstream.launcher.needs import needed_bytes
from slipstream.launcher.preflight import preflight
from slipstream.launcher.resolve import check, replicas_of

USAGE = """\
usage: slipstream doctor [@ FILE.toml]... [--section.field=VALUE]... [--redis URL]

One line a check: ok, warn or FAILED, what was looked at, the figure, what to do. Exit code 1 if one FAILED.
Without a file, the needs of the demo are looked at. --redis also asks a Redis server that several hosts share.
"""
DEFAULT_ENVIRONMENTS = 'environments=[{type = "spell_backward"}, {type = "expression"}]'


def run_doctor(arguments: Sequence[str]) -> int:
    """Print every finding; 1 if a check failed."""
    words = list(arguments)
    redis_url = _take(words, "--redis")
    given = parse_arguments(words)
    if given.help is not None:
        print(USAGE, end="")
        return 0
    overrides = given.overrides if given.files else [DEFAULT_ENVIRONMENTS, *given.overrides]
    failed = 0
    try:
        config, origins = load_with_origins(RUN_CONFIG, given.files, overrides)
        check(config, origins)
    except ConfigError as error:
        print(Finding("FAILED", "configuration", str(error)).line())
        return 1
    checks = _checks(config, redis_url)
    for finding in (_configuration(lambda: preflight(config, origins, machine=False)), *(look() for look in checks)):
        print(finding.line(), flush=True)
        failed += finding.state == "FAILED"
    if failed:
        print(f"{failed} of {len(checks) + 1} checks FAILED", file=sys.stderr)
    return 1 if failed else 0


def _configuration(look: Callable[[], None]) -> Finding:
    try:
        look()
    except ConfigError as error:
        return Finding("FAILED", "configuration", str(error))
    return Finding("ok", "configuration", "it can be used, and its environments can be built")


def _checks(config: RunConfig, redis_url: str | None) -> list[Callable[[], Finding]]:
    directory, name = config.run.directory, config.run.name
    bwrap = getattr(config.section("sandbox"), "bwrap", None)
    checks: list[Callable[[], Finding]] = [
        machine.check_python,
        machine.check_packages,
        machine.check_cores,
        lambda: machine.check_memory(needed_bytes(config)),
        machine.check_files,
        machine.check_clock,
        machine.check_gpu,
        lambda: machine.check_expert_kernels(sorted(wanted_kernels(config))),
        lambda: machine.check_vllm(bool(config.pools_with("vllm"))),
        lambda: of_run.check_jail(bwrap),
        lambda: of_run.check_ports(len(replicas_of(config))),
        of_run.check_valkey,
        lambda: of_run.check_directory(directory, name),
        lambda: of_run.check_socket_path(directory, name),
        lambda: of_run.check_disk(config),
        lambda: of_run.check_tls(config.tls),
    ]
    if redis_url is not None:
        checks.append(lambda: of_run.check_redis(redis_url))
    return checks


def wanted_kernels(config: RunConfig) -> set[str]:
    """DeepSeek's libraries that the engines of a run ask for."""
    spread = [getattr(getattr(config.section(pool), "engine", None), "parallel", None) for pool in GROUPED]
    wanted = {"DeepEP" for each in spread if each is not None and each.all2all_backend in DEEPEP_BACKENDS}
    return wanted | {"DeepGEMM" for each in spread if each is not None and each.deep_gemm}


def _take(words: list[str], flag: str) -> str | None:
    """Remove a flag with its value from the words."""
    for index, word in enumerate(words):
        if word.startswith(f"{flag}="):
            del words[index]
            return word.partition("=")[2]
        if word == flag:
            if index + 1 == len(words):
                raise ConfigError(f"{flag} needs a value: {flag}=URL")
            value = words[index + 1]
            del words[index : index + 2]
            return value
    return None
