"""`slipstream status`: every service of a run, its version and its load."""

from __future__ import annotations

import asyncio
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from rich.console import Console
from rich.table import Table

from slipstream.api.inference.v1 import worker_pb2, worker_pb2_grpc
from slipstream.api.run.v1 import run_pb2, run_pb2_grpc
from slipstream.api.training.v1 import trainer_pb2, trainer_pb2_grpc
from slipstream.api.types.v1 import types_pb2
from slipstream.common.auth import Access
from slipstream.common.channel import AioChannel
from slipstream.common.config import ConfigError
from slipstream.common.errors import from_rpc_error
from slipstream.common.version import PolicyVersion
from slipstream.launcher.errors import RunDirError
from slipstream.launcher.metrics_records import read_json_lines, was_prepared
from slipstream.launcher.ports import read_endpoints
from slipstream.launcher.progress import PHASE_NAMES, filtered_groups, paused, ready_groups
from slipstream.launcher.records import RunRecords, read_run
from slipstream.launcher.report import build_report
from slipstream.launcher.rundir import RunDir, launcher_pid, shown
from slipstream.launcher.services import HealthCheck, access_to, service_of

CALL_TIMEOUT_S = 3.0

MAX_WIDTH = 400
"""Columns of a table that goes to no terminal."""


@dataclass
class ServiceStatus:
    """One row of the table."""

    replica: str
    address: str
    health: str
    version: str = ""
    load: str = ""
    memory_mib: float | None = None
    refused: str = ""
    """Why it did not take the question: whoever asks has no right to."""
    notes: list[str] = field(default_factory=list[str])
    """Sentences below the table: why the run is paused, what it warns of."""


def ended_run(run: RunDir) -> tuple[bool, str]:
    """Whether a run that is no longer up has finished, and one sentence on how it ended."""
    records = read_run(run)
    figures = build_report(records)
    ended_s = records.ended_s
    reasons = [str(r["reason"]) for r in [*records.of_kind("run"), *records.launcher] if r.get("reason")]
    accuracies = ", ".join(
        f"{name} {_percent(each.get('before'))} -> {_percent(each.get('after'))}"
        for name, each in figures["accuracy_by_environment"].items()
    )
    prepared = was_prepared(records.launcher)
    unended = "is prepared, and none of its processes answers" if prepared else "was killed"
    state = {"finished": "finished", "stopped": "was stopped", "failed": "failed"}.get(figures["state"], unended)
    newest = max((float(r["time_s"]) for r in [*records.metrics, *records.launcher] if "time_s" in r), default=None)
    when_s = ended_s if ended_s is not None else newest
    told = when_s is not None and not (prepared and state == unended)
    when = f" at {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(when_s))}" if told else ""
    parts = [f"{figures['steps']} of {_total_steps(records)} steps"]
    parts += [f"accuracy {accuracies}"] if accuracies else []
    if figures["state"] == "failed" and reasons:
        parts.insert(0, reasons[-1])
    report = run.path / "report.html"
    parts.append(f"report: {shown(report)}" if report.exists() else f"no report yet: slipstream report {run.name}")
    final = any(record.get("state") in ("finished", "stopped") for record in records.of_kind("run"))
    if not final and records.config.get("trainer", {}).get("checkpoint", {}).get("interval_steps"):
        parts.append(f"it can go on: slipstream rl --resume {run.name}")
    return figures["state"] == "finished", f"{run.name} {state}{when}: {'; '.join(parts)}"


def _total_steps(records: RunRecords) -> object:
    return records.config.get("orchestrator", {}).get("total_steps", "?")


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{100 * value:.1f} %"


def standing(run: RunDir) -> tuple[bool, str]:
    """Whether the launcher is ending the run, and a sentence on that, or on where the run went on from."""
    stopping, sentence = False, ""
    for event in read_json_lines(run.events_file):
        kind = event.get("kind")
        if kind == "run_started":
            stopping = False
        elif kind == "run_resumed":
            sentence = f"it went on from step {event.get('step')}; steps count from the run's beginning"
        elif kind == "run_stopping":
            stopping, sentence = True, "it is ending: its services are being stopped, and the report comes last"
    return stopping, sentence


async def read_status(run: RunDir) -> list[ServiceStatus]:
    """Ask every service at once; one that does not answer is `away`."""
    try:
        endpoints = read_endpoints(run.endpoints_file)
        access = access_to(run)
    except (OSError, ValueError, KeyError, ConfigError) as error:
        raise RunDirError(f"{run.path} does not say where its services are: {error}") from None
    pids = {r["replica"]: r["pid"] for r in read_json_lines(run.events_file) if r.get("kind") == "service_started"}
    rows = await asyncio.gather(*(_ask(replica, address, access) for replica, address in endpoints.items()))
    if launcher_pid(run) is not None:  # else the numbers may be somebody else's by now
        for row in rows:
            row.memory_mib = memory_mib(pids.get(row.replica))
    for row in rows:
        if row.replica == "gateway":
            row.load = tomllib.loads(run.service_config("orchestrator").read_text()).get("gateway_url", "")
    return list(rows)


