"""`slipstream rl --resume RUN`: whether a run can go on, and what must be so before it does."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.common.config import ConfigError
from slipstream.common.config_files import read_toml
from slipstream.common.errors import JournalCorrupt
from slipstream.launcher.errors import RunDirError
from slipstream.launcher.metrics_records import read_json_lines, worked_s
from slipstream.launcher.ports import PortLease, port_of, read_endpoints
from slipstream.launcher.rundir import RunDir, find_services_run, launcher_pid, shown
from slipstream.orchestrator.journal import read_journal, segments
from slipstream.orchestrator.resume import FINAL
from slipstream.trainer.checkpoint_store import CheckpointStore

USAGE = "usage: slipstream rl --resume RUN"
MAX_NAMED = 3
PORTS_TIMEOUT_S = 10.0
"""How long the processes of a killed run may take to let go of their ports."""


@dataclass(frozen=True, slots=True)
class Resumable:
    """A run that can go on, and how far its journal says that it came. A journal may be large: it is read once."""

    run: RunDir
    trained_step: int = 0
    sealed_step: int = 0
    checkpoint_step: int = 0


def find_resumable(arguments: list[str]) -> Resumable:
    """The run to go on with, the newest unless one is named. Raises `ConfigError` or `RunDirError` if it cannot."""
    named = arguments[1:]
    if arguments[0] != "--resume" or len(named) > 1 or any(name.startswith("-") for name in named):
        others = " ".join(word for word in arguments if word != "--resume")
        raise ConfigError(f"{USAGE}, not {others}; the run goes on with the configuration that it began with")
    run = find_services_run(named[0] if named else None)
    if launcher_pid(run) is not None:
        raise RunDirError(f"{run.name} is running")
    journal = run.path / "journal" / "journal.jsonl"
    *older, newest = segments(journal)
    if not newest.exists() and older:
        raise RunDirError(f"{run.name} cannot go on: {shown(journal)}, the newest part of its journal, is missing")
    if not newest.exists():
        raise RunDirError(f"{run.name} never came to begin: it has no journal; start a new run")
    try:
        records = read_journal(journal).records
    except JournalCorrupt as error:
        raise RunDirError(f"{run.name} cannot go on: {error.message}") from None
    ends = [record for record in records if record["kind"] == "run_ended"]
    if ends and ends[-1]["state"] in FINAL:  # whatever process came up once more to say so
        final = shown(run.path / "checkpoints" / "final")
        further = (
            f"; a new run goes on from its weights: --trainer.initial-model {final}" if Path(final).is_dir() else ""
        )
        raise RunDirError(
            f"{run.name} has ended for good: {ends[-1]['reason']}; its report is in {shown(run.path)}{further}"
        )
    secret = run.path / "session-secret"
    if secret.exists() and not secret.is_file():
        raise RunDirError(f"{run.name} cannot go on: {shown(secret)}, the secret of sessions' keys, is no file")
    if not writes_checkpoints(run):
        raise RunDirError(
            f"{run.name} writes no checkpoints (trainer.checkpoint.interval_steps is 0), so that there are no weights "
            "to go on from: start a new run"
        )
    return _resumable(run, records)


def _resumable(run: RunDir, records: Iterable[Mapping[str, Any]]) -> Resumable:
    trained = checkpoint = sealed = 0
    for record in records:
        if record["kind"] in ("trained", "skipped"):
            trained = max(trained, int(record["step"]))
        elif record["kind"] == "sealed":
            sealed = max(sealed, int(record["step"]))
        elif record["kind"] == "checkpoint":
            checkpoint = int(record["step"])
        elif record["kind"] == "summary":
            trained, sealed = max(trained, int(record["trained_step"])), max(sealed, int(record["sealed_step"]))
            checkpoint = int(record["checkpoint_step"] or 0)
    return Resumable(run, trained, sealed, checkpoint)


def told(resumable: Resumable) -> tuple[int, str]:
    """The step that a run goes on from, and a sentence on it.

    Raises `RunDirError` where the journal knows less than the newest checkpoint.
    """
    run, trained, sealed = resumable.run, resumable.trained_step, resumable.sealed_step
    # The journal hears of a checkpoint with the trainer's next request, which may never have come.
    written = CheckpointStore(run.path / "checkpoints").versions()
    checkpoint = max(resumable.checkpoint_step, written[-1].step if written else 0)
    if checkpoint > max(sealed, trained):
        raise RunDirError(
            f"{run.name} cannot go on: its newest checkpoint is of step {checkpoint}, and its journal ends at step "
            f"{max(sealed, trained)}: the journal's newest part is missing"
        )
    total = read_toml(run.config_file).get("orchestrator", {}).get("total_steps", "?")
    first = checkpoint + 1
    steps = f"step {trained} is" if trained == first else f"steps {first} to {trained} are"
    again = f"; {steps} taken once more" if trained > checkpoint else ""
    return checkpoint, f"going on from step {checkpoint} of {total}, that of its last checkpoint{again}"


def earlier_s(run: RunDir) -> float:
    """Seconds that earlier launchers of this run were at work. Of one that was killed, until its last event."""
    return worked_s(read_json_lines(run.events_file))


def writes_checkpoints(run: RunDir) -> bool:
    """Whether its own configuration says so. Raises `ConfigError` for one that cannot be read."""
    return bool(read_toml(run.config_file).get("trainer", {}).get("checkpoint", {}).get("interval_steps"))


def make_ready(run: RunDir, lease: PortLease) -> None:
    """Take every address of the run as soon as it is free, and take away what nobody is to be served any more.

    Addresses are taken here, and never changed: a copy of the run that goes on at the same time has the same ones, and
    the same run id and token, so that one of the two is refused. An address of metrics that stays taken is another's.
    Rows of steps that are trained once more are known by their runner's address, sessions by the gateway's. Versions of
    the dead incarnation are not: the engines wait for what the restored trainer publishes.
    """
    deadline_s = time.monotonic() + PORTS_TIMEOUT_S
    file = run.endpoints_file
    for replica, address in [*_endpoints(file).items(), *_endpoints(file, "agents").items()]:
        if not _take(lease, address, deadline_s):
            raise RunDirError(_taken(run, replica, address, lease.owner_of(port_of(address))))
    for address in _endpoints(file, "metrics").values():
        _take(lease, address, deadline_s)  # nothing is known by it: `moved_metrics` tells of one that is taken
    for version in (run.path / "versions").glob("*"):
        shutil.rmtree(version, ignore_errors=True)


def _taken(run: RunDir, replica: str, address: str, owner: str) -> str:
    taken = f"{run.name} cannot go on: {address} is taken, which is the address of its {replica}"
    if owner and owner != str(run.path):
        return f"{taken}, probably by {owner}: of a run and its copies one can be up; `slipstream stop {owner}` ends it"
    return f"{taken}: end what listens there"


def moved_metrics(before: Mapping[str, str], after: Mapping[str, str], targets: Path) -> str:
    """A sentence on metrics that are no longer where they were; empty where they are. `targets`: the file of all."""
    moved = [name for name, address in before.items() if after.get(name, address) != address]
    if not moved:
        return ""
    addresses = ", ".join(f"{name} from {before[name]} to {after[name]}" for name in moved[:MAX_NAMED])
    more = f", and {len(moved) - MAX_NAMED} more" if len(moved) > MAX_NAMED else ""
    return f"metrics moved, as their ports are taken: {addresses}{more}; {shown(targets)} has the new ones"


def _take(lease: PortLease, address: str, deadline_s: float) -> bool:
    """Take an address as soon as it is free; whether it was in time."""
    while not lease.try_take(port_of(address)):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)
    return True


def _endpoints(path: Path, table: str = "endpoints") -> dict[str, str]:
    return read_endpoints(path, table) if path.exists() else {}
