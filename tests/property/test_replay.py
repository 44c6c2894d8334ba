"""A process that is killed at any moment leaves a journal from which another one goes on as if nothing had been."""

from __future__ import annotations

import asyncio
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.algorithms.staleness import Phase
from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.errors import JournalCorrupt
from slipstream.common.version import PolicyVersion
from slipstream.environments.config_base import CurriculumConfig
from slipstream.orchestrator.config import EnvironmentConfig, OrchestratorConfig, WorkerConfig
from slipstream.orchestrator.journal import Journal
from slipstream.orchestrator.journal_check import check_records
from slipstream.orchestrator.leases import RunnerLeases
from slipstream.orchestrator.metrics import MetricsFile
from slipstream.orchestrator.replay import replay
from slipstream.orchestrator.run_state import RunPhase, RunState
from slipstream.orchestrator.sequencer import Sequencer, task_sequence
from slipstream.orchestrator.summary import Summarizer, summary_of


def config_of(directory: Path, **fields: Any) -> OrchestratorConfig:
    return OrchestratorConfig(
        run_id="run",
        run_dir=directory,
        replica="orchestrator",
        environments=[
            EnvironmentConfig(name="words", weight=3, age_out=fields.pop("age_out")),
            EnvironmentConfig(name="numbers", weight=1, curriculum=CurriculumConfig(enabled=True, parts=3)),
        ],
        workers=[WorkerConfig(replica="decode-1", role="decode", address="127.0.0.1:1")],
        broadcaster="127.0.0.1:2",
        samples_per_group=2,
        **fields,
    )


