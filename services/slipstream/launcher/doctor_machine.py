"""Checks of the machine: what is installed, and whether there is enough of it. Each takes what it looks at."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from slipstream.common.config import ConfigError
from slipstream.engine.vllm.installed import find_vllm
from slipstream.engine.vllm.kernels import Kernels, find_deep_ep, find_deep_gemm
from slipstream.launcher.memory import MIB, available_bytes

PACKAGES = ("torch", "torchtitan", "grpcio", "protobuf", "pydantic", "numpy", "tokenizers", "reasoning-gym")
MIN_PYTHON = (3, 11)
MIN_CORES = 2
COMFORT = 1.25
"""Room above the bare need below which a check warns."""
MIN_FILES = 256
WISHED_FILES = 1024
CLOCK_SAMPLE_S = 0.2
MAX_CLOCK_ERROR_S = 0.05
TIME_ERROR = 5
TIMEX_BYTES = 512


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's answer."""

    state: Literal["ok", "warn", "FAILED"]
    what: str
    figure: str
    advice: str = ""

    def line(self) -> str:
        return f"{self.state:<7} {self.what:<16} {self.figure}{f'; {self.advice}' if self.advice else ''}"


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Finding:
    figure = ".".join(map(str, version))
    if version < MIN_PYTHON:
        return Finding("FAILED", "python", figure, "install Python 3.11 or newer and make the environment again")
    return Finding("ok", "python", figure)


def check_packages(
    installed: Callable[[str], str] = metadata.version, wanted: Mapping[str, str] | None = None
) -> Finding:
    """Whether each package is there in a version that `pyproject.toml` allows."""
    wanted = _wanted() if wanted is None else wanted
    found: list[str] = []
    wrong: list[str] = []
    for name in PACKAGES:
        try:
            version = installed(name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        found.append(f"{name} {version}")
        if not _allowed(version, wanted.get(name, "")):
            wrong.append(f"{name} is {version}, not {wanted[name]}")
    if wrong:
        return Finding(
            "FAILED", "packages", ", ".join(wrong), "install again: make install, or pip install 'slipstream[demo]'"
        )
    return Finding("ok", "packages", ", ".join(found))


def _wanted() -> dict[str, str]:
    """Bounds by package, from our own metadata."""
    try:
        lines = metadata.requires("slipstream") or []
    except metadata.PackageNotFoundError:
        return {}
    matches = (re.match(r"^([\w.-]+)\s*((?:==|>=)[\d.]+)", line) for line in lines)
    return {match[1]: match[2] for match in matches if match}


def _allowed(version: str, bound: str) -> bool:
    numbers, least = _numbers(version), _numbers(bound[2:])
    return numbers[: len(least)] == least if bound.startswith("==") else numbers >= least


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def check_cores(count: int | None = None) -> Finding:
    count = len(os.sched_getaffinity(0)) if count is None else count
    if count < MIN_CORES:
        return Finding("warn", "cores", str(count), f"training and sampling share it; {MIN_CORES} or more overlap them")
    return Finding("ok", "cores", str(count))


def check_memory(needed: int, available: int | None = None) -> Finding:
    available = available_bytes() if available is None else available
    figure = f"{available // MIB} MiB available, about {needed // MIB} MiB needed"
    if available < needed:
        return Finding("FAILED", "memory", figure, "end other programs, raise the limit, or lower the replicas")
    if available < COMFORT * needed:
        return Finding("warn", "memory", figure, "little is left for the file cache and for what runs beside it")
    return Finding("ok", "memory", figure)


def check_files(limit: int | None = None) -> Finding:
    """The hard limit of open files, which every service inherits and makes its own."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if limit is None else limit
    figure = "no limit of open files" if limit == resource.RLIM_INFINITY else f"at most {limit} open"
    advice = f"raise it: ulimit -n {WISHED_FILES}"
    if limit != resource.RLIM_INFINITY and limit < MIN_FILES:
        return Finding("FAILED", "file descriptors", figure, advice)
    if limit != resource.RLIM_INFINITY and limit < WISHED_FILES:
        return Finding("warn", "file descriptors", figure, advice)
    return Finding("ok", "file descriptors", figure)


def check_clock(
    wall: Callable[[], float] = time.time,
    steady: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    synchronised: Callable[[], bool | None] | None = None,
) -> Finding:
    """Whether the wall clock runs as the steady one does. Only records and reports read it, no lease or deadline."""
    before_s, unsure_before_s = _wall_ahead_s(wall, steady)
    sleep(CLOCK_SAMPLE_S)
    after_s, unsure_after_s = _wall_ahead_s(wall, steady)
    step_s = after_s - before_s
    if abs(step_s) > MAX_CLOCK_ERROR_S + unsure_before_s + unsure_after_s:
        figure = f"the wall clock moved {step_s:+.3f} s against the steady one within {CLOCK_SAMPLE_S} s"
        return Finding("warn", "clock", figure, "times in records will jump; see what sets it (NTP, the hypervisor)")
    in_step = (synchronised or kernel_clock_synchronised)()
    if in_step is False:
        return Finding("warn", "clock", "steady, not synchronised", "run an NTP client where several hosts share a run")
    return Finding("ok", "clock", f"steady{', synchronised' if in_step else ''}")


def _wall_ahead_s(wall: Callable[[], float], steady: Callable[[], float]) -> tuple[float, float]:
    """How far the wall clock is ahead of the steady one, and the error of that: a busy machine halts us in between."""
    earliest_s, wall_s, latest_s = steady(), wall(), steady()
    return wall_s - (earliest_s + latest_s) / 2, (latest_s - earliest_s) / 2


def kernel_clock_synchronised() -> bool | None:
    """What the kernel says of NTP; None where it cannot be asked."""
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != TIME_ERROR


def check_vllm(asked: bool, find: Callable[[], str] = find_vllm) -> Finding:
    """Whether the engine is there that a run may ask for."""
    try:
        return Finding("ok", "vllm", find())
    except ConfigError as error:
        if asked:
            return Finding("FAILED", "vllm", str(error))
        return Finding("ok", "vllm", "not installed, and not asked for")


def check_expert_kernels(
    wanted: Collection[str] = (), find: Callable[[], Sequence[Kernels]] = lambda: (find_deep_ep(), find_deep_gemm())
) -> Finding:
    """DeepSeek's kernels for experts on several GPUs, by name those that the run asks for."""
    found = find()
    figure = ", ".join(f"{each.name} {'is there' if each.there else each.state}" for each in found)
    lacking = [each for each in found if each.name in wanted and not each.there]
    if lacking:
        needed = f"{lacking[0].name} is needed, and {lacking[0].detail}"
        return Finding("FAILED", "expert kernels", needed, lacking[0].step)
    odd = [each for each in found if each.state in ("another package", "broken")]
    if odd:
        return Finding("warn", "expert kernels", odd[0].detail, odd[0].step)
    return Finding("ok", "expert kernels", figure if wanted else f"{figure}; none is needed")


def check_gpu(devices: Path = Path("/dev")) -> Finding:
    """For information: this release computes on the CPU."""
    found = sorted(path.name for path in devices.glob("nvidia[0-9]*"))
    return Finding(
        "ok", "gpu", f"{', '.join(found)} (not used by this release)" if found else "none, and none is needed"
    )
