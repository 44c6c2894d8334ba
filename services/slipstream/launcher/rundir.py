"""A run's directory: its name, its token, its lock, and how the other commands find it."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from slipstream.common.auth import write_token
from slipstream.common.config_errors import ConfigError, suggest
from slipstream.common.config_files import read_toml
from slipstream.common.disk import AppendFile, PatientFile
from slipstream.common.locks import FileLock, holder_of
from slipstream.launcher.errors import LauncherError, RunDirError

SUBDIRECTORIES = ("configs", "logs", "journal", "rollouts", "timeline", "versions", "model", "checkpoints")
MAX_NAME_ATTEMPTS = 10_000
EVENTS_BUFFER_BYTES = 1 << 20
SHOWN_RUNS = 5
"""When one is not found."""
LOCK_PATIENCE_S = 0.5
"""For how long a launcher waits for those who only ask whether its run is in use, in seconds."""


@dataclass(frozen=True)
class RunDir:
    """Paths inside `runs/<name>/`. Making one touches nothing; `create` and `find_run` do."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def run_id(self) -> str:
        """What its services and its journal know it by: the name it began with, wherever its directory is by now."""
        try:
            return str(read_toml(self.service_config("orchestrator"))["run_id"])
        except (ConfigError, KeyError):  # it is yet to begin
            return self.name

    @property
    def config_file(self) -> Path:
        return self.path / "config.toml"

    @property
    def endpoints_file(self) -> Path:
        return self.path / "endpoints.toml"

    @property
    def targets_file(self) -> Path:
        """Where the metrics are, as Prometheus's `file_sd_configs` wants it."""
        return self.path / "prometheus_targets.json"

    @property
    def token_file(self) -> Path:
        return self.path / "token"

    @property
    def lock_file(self) -> Path:
        return self.path / "launcher.lock"

    @property
    def events_file(self) -> Path:
        return self.path / "launcher.jsonl"

    @property
    def begun(self) -> bool:
        """Whether a launcher has come as far as to start something."""
        return self.events_file.exists()

    def service_config(self, replica: str) -> Path:
        return self.path / "configs" / f"{replica}.toml"

    def log_file(self, replica: str) -> Path:
        """Structured lines that the service itself writes."""
        return self.path / "logs" / f"{replica}.log"

    def output_file(self, replica: str) -> Path:
        """Standard output and error: tracebacks and whatever libraries print."""
        return self.path / "logs" / f"{replica}.out"

    @cached_property
    def _events(self) -> PatientFile:
        return PatientFile(AppendFile(self.events_file), EVENTS_BUFFER_BYTES)

    def record(self, kind: str, **fields: object) -> None:
        """Append one event of the launcher to `launcher.jsonl`; it waits while the disk is full."""
        self._events.write(json.dumps({"kind": kind, "time_s": time.time(), **fields}).encode() + b"\n")

    def write_waiting(self) -> None:
        """Write the events that found no room, if there is some now."""
        self._events.flush()


