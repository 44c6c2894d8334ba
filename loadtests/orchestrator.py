"""How much traffic one orchestrator carries: 2,000 rollouts in flight, four runners, and plans of 4 M tokens.

    python loadtests/orchestrator.py --full --out figures.jsonl      # minutes; the default is what fits into CI

The orchestrator is a process of its own. Around it, in this one: four runners that speak RunnerService as the real one
does but whose groups take a drawn time, a trainer that takes none, workers and a broadcaster that answer at once. Rows
of the large plan lie in real spools behind real RowsServices; a third process reads them as the trainer does.

Wall times depend on the machine and what else it does; CPU seconds hardly do. So what is asserted is that everything
that was asked for came, once, and that a rollout costs about as much with 2,000 in flight as with 250.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "services"))

import grpc
import structlog
from orchestrator_traffic import PROMPT_TOKENS, Broadcaster, Runner, Shape, Trainer, Worker
from soak import memory_mb, slope

from slipstream.api.broadcast.v1 import broadcast_pb2_grpc
from slipstream.api.inference.v1 import worker_pb2_grpc
from slipstream.api.rollout.v1 import rows_pb2_grpc, runner_pb2, runner_pb2_grpc
from slipstream.api.training.v1 import batch_pb2, batch_pb2_grpc
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.config import ListenConfig, MetricsConfig, RedisConfig, dump_toml
from slipstream.common.runtime import Service, Servicers
from slipstream.common.version import PolicyVersion
from slipstream.launcher.child import guarded
from slipstream.launcher.ports import PortLease, port_of, take_ports
from slipstream.launcher.valkey import binary_path
from slipstream.orchestrator.config import EnvironmentConfig, OrchestratorConfig, WorkerConfig
from slipstream.runner.config import RunnerConfig
from slipstream.runner.servicer import RowsServicer
from slipstream.runner.spool import Rows, Spool

ROOT = Path(__file__).resolve().parents[1]
RUNNERS, SAMPLES = 4, 8
START_TIMEOUT_S, RUN_TIMEOUT_S = 60.0, 300.0
SAMPLE_INTERVAL_S = 0.2
ALLOWED_COST_RATIO = 3.0
"""CPU a rollout with 2,000 in flight, against that with 250. What looks at every open group costs eight times."""
SLOPE_STEPS = 500
"""Fewer say nothing of how memory grows: caches fill."""
WINDOW_BYTES = 8 << 20
PLAN_TOKENS = 4 << 20


@dataclass(frozen=True)
class Phase:
    """Some steps with so many rollouts in flight."""

    name: str
    in_flight: int
    steps: int
    mean_s: float
    """Of a group."""

    @property
    def groups(self) -> int:
        return self.slots * RUNNERS

    @property
    def slots(self) -> int:
        """Groups that each runner runs at once."""
        return self.in_flight // SAMPLES // RUNNERS


@dataclass(frozen=True)
class Scenario:
    """One run."""

    phases: Sequence[Phase]
    shape: Shape = field(default_factory=Shape)
    groups_per_step: int = 16
    to_its_end: bool = False
    """Wait for the last step, rather than for the last that counts."""

    @property
    def steps(self) -> int:
        """The last ones count for nothing: what is in flight runs out."""
        return sum(phase.steps for phase in self.phases) + self.phases[-1].groups // self.groups_per_step + 1

    @property
    def bound(self) -> int:
        """Of staleness: more than the slowest groups need, so that runners' slots alone limit what is in flight."""
        return 4 * max(phase.groups for phase in self.phases) // self.groups_per_step + 8


class Orchestrator:
    """The process, and what can be seen of it from outside."""

    def __init__(self, directory: Path, config: OrchestratorConfig) -> None:
        self.config = config
        self.output = directory / "orchestrator.out"
        file = directory / "orchestrator.toml"
        file.write_text(dump_toml(config))
        command = (sys.executable, "-m", "slipstream.orchestrator", "@", str(file))
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "services")}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(guarded(command), env=environment, stdout=output, stderr=output)

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def memory_mb(self) -> float:
        return memory_mb(self.process.pid) or 0.0

    async def metrics(self) -> dict[str, float]:
        """Samples by name with labels."""
        url = f"http://127.0.0.1:{self.config.metrics.port}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=30).read().decode())
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass
class World:
    """An orchestrator and all that it talks to."""

    orchestrator: Orchestrator
    runners: list[Runner]
    trainer: Trainer
    spools: list[Spool]

    async def traffic(self) -> None:
        """All runners, for ever."""
        async with asyncio.TaskGroup() as group:
            for runner in self.runners:
                for loop in (runner.acquire, runner.heartbeat, runner.report):
                    group.create_task(loop())

    @property
    def finished(self) -> int:
        return sum(runner.finished for runner in self.runners)