class Life:
    """A run whose orchestrator is killed now and then, its runner and its trainer, too."""

    def __init__(self, config: OrchestratorConfig, seed: int, journal_limit_bytes: int, runner: asyncio.Runner) -> None:
        self.config = config
        self.journal_limit_bytes = journal_limit_bytes
        self.wait_for = runner.run
        self.random = random.Random(seed)
        self.now = 0.0
        self.incarnation = 1
        self.checkpoint = 0
        self.taken: dict[tuple[str, int], runner_pb2.GroupAssignment] = {}
        """What the runner has, finished or not."""
        self.trainer_step = 0
        self.tasks: dict[int, int] = {}
        self.start()

    def start(self) -> None:
        config = self.config
        self.journal = Journal(config.run_dir / "journal" / "journal.jsonl", self.journal_limit_bytes)
        self.metrics = MetricsFile(config.run_dir / "metrics.jsonl", lambda: self.now)
        self.state = RunState(config.run_id, config.total_steps, self.metrics)
        self.state.enter(RunPhase.TRAINING)
        self.leases = RunnerLeases(10.0, lambda: self.now)
        self.sequencer = Sequencer(
            config,
            state=self.state,
            journal=self.journal,
            metrics=self.metrics,
            leases=self.leases,
            release_rows=lambda refs: None,
            clock=lambda: self.now,
        )
        records = self.journal.take_recovered()
        environment_of = task_sequence(config).environment_of
        history = replay(records, environment_of) if records else None
        self.journal.summarizer = Summarizer(environment_of, history)
        self.journal.frontier = self.sequencer.frontier
        bound = None if config.environments[0].age_out == "mask" else config.max_off_policy_steps
        facts = {"run_id": config.run_id, "seed": config.seed, "max_off_policy_steps": bound}
        self.journal.append("resumed" if records else "run", **facts)
        if history is not None:
            self.sequencer.resume(history)
        self.serve(self.trainer_step)
        self.runner = self.leases.renew("runner-1", "1")

    def kill(self) -> None:
        """Kill the orchestrator: what is in the journal is what the next one knows."""
        before = self.sequencer
        self.journal.close()
        self.metrics.close()
        records = Journal(self.journal.path).take_recovered()
        check_records(records)
        history = replay(records, task_sequence(self.config).environment_of)
        machine = before.machine
        known = {group.position: group for group in machine} | {
            # Whoever waits is parked once more if its environment still is.
            group.position: replace(group, phase=Phase.WAITING if group.attempt else Phase.PARKED)
            for group in machine.parked
        }
        beyond = set(range(history.next_position, machine.next_position))
        assert all(known.pop(position).attempt == 0 for position in beyond), "passed by, and not yet of any record"
        assert known == history.groups
        assert (machine.serving_step, machine.sealed_step, machine.trained_step) == (
            history.serving.step,
            history.sealed_step,
            history.trained_step,
        )
        assert machine.outcomes == history.outcomes
        assert before.plans.keys() == history.sealed.keys()
        for step, plan in before.plans.items():
            again = history.plan(step)
            assert (again.plans, again.attempts, again.figures) == (plan.plans, plan.attempts, plan.figures)
            assert sorted(ref.key for ref in again.rows) == sorted(ref.key for ref in plan.rows)
        assert (before.incarnation, before.lineage_step, before.released_step) == (
            history.incarnation,
            history.lineage_step,
            history.released_step,
        )
        self.start()
        assert self.sequencer.curriculum.rates == before.curriculum.rates
        assert set(self.sequencer.plans) == set(before.plans)
        self.take_up()

    def take_up(self) -> None:
        """The runner names what it has, unless it was killed as well; it reports again what had ended."""
        if self.random.random() < 0.3:
            self.now += 20.0
            self.sequencer.expire()
            self.taken.clear()
            self.runner = self.leases.renew("runner-1", "2")
            return
        self.leases.claim(self.runner, list(self.taken))
        self.sequencer.lose(self.leases.unclaimed(self.runner))

    # ---- what others do

    def serve(self, step: int) -> None:
        if step <= self.sequencer.machine.sealed_step:
            self.sequencer.serving_advanced(PolicyVersion(self.incarnation, step))

    def acquire(self) -> None:
        for assignment in self.sequencer.acquire(self.runner, self.random.randint(1, 4)):
            key = (assignment.group_id, assignment.attempt)
            assert key not in self.taken, "two attempts of one name"
            self.taken[key] = assignment
            known = self.tasks.setdefault(assignment.position, assignment.task_index)
            assert known == assignment.task_index, "another task at the same position"

    def report(self) -> None:
        if not self.taken:
            return
        key = self.random.choice(sorted(self.taken))
        assignment = self.taken[key]
        group = runner_pb2.GroupAttempt(group_id=key[0], attempt=key[1])
        report = runner_pb2.GroupReport(
            group=group, outcome=runner_pb2.GROUP_OUTCOME_FAILED, reason="ENVIRONMENT_ERROR"
        )
        if self.random.random() < 0.9:
            spread = self.random.random() < 0.8
            report = runner_pb2.GroupReport(group=group, outcome=runner_pb2.GROUP_OUTCOME_FINISHED)
            report.rollouts.extend(record(assignment, index, float(index if spread else 1)) for index in range(2))
        self.sequencer.report(self.runner, [report])

    def train(self) -> None:
        step = self.trainer_step + 1
        self.sequencer.want(step)
        if step in self.sequencer.plans:
            self.trainer_step = step
            self.sequencer.trained(PolicyVersion(self.incarnation, step), {}, 1.0, skipped=self.random.random() < 0.1)
            if self.random.random() < 0.4:
                self.checkpoint = step
            self.sequencer.checkpointed(self.checkpoint)
            if self.random.random() < 0.6:
                self.serve(step)

    def restore(self) -> None:
        """Kill the trainer: another one goes on from the checkpoint, as the next incarnation.

        It reports that step under its own name, unless another of its ranks asks for a plan before.
        """
        self.incarnation += 1
        self.trainer_step = self.checkpoint
        version = PolicyVersion(self.incarnation, self.checkpoint)
        if self.random.random() < 0.7:
            self.sequencer.trained(version, {}, 1.0)
        self.sequencer.restored(self.incarnation, self.checkpoint)
        self.sequencer.trained(version, {}, 1.0)
        self.sequencer.checkpointed(self.checkpoint)

    def die_unheard(self) -> None:
        """The trainer takes a step, or two, and is killed when there is a checkpoint of it, before it can report."""
        for _ in range(self.random.randint(1, 2)):
            self.sequencer.want(self.trainer_step + 1)
            if self.trainer_step + 1 in self.sequencer.plans:
                self.trainer_step += 1
                self.checkpoint = self.trainer_step
        self.restore()

    def event(self, kind: int) -> None:
        self.now += 0.1
        if self.random.random() < 0.5:
            self.wait_for(self.journal.sync())
        match kind:
            case 0 | 1 | 2:
                self.acquire()
            case 3 | 4 | 5 | 6:
                self.report()
            case 7 | 8:
                self.train()
            case 9 | 10:
                self.kill()
            case 11:
                self.restore()
            case 12:
                self.serve(self.trainer_step)
            case 13:
                self.die_unheard()

    def to_the_end(self) -> None:
        machine = self.sequencer.machine
        for _ in range(4000):
            machine = self.sequencer.machine
            if machine.complete and self.trainer_step >= machine.last_step:
                break
            self.acquire()
            self.report()
            self.train()
            self.serve(self.trainer_step)
        assert machine.complete
        assert self.trainer_step == machine.last_step
        assert machine.open_groups == 0


