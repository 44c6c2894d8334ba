"""Evaluates a model directory: starts the engines and what they take, no trainer, asks, and ends all of it.

A run directory of its own has the logs, the rollouts and the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.algorithms.evaluation import Answer
from slipstream.api.run.v1 import run_pb2
from slipstream.common.channel import open_channel
from slipstream.common.config import ServiceConfig, dump_toml
from slipstream.launcher import child, progress
from slipstream.launcher.cards import variables_of
from slipstream.launcher.config import RunConfig
from slipstream.launcher.errors import RunDirError, RunFailedError
from slipstream.launcher.evaluate_results import EnvironmentAnswers
from slipstream.launcher.mooncake import mooncake_specs
from slipstream.launcher.needs import check_memory
from slipstream.launcher.ports import LOOPBACK, PortLease, assign_endpoints, take_ports
from slipstream.launcher.records import Record, read_run
from slipstream.launcher.resolve import rendezvous_of, replicas_of, resolve
from slipstream.launcher.rl import supervisor_of
from slipstream.launcher.rollout_files import samples_of, spans_of
from slipstream.launcher.rundir import RunDir, RunLock, create_run_dir, shown
from slipstream.launcher.services import access_to, service_command, service_of, service_specs, write_configs
from slipstream.launcher.session import Ending, conduct
from slipstream.launcher.valkey import socket_path, valkey_spec
from slipstream.orchestrator.evaluation import WRONG
from slipstream.orchestrator.evaluation_config import EvaluationConfig
from slipstream.trainer.model_dir import prepare_model_dir

LEFT_OUT = ("trainer", "gateway", "teacher")
PUBLISHER = "trainer"
"""Whose section says how the weights are read and published; no such service is started."""
TOLD_EVERY_S = 5.0
KILL_AFTER_S = 5.0


@dataclass(frozen=True)
class Request:
    """What is asked of a model directory."""

    config: RunConfig
    """Whose `trainer.initial_model` it is."""
    counts: Mapping[str, int]
    """Held-out problems by environment; 0 asks none."""
    evaluation: EvaluationConfig
    seed: int
    """Of the sampling; tasks are those of the configuration's own seed."""


def evaluate_checkpoint(request: Request, say: Callable[[str], None]) -> tuple[RunDir, Ending]:
    """Run it from start to end; nothing is left running. The run directory has the records."""
    check_memory(request.config)
    run = create_run_dir(request.config.run.directory, request.config.run.name)
    lock, lease = RunLock(run), PortLease()
    try:
        with socket_path(run) as socket:
            ending = asyncio.run(_evaluate(request, run, socket, lease, say))
    finally:
        lease.close()
        lock.release()
    run.record("run_ended", exit_code=ending.exit_code, reason=ending.sentence, stopped=ending.stopped)
    return run, ending


async def _evaluate(
    request: Request, run: RunDir, socket: Path, lease: PortLease, say: Callable[[str], None]
) -> Ending:
    config = request.config
    try:
        names = [name for name in replicas_of(config) if service_of(name) not in LEFT_OUT]
        endpoints, _ = assign_endpoints(run.endpoints_file, names, lease)
        rendezvous = take_ports(rendezvous_of(config), lease)
        nowhere = {PUBLISHER: f"{LOOPBACK}:1"}
        configs = resolve(config, run, endpoints | nowhere, redis_url=f"unix://{socket}", rendezvous=rendezvous)
        configs["orchestrator"] = _asking(configs["orchestrator"], request)
        write_configs(run, configs)  # first: who finds a run by its config.toml sees that this is an evaluation
        run.config_file.write_text(dump_toml(config))
        publisher: Any = configs.pop(PUBLISHER)
        prepare_model_dir(publisher)
    except OSError as error:
        raise RunDirError(f"{run.path} cannot be written: {error.strerror}") from None
    run.record("run_started", argv=sys.argv[1:])
    access = access_to(run)
    stores = [valkey_spec(run, socket), *mooncake_specs(config, run)]
    stages = [stores, service_specs(config, run, endpoints, access, configs)]
    say(f"starting {sum(map(len, stages))} processes in {shown(run.path)}")
    told_s = time.monotonic()

    def on_run(now: run_pb2.Run) -> None:
        nonlocal told_s
        run.write_waiting()
        if now.phase == "evaluating_before" and time.monotonic() - told_s > TOLD_EVERY_S:
            told_s = time.monotonic()
            say(f"{100 * now.phase_fraction_done:.0f} % of the problems are answered")

    async def work() -> None:
        say("publishing the weights")
        await _publish(config, run)
        say("asking")
        async with open_channel(endpoints["orchestrator"], access) as channel:
            await progress.watch_run(channel, on_run)

    def on_waiting(replicas: list[str]) -> None:
        say(f"waiting for {', '.join(replicas)}; log: {shown(run.log_file(replicas[0]))}")

    return await conduct(
        supervisor_of(config, run),
        stages,
        work,
        on_stopping=lambda: say("stopping all services"),
        on_waiting=on_waiting,
    )


