"""`slipstream rl`, `up` and `sft`: make a run directory, start what belongs to the run, see it to its end."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from slipstream.api.run.v1 import run_pb2
from slipstream.common.channel import open_channel
from slipstream.common.config import dump_toml
from slipstream.common.errors import DiskFull
from slipstream.launcher import progress
from slipstream.launcher.config import RunConfig
from slipstream.launcher.display import Display, finish_telling, open_display, tell
from slipstream.launcher.errors import RunDirError
from slipstream.launcher.lost import lost_sentence
from slipstream.launcher.mooncake import mooncake_specs
from slipstream.launcher.needs import check_memory
from slipstream.launcher.ports import PortLease, assign_endpoints, read_endpoints, take_ports, write_endpoints
from slipstream.launcher.process import ProcessSpec
from slipstream.launcher.records import count_steps
from slipstream.launcher.report import write_report
from slipstream.launcher.resolve import rendezvous_of, replicas_of, resolve
from slipstream.launcher.resume import Resumable, earlier_s, make_ready, moved_metrics, told
from slipstream.launcher.rundir import RunDir, RunLock, create_run_dir, removed_unless_begun, shown
from slipstream.launcher.sentences import one_line
from slipstream.launcher.services import access_to, service_specs, write_configs, write_targets
from slipstream.launcher.session import Ending, Signals, conduct, stop_signals
from slipstream.launcher.supervisor import OnEvent, Supervisor
from slipstream.launcher.trace import write_traces
from slipstream.launcher.valkey import socket_path, valkey_spec


def run_rl(config: RunConfig, *, stay_up: bool, resumed: Resumable | None = None) -> int:
    """Run everything, in a directory of its own or on in that of an earlier run; returns the exit code."""
    check_memory(config)
    if resumed is not None:
        return _run_in(resumed.run, config, stay_up=stay_up, resumed=resumed)
    run = create_run_dir(config.run.directory, config.run.name)
    with removed_unless_begun(run):
        return _run_in(run, config, stay_up=stay_up, resumed=None)


def _run_in(run: RunDir, config: RunConfig, *, stay_up: bool, resumed: Resumable | None) -> int:
    try:
        lock, lease = RunLock(run), PortLease(owner=str(run.path))
    except OSError as error:
        where = error.filename or run.path
        raise RunDirError(f"{run.name} cannot start: {where} cannot be written: {error.strerror}") from None
    display = open_display()
    try:
        before_s = 0.0
        if resumed is not None:
            before_s = earlier_s(run)
            make_ready(run, lease)
            from_step, sentence = told(resumed)
            display.say(f"run {run.name}: {sentence}")
            run.record("run_resumed", step=from_step)
        with socket_path(run) as socket:
            return asyncio.run(_until_told(config, run, socket, lease, display, before_s, stay_up=stay_up))
    finally:
        display.close()
        lease.close()
        lock.release()


async def _until_told(
    config: RunConfig, run: RunDir, socket: Path, lease: PortLease, display: Display, before_s: float, *, stay_up: bool
) -> int:
    async with stop_signals() as signals:  # before anything is written of a run, so that its end is, too
        return await _run_rl(config, run, socket, lease, display, signals, before_s, stay_up=stay_up)


async def _run_rl(
    config: RunConfig,
    run: RunDir,
    socket: Path,
    lease: PortLease,
    display: Display,
    signals: Signals,
    before_s: float,
    *,
    stay_up: bool,
) -> int:
    try:
        before = read_endpoints(run.endpoints_file, "metrics") if run.endpoints_file.exists() else {}
        endpoints, metrics = assign_endpoints(
            run.endpoints_file, replicas_of(config), lease, metrics=config.launcher.metrics
        )
        rendezvous = take_ports(rendezvous_of(config), lease, read_endpoints(run.endpoints_file, "agents"))
        agents = {"gateway": rendezvous["gateway"]} if "gateway" in rendezvous else {}
        write_endpoints(run.endpoints_file, endpoints, metrics, agents)
        configs = resolve(config, run, endpoints, redis_url=f"unix://{socket}", metrics=metrics, rendezvous=rendezvous)
        run.config_file.write_text(dump_toml(config))
        write_configs(run, configs)
        write_targets(run, metrics)
    except OSError as error:
        raise RunDirError(f"{run.path} cannot be written: {error.strerror}") from None
    if sentence := moved_metrics(before, metrics, run.targets_file):
        display.say(sentence)
    run.record("run_started", argv=sys.argv[1:])
    access = access_to(run)
    stores = [valkey_spec(run, socket), *mooncake_specs(config, run)]
    stages = [stores, service_specs(config, run, endpoints, access, configs)]
    count = sum(map(len, stages))
    display.say(f"run {run.name}: starting {count} processes ({', '.join(_kinds(stages))}) in {shown(run.path)}")
    if config.replicas("gateway"):
        display.say(f"outside agents: {getattr(configs['orchestrator'], 'gateway_url', '')}")
    latest = run_pb2.Run()
    failures = progress.GroupFailures(run.path / "metrics.jsonl")
    up: list[str] = []

    def on_ready(replica: str) -> None:
        up.append(replica)
        display.ready(replica, len(up), count)

    def on_waiting(replicas: list[str]) -> None:
        log = shown(run.path / "logs" / f"{replicas[0]}.log")
        display.say(f"waiting for {', '.join(replicas)}; a worker on vLLM takes minutes to start; {log}")

    def on_run(now: run_pb2.Run) -> None:
        latest.CopyFrom(now)
        run.write_waiting()
        display.show(now)
        for news in failures.news():
            display.say(one_line(news, shown(run.path / "metrics.jsonl")))

    async def work() -> None:
        display.say("all services are up; `slipstream status` and `slipstream stop` work from another terminal")
        async with open_channel(endpoints["orchestrator"], access) as channel:
            await progress.watch_run(channel, on_run)
        if stay_up:
            report = await asyncio.to_thread(_report, run)
            display.say(f"{run.name} finished: {_figures(run, latest, before_s + time.monotonic() - begun_s, report)}")
            display.say(f"the run has ended; services stay up until `slipstream stop {shown(run.path)}` or Ctrl-C")
            await asyncio.Event().wait()

    def on_stopping() -> None:
        run.record("run_stopping")
        display.say("stopping all services")

    def on_event(kind: str, **fields: object) -> None:
        run.record(kind, **fields)
        if sentence := restart_sentence(kind, fields, config.launcher.restart_budget):
            display.say(one_line(sentence, shown(run.path / "launcher.jsonl")))

    begun_s = time.monotonic()
    supervisor = supervisor_of(config, run, on_event)
    ending = await conduct(supervisor, stages, work, on_ready, on_stopping, on_waiting, signals)
    wall_s = before_s + time.monotonic() - begun_s
    return conclude(run, ending, latest, wall_s, display)


def _report(run: RunDir) -> str:
    """Write the report, and the trace file if traces were taken; says where they are, or why not."""
    try:
        said = f"report: {shown(write_report(run))}"
    except OSError as error:
        return f"no report: {error.strerror}; `slipstream report {shown(run.path)}` makes it later"
    try:
        traces = write_traces(run)
    except (OSError, DiskFull):
        return f"{said}; no trace file: `slipstream trace {shown(run.path)}` makes it later"
    return f"{said}; traces: {shown(traces)}" if traces is not None else said


def restart_sentence(kind: str, fields: Mapping[str, object], budget: int) -> str:
    """What a person is told of an event of the supervisor. A death that ends the run is told at its end."""
    if kind != "service_restart":
        return ""
    of = "" if fields["always"] else f" of {budget}"
    why = f"{fields['reason']}: {fields['said']}" if fields["said"] else fields["reason"]
    return f"{fields['replica']} died ({why}) and is started again; restart {fields['restart']}{of}"


def supervisor_of(config: RunConfig, run: RunDir, on_event: OnEvent | None = None) -> Supervisor:
    """As `[launcher]` has it; events go to `launcher.jsonl` unless told."""
    launcher = config.launcher
    return Supervisor(
        restart=launcher.restart,
        restart_budget=launcher.restart_budget,
        max_backoff_s=launcher.max_backoff_s,
        start_timeout_s=launcher.start_timeout_s,
        stop_timeout_s=launcher.stop_timeout_s,
        log_limit_bytes=launcher.log_limit_bytes,
        log_kept_files=launcher.log_kept_files,
        on_event=on_event or run.record,
    )


def _kinds(stages: list[list[ProcessSpec]]) -> list[str]:
    """The processes by kind, such as `2 decode`."""
    counts: dict[str, int] = {}
    for spec in (spec for stage in stages for spec in stage):
        kind = spec.replica.partition("-")[0]
        counts[kind] = counts.get(kind, 0) + 1
    return [kind if number == 1 else f"{number} {kind}" for kind, number in counts.items()]


def conclude(run: RunDir, ending: Ending, latest: run_pb2.Run, wall_s: float, display: Display) -> int:
    """Write the report and tell the outcome in one line."""
    run.record("run_ended", exit_code=ending.exit_code, reason=ending.sentence, stopped=ending.stopped)
    display.close()
    figures = _figures(run, latest, wall_s, _report(run))
    stopped = ending.stopped or latest.state == run_pb2.RUN_STATE_STOPPED
    if ending.sentence:
        sentence = one_line(ending.sentence, shown(run.path / "report.json"))
        tell(f"{run.name} ended: {sentence} ({figures})", sys.stderr)
    else:
        tell(f"{run.name} {'was stopped' if stopped else 'finished'}: {figures}")
    if (ending.sentence or stopped) and (lost := lost_sentence(run)):
        tell(lost, sys.stderr if ending.sentence else None)
    finish_telling()
    return ending.exit_code


def _figures(run: RunDir, latest: run_pb2.Run, wall_s: float, report: str) -> str:
    parts = [f"{max(latest.step, count_steps(run))} steps in {progress.duration(wall_s)}", report]
    accuracies = progress.outcome(latest)
    return "; ".join([f"accuracy {accuracies}", *parts] if accuracies else parts)