def record(group: runner_pb2.GroupAssignment, index: int, reward: float) -> runner_pb2.RolloutRecord:
    name = f"{group.group_id}.{group.attempt}.{index}"
    return runner_pb2.RolloutRecord(
        rollout_id=name,
        sample_index=index,
        reward=reward,
        correct=reward > 0,
        prompt_token_count=3,
        token_count=8,
        loss_ranges=[types_pb2.RowRange(start=3, end=8)],
        spans=[types_pb2.VersionSpan(token_count=5, version=group.dispatch_version)],
        token_ids=types_pb2.RowsRef(holder="runner", key=f"{name}/t", dtype="int32"),
        logprobs=types_pb2.RowsRef(holder="runner", key=f"{name}/l", dtype="float32"),
    )


@st.composite
def settings_of_a_run(draw: st.DrawFn) -> dict[str, Any]:
    groups, steps = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    return {
        "groups_per_step": groups,
        "total_steps": steps,
        "max_off_policy_steps": draw(st.integers(0, 2)),
        "over_sampling": draw(st.sampled_from([1.0, 1.0, 2.0])),
        "age_out": draw(st.sampled_from(["regenerate", "hold", "mask"])),
        "total_positions": draw(st.sampled_from([None, None, groups * steps, max(1, groups * steps - 1)])),
    }


@settings(max_examples=60, deadline=None)
@given(
    settings_of_a_run(),
    st.integers(0, 2**32),
    st.lists(st.integers(0, 13), min_size=20, max_size=120),
    st.sampled_from([0, 2 << 10, 4 << 10, 16 << 10]),
)
def test_a_run_that_is_killed_anywhere_goes_on_and_keeps_one_outcome_a_position(
    fields: dict[str, Any], seed: int, events: list[int], journal_limit_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as directory, asyncio.Runner() as runner:
        life = Life(config_of(Path(directory), **fields), seed, journal_limit_bytes, runner)
        for kind in events:
            life.event(kind)
        life.to_the_end()
        life.kill()
        life.journal.close()
        checked = check_records(Journal(life.journal.path).take_recovered())
        assert checked.trained_step == checked.sealed_step
        assert checked.frontier == checked.reached


@settings(max_examples=40, deadline=None)
@given(settings_of_a_run(), st.integers(0, 2**32), st.lists(st.integers(0, 13), min_size=20, max_size=120))
def test_the_segments_that_are_left_say_what_all_of_them_say(
    fields: dict[str, Any], seed: int, events: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as directory, asyncio.Runner() as runner:
        config = config_of(Path(directory), **fields)
        life = Life(config, seed, 4 << 10, runner)
        life.journal.frontier = lambda: -1  # nothing goes
        for kind in events:
            life.event(kind)
            life.journal.frontier = lambda: -1
        life.journal.close()
        records = Journal(life.journal.path).take_recovered()
        assert records[0]["n"] == 0
        environment_of = task_sequence(config).environment_of
        whole, whole_checked = replay(records, environment_of), check_records(records)
        for index, record in enumerate(records):
            if record["kind"] != "summary":
                continue
            before = replay(records[:index], environment_of)
            assert {**record, **summary_of(before)} == record
            left = records[index:]
            gone = whole.sealed.keys() - sealed_in(left)
            if gone:
                if max(gone) > whole.released_step:
                    with pytest.raises(JournalCorrupt, match="its plan is gone"):
                        replay(left, environment_of)
                continue
            assert summary_of(replay(left, environment_of)) == summary_of(whole)
            assert replay(left, environment_of).sealed == whole.sealed
            checked = check_records(left)
            assert (checked.frontier, checked.reached) == (whole_checked.frontier, whole_checked.reached)
            assert (checked.running, checked.trained_step) == (whole_checked.running, whole_checked.trained_step)


def sealed_in(records: list[dict[str, Any]]) -> set[int]:
    return {record["step"] for record in records if record["kind"] == "sealed"}
