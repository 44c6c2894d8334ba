"""`slipstream sft` with a `[data]` section: fine-tuning on conversations, in a run directory of its own."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from slipstream.common.config import Arguments, BaseConfig, ConfigError, dump_toml, parse_arguments
from slipstream.common.config_files import load_with_origins, read_toml
from slipstream.common.config_help import help_text
from slipstream.common.exits import REFUSED
from slipstream.common.extras import FINE_TUNING_MODULES, explain, missing_modules
from slipstream.launcher.config import RunConfig, RunSection
from slipstream.launcher.errors import LauncherError
from slipstream.launcher.ports import PortLease, take_ports
from slipstream.launcher.rundir import RunDir, RunLock, create_run_dir, find_run, shown
from slipstream.launcher.services import service_command, write_configs
from slipstream.launcher.session import STOP_SIGNALS
from slipstream.launcher.sft import REPLICA, run_children
from slipstream.models.lora.config import AdapterConfig
from slipstream.models.registry import CONFIG_FILE
from slipstream.trainer.chat.config import ChatConfig, CheckpointConfig, DataConfig, StartConfig, TrainingConfig
from slipstream.trainer.config import ComputeConfig, ParallelConfig, RankConfig
from slipstream.trainer.optim_config import OptimConfig

PROGRAM = "slipstream sft"
RESUME = "--resume"
MADE_BY = {
    "start.initial": "; slipstream convert makes one",
    "data.train": "; slipstream problems makes one",
    "data.validation": "; slipstream problems makes one",
}
"""What makes that which is missing."""
SIGNALLED = 128
"""Exit codes above are those of signals."""


class ChatRunConfig(BaseConfig):
    """Everything that fine-tuning is made from."""

    run: RunSection = RunSection(name="sft")
    start: StartConfig
    data: DataConfig
    training: TrainingConfig = TrainingConfig()
    optim: OptimConfig = OptimConfig(lr=1e-5, betas=(0.9, 0.95))
    """`total_steps` is what the data gives."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    parallel: ParallelConfig = ParallelConfig()
    compute: ComputeConfig = ComputeConfig()
    lora: AdapterConfig | None = None
    """Train low-rank adapters alone. The model that is left has them merged."""

    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info")
    """Level of the log."""


def asked_for(arguments: Sequence[str]) -> bool:
    """Whether a command line means this, and not the warm-up: it resumes, has something of `[data]`, or asks for help
    with a section that only this has."""
    if RESUME in arguments:
        return True
    given = parse_arguments(arguments)
    section = (given.help or "").partition(".")[0]
    if section in ChatRunConfig.model_fields and section not in RunConfig.model_fields:
        return True
    return any(override.startswith("data.") for override in given.overrides) or any(
        "data" in read_toml(file) for file in given.files
    )


def sft_on_chat(arguments: Sequence[str]) -> int:
    """Fine-tune and leave the model in the run directory; returns the exit code."""
    arguments, run = _without_resume(arguments)
    given = parse_arguments(arguments)
    if given.help is not None:
        print(help_text(ChatRunConfig, PROGRAM, given.help))
        return 0
    config = _load(given, run)
    if given.dry_run:
        print(dump_toml(config), end="")
        return 0
    missing = missing_modules(FINE_TUNING_MODULES)
    if missing:
        raise LauncherError(explain(PROGRAM, missing, "trainer"))
    resumed = run is not None
    run = run or create_run_dir(config.run.directory, config.run.name)
    before = _written_ns(run)
    lock, lease = RunLock(run), PortLease()
    try:
        if not resumed:
            run.config_file.write_text(dump_toml(config))
        configs = _of_ranks(config, run, lease)
        write_configs(run, configs)
        print(f"fine-tuning in {shown(run.path)}; log: {shown(run.log_file(REPLICA))}", flush=True)
        code = run_children([service_command("slipstream.trainer.chat", run, replica) for replica in configs])
    finally:
        lease.close()
        lock.release()
    if code == REFUSED and not resumed:  # it said why, and nothing was begun
        shutil.rmtree(run.path, ignore_errors=True)
        return code
    return _told(run, code, finished=_written_ns(run) != before)


