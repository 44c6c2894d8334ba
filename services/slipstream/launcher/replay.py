"""`slipstream rl --replay-rollouts RUN`: the trainer alone, on what a run has sealed and stored."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.api.training.v1 import batch_pb2
from slipstream.common.config import ConfigError, dump_toml, parse_arguments
from slipstream.common.errors import JournalCorrupt
from slipstream.common.exits import REFUSED
from slipstream.launcher.errors import LauncherError
from slipstream.launcher.ports import LOOPBACK
from slipstream.launcher.resolve import resolve
from slipstream.launcher.rundir import RunDir, RunLock, create_run_dir, find_run, shown
from slipstream.launcher.services import service_command, write_configs
from slipstream.launcher.sft import REPLICA, run_children
from slipstream.orchestrator.journal import read_journal, segments
from slipstream.orchestrator.replay import unpacked
from slipstream.trainer.replay_config import ReplayConfig

if TYPE_CHECKING:
    from slipstream.launcher.config import RunConfig

FLAG = "--replay-rollouts"


def recorded_run(arguments: list[str]) -> tuple[RunDir, list[str]]:
    """The run that is named, and the arguments that are left, with its own configuration first."""
    at = arguments.index(FLAG)
    if at + 1 >= len(arguments) or arguments[at + 1].startswith(("-", "@")):
        raise ConfigError(f"{FLAG} must be followed by a run")
    recorded, rest = find_run(arguments[at + 1]), [*arguments[:at], *arguments[at + 2 :]]
    if parse_arguments(rest).files:
        raise ConfigError(f"{FLAG} takes the run's own configuration, and keys beside it; no file")
    return recorded, ["@", str(recorded.config_file), *rest]


def replay(config: RunConfig, recorded: RunDir, *, own_start: bool) -> int:
    """Train what was recorded, from the weights that the run began with unless told; returns the exit code."""
    run = create_run_dir(config.run.directory, f"{recorded.name}-replay")
    lock = RunLock(run)
    try:
        plans = _write_plans(recorded, run.path / "plans")
        if not plans:
            shutil.rmtree(run.path, ignore_errors=True)
            raise LauncherError(f"{recorded.path} has sealed no step, or its journal is gone")
        run.config_file.write_text(dump_toml(config))
        # It speaks to nobody, so its peers' addresses do not matter.
        nowhere: dict[str, str] = dict.fromkeys(
            (REPLICA, "orchestrator", "broadcaster", "prefill-1", "decode-1"), f"{LOOPBACK}:1"
        )
        trainer = resolve(config, run, nowhere, redis_url="redis://localhost")[REPLICA]
        values = trainer.model_dump(exclude_unset=True) | {"nproc": 1, "parallel": {}}
        values |= {"recorded": recorded.path, "plans": run.path / "plans"}
        if not own_start:
            values["initial_model"] = recorded.path / "model"
        write_configs(run, {REPLICA: ReplayConfig.model_validate(values)})
        print(f"replaying in {shown(run.path)}; log: {shown(run.log_file(REPLICA))}", flush=True)
        code = run_children([service_command("slipstream.trainer.replay", run, REPLICA)])
    finally:
        lock.release()
    if code == REFUSED:
        shutil.rmtree(run.path, ignore_errors=True)
    elif not code:
        print(f"{run.name} finished: its figures are in {shown(run.path / 'metrics.jsonl')}")
    return code or 0


def _write_plans(recorded: RunDir, target: Path) -> int:
    """A file for each step, of the micro-batches of all ranks; returns how many."""
    target.mkdir()
    count = 0
    for step, plan in _plans(recorded):
        (target / f"{step}.plan").write_bytes(plan.SerializeToString())
        count += 1
    return count


def _plans(recorded: RunDir) -> Iterator[tuple[int, batch_pb2.Plan]]:
    journal = recorded.path / "journal" / "journal.jsonl"
    try:
        records = read_journal(journal).records if segments(journal)[-1].exists() else []
    except JournalCorrupt as error:
        raise LauncherError(str(error)) from None
    for record in records:
        if record.get("kind") != "sealed" or not record.get("plans"):
            continue
        first, *others = map(unpacked, record["plans"])
        for other in others:
            first.micro_batches.extend(other.micro_batches)
        yield int(record["step"]), first