def _asking(orchestrator: ServiceConfig, request: Request) -> ServiceConfig:
    """The same orchestrator, which asks held-out problems once and trains nothing."""
    environments: Any = getattr(orchestrator, "environments", [])
    counted = [e.model_copy(update={"evaluation_task_count": request.counts.get(e.name, 0)}) for e in environments]
    update = {
        "evaluate_only": True,
        "evaluation": request.evaluation,
        "environments": counted,
        "seed": request.seed,
        "tracking": [],
    }
    return orchestrator.model_copy(update=update)


async def _publish(config: RunConfig, run: RunDir) -> None:
    """Read and publish the weights, in a process that ends with it. Raises `RunFailedError`."""
    cards = variables_of(config, PUBLISHER)
    command = child.guarded(service_command("slipstream.trainer.publish_once", run, PUBLISHER, cards))
    with run.output_file(PUBLISHER).open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
        )
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_AFTER_S):
                    await process.wait()
            raise
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if code:
        printed = run.output_file(PUBLISHER).read_text(errors="replace").strip().splitlines()
        last = printed[-1].removeprefix("error: ") if printed else f"exit code {code}"
        raise RunFailedError(f"the weights were not published: {last}; see {shown(run.output_file(PUBLISHER))}")


def answers_of(run: RunDir, counts: Mapping[str, int], samples: int) -> dict[str, EnvironmentAnswers]:
    """What the records of an evaluation say, environment by environment, problems in order."""
    records = read_run(run)
    told = {str(each["environment"]): each for each in records.of_kind("evaluation")}
    answers: dict[str, EnvironmentAnswers] = {}
    for name, count in counts.items():
        if not count:
            continue
        found = EnvironmentAnswers()
        problems = _problems([each for each in records.evaluations if each.get("environment") == name])
        for _, rollouts in sorted(problems.items()):
            found.problems.append([_answer(rollout) for rollout in rollouts])
            found.versions |= {str(version) for rollout in rollouts for _, version in spans_of(rollout)}
        answered = int(told.get(name, {}).get("count", len(problems)))
        found.failed = max(answered - len(problems), 0)
        found.problems += [[WRONG] * samples] * found.failed
        found.unanswered = count - len(found.problems)
        answers[name] = found
    return answers


def _problems(rollouts: list[Record]) -> dict[int, list[Record]]:
    """Samples by problem, in order; of a problem that was asked again the last attempt."""
    attempts: dict[int, dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for rollout in rollouts:
        attempts[int(rollout["task_index"])][int(rollout["attempt"])].append(rollout)
    return {
        index: sorted(tried[max(tried)], key=lambda rollout: int(rollout["sample"]))
        for index, tried in attempts.items()
    }


def _answer(rollout: Record) -> Answer:
    return Answer(
        correct=bool(rollout["correct"]),
        reward=float(rollout["reward"]),
        token_count=sum(count for count, _ in spans_of(rollout)),
        truncated="cut" in rollout or samples_of(rollout)[-1]["finish_reason"] == "length",
        roles={str(each["role"]): (float(each["reward"]), bool(each["correct"])) for each in rollout.get("roles", ())},
    )