def _written_ns(run: RunDir) -> int | None:
    """When the trained model was left there; None without one."""
    file = run.path / "model" / CONFIG_FILE
    return file.stat().st_mtime_ns if file.exists() else None


def _of_ranks(config: ChatRunConfig, run: RunDir, lease: PortLease) -> dict[str, ChatConfig]:
    """The configuration of each rank, by its name."""
    count = config.training.nproc
    meeting = f"tcp://{take_ports([REPLICA], lease)[REPLICA]}" if count > 1 else ""
    ranks = [RankConfig(rank=rank, rank_count=count, rendezvous=meeting) for rank in range(count)]
    return {name: _of_trainer(config, run, name, rank) for rank in ranks for name in [_name(rank)]}


def _name(rank: RankConfig) -> str:
    return f"{REPLICA}-{rank.rank}" if rank.rank else REPLICA


def _without_resume(arguments: Sequence[str]) -> tuple[list[str], RunDir | None]:
    rest = list(arguments)
    if RESUME not in rest:
        return rest, None
    at = rest.index(RESUME)
    if at + 1 >= len(rest) or rest[at + 1].startswith(("-", "@")):
        raise ConfigError(f"{RESUME} must be followed by a run")
    run = find_run(rest[at + 1])
    return [*rest[:at], *rest[at + 2 :]], run


def _load(given: Arguments, run: RunDir | None) -> ChatRunConfig:
    files: list[Path] = [run.config_file] if run is not None else []
    if run is not None and given.files:
        raise ConfigError(f"{RESUME} goes on with the run's own configuration; it takes no file")
    if run is not None and "data" not in read_toml(run.config_file):
        raise ConfigError(f"{run.name} is no fine-tuning: its config.toml has no [data]")
    config, _ = load_with_origins(ChatRunConfig, [*files, *given.files], given.overrides)
    try:
        config.parallel.layout(config.training.nproc)
    except ValueError as error:
        raise ConfigError(f"parallel: {error}; training.nproc is {config.training.nproc}") from None
    for where, path, wanted in (
        ("start.initial", config.start.initial, Path.is_dir),
        ("data.train", config.data.train, Path.is_file),
        ("data.validation", config.data.validation, Path.is_file),
        ("data.chat_template", config.data.chat_template, Path.is_file),
    ):
        if path is not None and not wanted(path):
            made = MADE_BY.get(where, "")
            raise ConfigError(f"{where} {str(path)!r} is no {'directory' if wanted is Path.is_dir else 'file'}{made}")
    return _absolute(config)


def _absolute(config: ChatRunConfig) -> ChatRunConfig:
    """It may be resumed from another folder."""
    data = {name: path.absolute() for name, path in config.data if isinstance(path, Path)}
    start = config.start.model_copy(update={"initial": config.start.initial.absolute()})
    return config.model_copy(update={"data": config.data.model_copy(update=data), "start": start})


def _of_trainer(config: ChatRunConfig, run: RunDir, replica: str, rank: RankConfig) -> ChatConfig:
    return ChatConfig.model_validate(
        {
            **config.model_dump(exclude={"run", "log_level"}),
            "run_id": run.name,
            "run_dir": run.path,
            "replica": replica,
            "group": rank.model_dump(),
            "auth": {"token_file": run.token_file},
            "log": {"level": config.log_level, "file": run.log_file(replica)},
            "seed": config.run.seed,
        }
    )


def _told(run: RunDir, code: int | None, *, finished: bool) -> int:
    """Say how it ended. `finished`: it left a model."""
    resume = f"go on with: {PROGRAM} {RESUME} {shown(run.path)}"
    if not code and finished:
        print(f"{run.name} finished: the model is in {shown(run.path / 'model')}")
        return 0
    number = code - SIGNALLED if code is not None and code > SIGNALLED else None
    if not code or number in STOP_SIGNALS:
        print(f"{run.name} was stopped; {resume}")
        return code or 0
    hint = f"; {resume}" if any((run.path / "checkpoints").glob("*/COMPLETE")) else ""
    how = f"ended with code {code}" if number is None else f"was ended by {_signal_name(number)}"
    print(f"{run.name} {how}; its log is {shown(run.log_file(REPLICA))}{hint}", file=sys.stderr)
    return code


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"{name}, which may mean that memory ran out" if number == signal.SIGKILL else name