@asynccontextmanager
async def world(directory: Path, scenario: Scenario, *, spooled: bool = False) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        lease = PortLease(owner="loadtests")
        stack.callback(lease.close)
        ports = take_ports(("orchestrator", "metrics"), lease)

        async def serve(name: str, servicers: Servicers) -> str:
            service = Service(RunnerConfig(run_dir=directory, replica=name), servicers)
            await service.start()
            stack.push_async_callback(service.stop)
            return f"127.0.0.1:{service.port}"

        worker, broadcaster = Worker(), Broadcaster()
        rows = (rows_pb2_grpc.add_RowsServiceServicer_to_server, worker, "rows")
        worker_address = await serve(
            "worker", [(worker_pb2_grpc.add_WorkerServiceServicer_to_server, worker, "worker"), rows]
        )
        add = broadcast_pb2_grpc.add_BroadcastServiceServicer_to_server
        broadcaster_address = await serve("broadcaster", [(add, broadcaster, "broadcaster")])
        spools = [Spool(directory / f"spool-{number}", 1 << 30) for number in range(RUNNERS if spooled else 0)]
        holders = [
            await serve("rows", [(rows_pb2_grpc.add_RowsServiceServicer_to_server, RowsServicer(spool), "rows")])
            for spool in spools
        ] or [worker_address] * RUNNERS

        config = OrchestratorConfig(
            run_id=directory.name,
            run_dir=directory,
            replica="orchestrator",
            listen=ListenConfig(port=port_of(ports["orchestrator"])),
            metrics=MetricsConfig(port=port_of(ports["metrics"])),
            redis=RedisConfig(url=start_valkey(directory, stack)),
            total_steps=scenario.steps,
            groups_per_step=scenario.groups_per_step,
            samples_per_group=SAMPLES,
            max_off_policy_steps=scenario.bound,
            evaluate_before=False,
            evaluate_after=False,
            environments=[EnvironmentConfig(name="words")],
            workers=[
                WorkerConfig(replica="decode-1", role="decode", address=worker_address),
                WorkerConfig(replica="prefill-1", role="prefill", address=worker_address),
            ],
            broadcaster=broadcaster_address,
            # This process may stand still for a while where the machine is busy; that is no failure of the run.
            runner_lease_ttl_s=60.0,
            pool_timeout_s=120.0,
        )
        orchestrator = Orchestrator(directory, config)
        stack.callback(orchestrator.stop)
        channels = [
            await stack.enter_async_context(open_channel(f"127.0.0.1:{config.listen.port}", Access()))
            for _ in range(RUNNERS + 1)
        ]
        await until_ready(orchestrator, channels[0])
        runners = [
            Runner(
                f"runner-{number}",
                runner_pb2_grpc.RunnerServiceStub(channels[number]),
                scenario.phases[0].slots,
                scenario.shape,
                scenario.phases[0].mean_s,
                holders[number],
                worker_address,
                keeper(spools[number], scenario.shape) if spooled else None,
            )
            for number in range(RUNNERS)
        ]
        samples = scenario.groups_per_step * SAMPLES
        trainer = Trainer(batch_pb2_grpc.BatchServiceStub(channels[-1]), broadcaster, samples)
        yield World(orchestrator, runners, trainer, spools)