def create_run_dir(directory: Path, name: str) -> RunDir:
    """Make `directory/name`, or `name-2`, `name-3`, ... if that exists, with its token."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        run = RunDir(_make_unique(directory.resolve(), name))
        with removed_unless_begun(run):
            for subdirectory in SUBDIRECTORIES:
                (run.path / subdirectory).mkdir()
            write_token(run.token_file)
    except OSError as error:
        raise RunDirError(f"no run directory can be made in {directory}: {error.strerror}") from None
    return run


@contextlib.contextmanager
def removed_unless_begun(run: RunDir) -> Iterator[None]:
    """Takes a new directory away where it fails or is stopped before its run has begun, as its first event says."""
    try:
        yield
    except (OSError, LauncherError, KeyboardInterrupt, SystemExit):
        if not run.begun:
            shutil.rmtree(run.path, ignore_errors=True)
        raise


def _make_unique(directory: Path, name: str) -> Path:
    for attempt in range(1, MAX_NAME_ATTEMPTS):
        path = directory / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise RunDirError(f"{directory} already holds {MAX_NAME_ATTEMPTS} runs called {name}")


class RunLock:
    """Held by the launcher while it owns a run directory; the file names its process."""

    def __init__(self, run: RunDir) -> None:
        try:
            self._lock = FileLock(run.lock_file, str(os.getpid()), patience_s=LOCK_PATIENCE_S)
        except BlockingIOError:
            raise RunDirError(f"{run.path} is in use by another launcher") from None

    def release(self) -> None:
        self._lock.release()


def launcher_pid(run: RunDir) -> int | None:
    """Process that runs this directory now, or None. A stale file of a dead launcher counts as None."""
    pid = holder_of(run.lock_file)
    return int(pid) if pid else None


def find_run(reference: str | None, directory: Path = Path("runs")) -> RunDir:
    """Find a run by path or name; without one, the newest run."""
    if reference is not None:
        for path in (Path(reference), directory / reference):
            with contextlib.suppress(OSError):  # such as a name that is too long
                if (path / "config.toml").exists():
                    return RunDir(path.resolve())
        raise RunDirError(_no_run(reference, directory))
    runs = _newest_first(directory)
    if not runs:
        raise RunDirError(f"no run in {directory}/{_here(directory)}")
    return runs[0]


def _no_run(reference: str, directory: Path) -> str:
    """Why there is no such run, and which one may be meant."""
    with contextlib.suppress(OSError):
        if Path(reference).is_file():
            hint = ", and a configuration follows an '@'" if reference.endswith(".toml") else ""
            return f"{reference} is a file; a run is a directory, or its name in {directory}/{hint}"
        if Path(reference).is_dir():
            holds = [run.name for run in _newest_first(Path(reference))]
            return f"{reference} is no run: it has no config.toml{_some(holds, '; it holds')}"
    known = [run.name for run in _newest_first(directory)]
    near = suggest(difflib.get_close_matches(Path(reference).name, known, n=1))
    return f"no run called {reference} in {directory}/{near or _some(known, ', which has') or ', which has none'}"


def _here(directory: Path) -> str:
    """Where a relative directory was looked for."""
    return "" if directory.is_absolute() else f" of {Path.cwd()}; RUN may be a path"


def _some(names: list[str], before: str) -> str:
    """The first of the names; nothing where there are none."""
    more = f" and {len(names) - SHOWN_RUNS} more" if len(names) > SHOWN_RUNS else ""
    return f"{before} {', '.join(names[:SHOWN_RUNS])}{more}" if names else ""


def find_services_run(reference: str | None, directory: Path = Path("runs")) -> RunDir:
    """The same among the runs that have services, which fine-tuning has not; the newest is none of `slipstream eval`,
    unless there are no others.
    """
    if reference is None:
        runs = [run for run in _newest_first(directory) if not is_fine_tuning(run)]
        runs = [run for run in runs if not is_evaluation(run)] or runs
        if not runs:
            raise RunDirError(f"no run with services in {directory}/{_here(directory)}")
        return runs[0]
    run = find_run(reference, directory)
    if is_fine_tuning(run):
        figures, log = shown(run.path / "metrics.jsonl"), shown(run.path / "logs")
        raise RunDirError(
            f"{run.name} is a fine-tuning, and has no services: its figures are in {figures}, its log in {log}"
        )
    return run


def is_fine_tuning(run: RunDir) -> bool:
    """Whether it is of `slipstream sft` on conversations."""
    try:
        return "data" in read_toml(run.config_file)
    except ConfigError:  # whoever reads it next says what is wrong
        return False


def is_evaluation(run: RunDir) -> bool:
    """Whether `slipstream eval` made it: its orchestrator asks, and trains nothing."""
    try:
        return bool(read_toml(run.service_config("orchestrator")).get("evaluate_only"))
    except ConfigError:
        return False


def newest_running(directory: Path = Path("runs")) -> RunDir | None:
    """The newest run that is up, if one is; an evaluation only where nothing else is."""
    running = [run for run in _newest_first(directory) if launcher_pid(run) is not None]
    return next((run for run in running if not is_evaluation(run)), running[0] if running else None)


def _newest_first(directory: Path) -> list[RunDir]:
    configs = sorted(directory.glob("*/config.toml"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [RunDir(path.parent.resolve()) for path in configs]


def shown(path: Path) -> str:
    """The path as a person would type it from here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