async def _ask(replica: str, address: str, access: Access) -> ServiceStatus:
    check = HealthCheck(address, access)
    health = await check.status()
    row = ServiceStatus(replica, address, "away" if health is None else health.lower().replace("_", " "))
    asked = {"prefill": _ask_worker, "decode": _ask_worker, "trainer": _ask_trainer, "orchestrator": _ask_run}
    ask = asked.get(service_of(replica))
    try:
        if health is not None and ask is not None:
            # Over the connection that answered: another one may fail where this one is well.
            await ask(row, check.channel)
    except grpc.aio.AioRpcError as error:
        row.load = error.code().name.lower().replace("_", " ")
        if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            row.refused = from_rpc_error(error).message
    finally:
        await check.close()
    return row


async def _ask_worker(row: ServiceStatus, channel: AioChannel) -> None:
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    worker = await stub.GetWorker(worker_pb2.GetWorkerRequest(), timeout=CALL_TIMEOUT_S, wait_for_ready=True)
    load = worker.load
    state = worker_pb2.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower()
    row.health = state
    row.version = _version(worker.version) if worker.HasField("version") else ""
    row.load = f"{load.running_sample_count} samples, {load.waiting_request_count} waiting, "
    row.load += f"{load.blocks_used}/{load.blocks_total} blocks"


async def _ask_trainer(row: ServiceStatus, channel: AioChannel) -> None:
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    status = await stub.GetStatus(trainer_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S, wait_for_ready=True)
    row.version = _version(status.version) if status.HasField("version") else ""
    row.load = status.activity


async def _ask_run(row: ServiceStatus, channel: AioChannel) -> None:
    stub = run_pb2_grpc.RunServiceStub(channel)
    run = (await stub.GetRun(run_pb2.GetRunRequest(), timeout=CALL_TIMEOUT_S, wait_for_ready=True)).run
    row.version = _version(run.serving) if run.HasField("serving") else ""
    row.load = f"{PHASE_NAMES.get(run.phase, run.phase)}, step {run.step}/{run.total_steps}, "
    row.load += f"{run.running_group_count} groups running"
    if ready := ready_groups(run):
        row.load += f", {ready} ready for the next"
    if filtered := filtered_groups(run):
        row.notes.append(f"{filtered} groups were filtered since the last step: all rollouts of each earned the same")
    if sessions := run.trained_group_counts.get("session"):
        row.notes.append(f"{sessions} of {sum(run.trained_group_counts.values())} trained groups were of sessions")
    if outside := ", ".join(f"{count} of {name}" for name, count in sorted(run.external_group_counts.items())):
        row.notes.append(f"groups of third parties that have ended: {outside}")
    if paused(run):
        row.notes.append(f"paused: {run.reason}")
    row.notes += [f"warning: {sentence}" for sentence in run.warnings]


def refusal(run: RunDir, rows: list[ServiceStatus]) -> str:
    """One sentence on services that did not let us ask, or nothing."""
    refused = [row for row in rows if row.refused]
    if not refused:
        return ""
    who = refused[0].replica + (f" and {len(refused) - 1} more" if len(refused) > 1 else "")
    return f"{who} refused the question: {refused[0].refused}; the token is read from {run.token_file}"


def _version(version: types_pb2.PolicyVersion) -> str:
    return str(PolicyVersion.from_proto(version))


def memory_mib(pid: int | None) -> float | None:
    """Proportional set size of a process and its descendants; None where it cannot be read."""
    if pid is None:
        return None
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    own_kib = sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return own_kib / 1024 + sum(memory_mib(int(child)) or 0.0 for child in children)


def print_status(run: RunDir, rows: list[ServiceStatus]) -> None:
    table = Table(title=f"{run.name}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("service", "state", "version", "load", "MiB", "address"):
        table.add_column(column, justify="right" if column == "MiB" else "left", no_wrap=column != "load")
    for row in rows:
        memory = "" if row.memory_mib is None else f"{row.memory_mib:.0f}"
        table.add_row(row.replica, row.health, row.version, row.load, memory, row.address)
    total_mib = sum(row.memory_mib or 0.0 for row in rows)
    if total_mib:
        table.add_section()
        table.add_row("together", "", "", "", f"{total_mib:.0f}", "")
    # Of a narrow terminal loads take more lines; nothing else is cut short. What is not a terminal has no width.
    Console(width=None if Console().is_terminal else MAX_WIDTH).print(table)
    for note in (note for row in rows for note in row.notes):
        print(note)