def start_valkey(directory: Path, stack: AsyncExitStack) -> str:
    path = directory / "valkey.sock"
    options = {"--port": "0", "--unixsocket": str(path), "--save": "", "--dir": str(directory)}
    command = (str(binary_path()), *(word for option in options.items() for word in option))
    process = subprocess.Popen(guarded(command), stdout=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return f"unix://{path}?db=0"


async def until_ready(orchestrator: Orchestrator, channel: grpc.aio.Channel) -> None:
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while channel.get_state(try_to_connect=True) is not grpc.ChannelConnectivity.READY:
                if orchestrator.process.poll() is not None:
                    break
                await asyncio.sleep(0.02)
            else:
                return
    except TimeoutError:
        pass
    raise RuntimeError(f"the orchestrator did not start\n{orchestrator.output.read_text()}")


def keeper(spool: Spool, shape: Shape) -> Any:
    """Keeps rows as the runner does, before it reports."""
    data = {"t": array("i", range(shape.tokens)).tobytes(), "l": array("f", [-0.5] * shape.tokens).tobytes()}

    async def keep(report: runner_pb2.GroupReport) -> None:
        refs = [ref for record in report.rollouts for ref in (record.token_ids, record.logprobs)]
        await spool.keep(report.group.group_id, report, {ref.key: Rows(data[ref.key[0]]) for ref in refs})

    return keep


# ---- traffic


async def measure(scenario: Scenario) -> list[dict[str, Any]]:
    """Run all steps; the figures of each phase."""
    with tempfile.TemporaryDirectory(prefix="load-") as name:
        async with world(Path(name), scenario) as around:
            trainer = around.trainer
            traffic = asyncio.create_task(around.traffic())
            training = asyncio.create_task(trainer.train())
            watching = asyncio.create_task(watch(around, scenario))
            try:
                async with asyncio.timeout(RUN_TIMEOUT_S):
                    await asyncio.wait({traffic, watching}, return_when=asyncio.FIRST_COMPLETED)
                    if traffic.done():
                        traffic.result()
                    results = await watching
                    if scenario.to_its_end:
                        await training
            except (TimeoutError, ExceptionGroup, grpc.aio.AioRpcError) as error:
                said = around.orchestrator.output.read_text()[-4000:]
                raise RuntimeError(f"{scenario.phases[-1].name}: at step {trainer.step}: {error!r}\n{said}") from error
            finally:
                for task in (traffic, training, watching):
                    task.cancel()
                await asyncio.gather(traffic, training, watching, return_exceptions=True)
            partly = [group for group, count in trainer.trained.items() if count != SAMPLES]
            failures = [f"groups not trained once: {partly[:3]}"] if partly else []
            if scenario.to_its_end and trainer.step != scenario.steps:
                failures.append(f"{trainer.step} of {scenario.steps} steps were trained")
            return [{**figures, "failures": failures} for figures in results]


async def watch(around: World, scenario: Scenario) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    begun = 0
    for phase in scenario.phases:
        for runner in around.runners:
            runner.resize(phase.slots, phase.mean_s)
        end = begun + phase.steps
        results.append(await watch_phase(around, phase, begun + phase.steps // 10, end))
        begun = end
    return results


async def watch_phase(around: World, phase: Phase, first: int, until: int) -> dict[str, Any]:
    """Figures of the steps from `first` until `until`."""
    trainer, orchestrator = around.trainer, around.orchestrator
    await trainer.reaches(first)
    # The scrape may take its time: what it takes belongs to the phase.
    began_s, began_cpu_s, began = time.monotonic(), orchestrator.cpu_s, around.finished
    before = await orchestrator.metrics()
    memory, in_flight = [(trainer.step, orchestrator.memory_mb)], list[float]()
    end = asyncio.create_task(trainer.reaches(until))
    while not end.done():
        await asyncio.wait({end}, timeout=SAMPLE_INTERVAL_S)
        in_flight.append(sum(runner.running for runner in around.runners) * SAMPLES)
        memory.append((trainer.step, orchestrator.memory_mb))
    wall_s, cpu_s, finished = time.monotonic() - began_s, orchestrator.cpu_s - began_cpu_s, around.finished - began
    later = [point for point in memory if point[0] >= first + (until - first) / 3]
    return {
        "phase": phase.name,
        "steps": until - first,
        "in_flight_mean": sum(in_flight) / len(in_flight),
        "rollouts": finished,
        "rollouts_per_s": finished / wall_s,
        "cpu_ms_per_rollout": 1000 * cpu_s / max(1, finished),
        "cpu_share": cpu_s / wall_s,
        **lag(before, await orchestrator.metrics()),
        "memory_mb": memory[-1][1],
        "memory_mb_per_step": slope(later) if until - first >= SLOPE_STEPS else None,
        "refused": sum(runner.refused for runner in around.runners),
        "wall_s": wall_s,
    }


def lag(before: dict[str, float], after: dict[str, float]) -> dict[str, float | None]:
    """Of the event loop between two looks: the upper edge of the bucket that the 99th percentile is in."""
    name = "slipstream_event_loop_lag_seconds"
    edges = [key for key in after if key.startswith(f"{name}_bucket")]
    counts = [(float(key.split('"')[1]), after[key] - before.get(key, 0.0)) for key in edges]
    total = max((count for _, count in counts), default=0.0)
    if not total:
        return {"lag_p99_below_s": None, "lag_samples": 0.0}
    return {
        "lag_p99_below_s": min(edge for edge, count in counts if count >= 0.99 * total),
        "lag_samples": total,
        "lag_max_s": after["slipstream_event_loop_lag_max_seconds"],
    }


# ---- a large plan


async def measure_plan(rollout_tokens: int) -> dict[str, Any]:
    """Seal a plan of 4 M tokens and read its rows."""
    group_count = PLAN_TOKENS // rollout_tokens // SAMPLES
    shape = Shape(turn_tokens=rollout_tokens - PROMPT_TOKENS)
    scenario = Scenario([Phase("plan", group_count * SAMPLES, 1, 0.0)], shape, group_count)
    ours, theirs = multiprocessing.Pipe()
    reader = multiprocessing.get_context("spawn").Process(target=read_rows, args=(theirs,), daemon=True)
    reader.start()
    try:
        with tempfile.TemporaryDirectory(prefix="load-") as name:
            async with world(Path(name), scenario, spooled=True) as around, asyncio.timeout(RUN_TIMEOUT_S):
                traffic = asyncio.create_task(around.traffic())
                try:
                    return await _plan_figures(around, scenario, traffic, ours)
                finally:
                    traffic.cancel()
                    await asyncio.gather(traffic, return_exceptions=True)
    finally:
        reader.terminate()
        reader.join()


async def _plan_figures(
    around: World, scenario: Scenario, traffic: asyncio.Task[None], reader: Connection
) -> dict[str, Any]:
    trainer, wanted = around.trainer, scenario.groups_per_step * SAMPLES
    trainer.broadcaster.seal(PolicyVersion(1, 0))
    while not traffic.done():
        if around.finished >= wanted:
            break
        await asyncio.sleep(0.02)
    else:
        traffic.result()
    await asyncio.to_thread(reader.recv)  # it has imported what it needs
    began_s, began_cpu_s = time.perf_counter(), around.orchestrator.cpu_s
    answer = await trainer.plan(1)
    seal_s, seal_cpu_s = time.perf_counter() - began_s, around.orchestrator.cpu_s - began_cpu_s
    plan = answer.plan
    reader.send_bytes(plan.SerializeToString())
    read = await asyncio.to_thread(reader.recv)
    failures = [] if plan.token_count == PLAN_TOKENS else [f"the plan has {plan.token_count} tokens"]
    failures += [] if read["tokens"] == PLAN_TOKENS else [f"{read['tokens']} tokens were read"]
    return {
        "phase": f"plan of {wanted} rollouts",
        "tokens": plan.token_count,
        "plan_bytes": plan.ByteSize(),
        "seal_s": seal_s,
        "seal_cpu_s": seal_cpu_s,
        "fetch_s": read["fetch_s"],
        "rows_mb": 8 * PLAN_TOKENS / 2**20,
        "peak_growth_mb": read["peak_growth_mb"],
        "failures": failures,
    }


def read_rows(pipe: Connection) -> None:
    """A process: reads the rows of a plan as the trainer does, through a window, and lets each portion go."""
    asyncio.run(_read_rows(pipe))


async def _read_rows(pipe: Connection) -> None:
    import numpy as np

    from slipstream.trainer.fetch import RowsClient
    from slipstream.trainer.portions import PlanReader
    from slipstream.trainer.rows import RowForm
    from slipstream.trainer.torch_thread import TorchThread

    torch = TorchThread(1)
    await torch.run(int)
    client = RowsClient(lambda address: open_channel(address, Access()), 60.0)
    pipe.send("ready")
    plan = batch_pb2.Plan.FromString(await asyncio.to_thread(pipe.recv_bytes))
    form = RowForm((0, 0), np.dtype(np.uint8), 1, PLAN_TOKENS, PolicyVersion(1, 1))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before_mb, began_s, tokens = peak_mb(), time.perf_counter(), 0
    async with asyncio.TaskGroup() as group:
        async for part in PlanReader(client, torch, WINDOW_BYTES).read(plan, form, group):
            tokens += sum(len(getattr(each, "token_ids", ())) for batch in part.micro_batches for each in batch)
    fetch_s = time.perf_counter() - began_s
    pipe.send({"fetch_s": fetch_s, "tokens": tokens, "peak_growth_mb": peak_mb() - before_mb})
    await client.close()
    torch.close()


def peak_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


# ---- all of it

COLUMNS = {
    "phase": 30,
    "in_flight_mean": 15,
    "rollouts_per_s": 15,
    "cpu_ms_per_rollout": 19,
    "cpu_share": 10,
    "lag_p99_below_s": 16,
    "memory_mb_per_step": 19,
}
PLAN_COLUMNS = {
    "phase": 30,
    "tokens": 15,
    "seal_s": 15,
    "seal_cpu_s": 19,
    "fetch_s": 10,
    "rows_mb": 16,
    "peak_growth_mb": 19,
}


def show(columns: dict[str, int], results: Sequence[dict[str, Any]]) -> None:
    print("".join(f"{name:<{width}}" if name == "phase" else f"{name:>{width}}" for name, width in columns.items()))
    for result in results:
        for name, width in columns.items():
            value = result[name]
            text = "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
            print(f"{text:<{width}}" if name == "phase" else f"{text:>{width}}", end="")
        print()


FEW, MANY = Phase("250 in flight", 256, 16, 0.2), Phase("2,000 in flight", 2016, 26, 1.0)
BRIEF = [Scenario([FEW, MANY], to_its_end=True)]
FULL = [
    *BRIEF,
    Scenario([Phase("single turn, 200/s offered", 2016, 50, 10.0)]),
    Scenario([Phase("five turns, 40/s offered", 2016, 40, 50.0)], Shape(turns=5), groups_per_step=4),
    Scenario([Phase("five turns, 2,000/s offered", 2016, 100, 1.0)], Shape(turns=5)),
    Scenario([Phase("2,000 steps", 2016, 2000, 1.0)], groups_per_step=8, to_its_end=True),
]


async def run(*, full: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    load: list[dict[str, Any]] = []
    for scenario in FULL if full else BRIEF:
        load += await measure(scenario)
        print(f"orchestrator: {load[-1]['phase']}: {load[-1]['wall_s']:.0f} s", file=sys.stderr, flush=True)
    return load, [await measure_plan(tokens) for tokens in ((4096, 512) if full else (4096,))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--full", action="store_true", help="all scenarios, minutes; the default fits into CI")
    parser.add_argument("--out", type=Path, help="JSON lines to append the figures to")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # leave nothing running
    began_s = time.monotonic()
    load, plans = asyncio.run(run(full=arguments.full))
    show(COLUMNS, load)
    show(PLAN_COLUMNS, plans)
    if arguments.out is not None:
        with arguments.out.open("a") as out:
            out.writelines(json.dumps(result) + "\n" for result in (*load, *plans))
    failures = [f"{result['phase']}: {failure}" for result in (*load, *plans) for failure in result["failures"]]
    ratio = load[1]["cpu_ms_per_rollout"] / load[0]["cpu_ms_per_rollout"]
    if ratio > ALLOWED_COST_RATIO:
        failures.append(f"a rollout costs {ratio:.1f} times as much with 2,000 in flight as with 250")
    said = "; ".join(failures) or f"a rollout costs {ratio:.2f} times as much with 2,000 in flight as with 250"
    print(f"orchestrator: {time.monotonic() - began_s:.0f} s; {said}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
