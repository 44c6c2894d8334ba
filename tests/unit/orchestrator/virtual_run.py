"""A run on a virtual clock: the real sequencer and staleness machine; runner and trainer only take time."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slipstream.algorithms.staleness import Phase
from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.version import PolicyVersion
from slipstream.orchestrator.config import EnvironmentConfig, OrchestratorConfig, WorkerConfig
from slipstream.orchestrator.journal import Journal, read_journal
from slipstream.orchestrator.leases import RunnerLeases
from slipstream.orchestrator.metrics import MetricsFile
from slipstream.orchestrator.run_state import RunPhase, RunState
from slipstream.orchestrator.sequencer import Sequencer

TOKENS = 60
TICK_S = 1.0
UPDATE_S = 0.5
"""From a trained step to its version being served, in seconds."""


class VirtualRun:
    """`duration_s[environment]` says how long a group takes; infinite: until its deadline."""

    def __init__(
        self,
        directory: Path,
        duration_s: Mapping[str, float],
        *,
        step_s: float,
        max_running: int = 64,
        environment: Mapping[str, Mapping[str, Any]] | None = None,
        **fields: Any,
    ) -> None:
        self.now = 0.0
        self.duration_s = dict(duration_s)
        self.fails: Callable[[str], str] = lambda name: ""
        """The reason that groups of an environment fail with now, or nothing."""
        self.step_s = step_s
        self.max_running = max_running
        options: Mapping[str, Mapping[str, Any]] = environment or {}
        config = OrchestratorConfig(
            run_id="virtual",
            run_dir=directory,
            samples_per_group=2,
            environments=[EnvironmentConfig(name=name, **options.get(name, {})) for name in duration_s],
            workers=[WorkerConfig(replica="decode-1", role="decode", address="nowhere:1")],
            broadcaster="nowhere:2",
            runner_lease_ttl_s=1e6,
            **fields,
        )
        self.journal = Journal(directory / "journal.jsonl")
        self.metrics = MetricsFile(directory / "metrics.jsonl", lambda: self.now)
        self.state = RunState("virtual", config.total_steps, self.metrics)
        self.leases = RunnerLeases(config.runner_lease_ttl_s, lambda: self.now)
        self.sequencer = Sequencer(
            config,
            state=self.state,
            journal=self.journal,
            metrics=self.metrics,
            leases=self.leases,
            release_rows=lambda refs: None,
            clock=lambda: self.now,
        )
        self.trained: Counter[str] = Counter()
        self.attempts: dict[str, list[int]] = defaultdict(list)
        """Attempts of each group, by its name."""
        self.environment_of: dict[str, str] = {}
        self.running: dict[tuple[str, int], runner_pb2.GroupAssignment] = {}
        self.most_running: Counter[str] = Counter()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self.served: list[tuple[float, int]] = [(0.0, 0)]
        """Since when each step was."""
        self._training = False
        self.sequencer.serving_advanced(PolicyVersion(1, 0))
        self.state.enter(RunPhase.TRAINING)
        self._after(0.0, self._tick)

    def run(self, until_s: float = 1e9) -> None:
        """Let it go on until all steps are trained, or until this time."""
        config = self.sequencer.config
        while self.sequencer.machine.trained_step < config.total_steps and not self.state.ended:
            at, _, event = heapq.heappop(self._events)
            if at > until_s:
                heapq.heappush(self._events, (at, next(self._number), event))
                return
            self.now = at
            event()
            self._acquire()
            self._train()

    def close(self) -> None:
        self.journal.close()
        self.metrics.close()

    def ends(self) -> dict[str, list[str]]:
        """How the groups of each environment ended that did not go into a step, by the journal."""
        found: dict[str, list[str]] = defaultdict(list)
        for record in read_journal(self.journal.path).records:
            if record["kind"] == "ended":
                environment = self.sequencer.tasks.environment_of(record["position"])
                found[environment].append(record["outcome"])
        return found

    def open(self, environment: str) -> int:
        return sum(g.environment == environment and g.phase is not Phase.SEALED for g in self.sequencer.machine)

    def _after(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._number), event))

    def _tick(self) -> None:
        runner = self.leases.renew("runner-1", "1")
        for key in list(runner.cancellations):
            self.running.pop(key, None)
        self.leases.acknowledge(runner, list(runner.cancellations))
        self.sequencer.expire()
        self._after(TICK_S, self._tick)

    def _acquire(self) -> None:
        runner = self.leases.renew("runner-1", "1")
        for assignment in self.sequencer.acquire(runner, max(0, self.max_running - len(self.running))):
            key = (assignment.group_id, assignment.attempt)
            self.running[key] = assignment
            self.attempts[assignment.group_id].append(assignment.attempt)
            self.environment_of[assignment.group_id] = assignment.environment
            takes_s = min(self.duration_s[assignment.environment], assignment.deadline_ms / 1000)
            self._after(takes_s, lambda key=key, begun_s=self.now: self._finish(key, begun_s))
        for name in self.duration_s:
            running = sum(a.environment == name for a in self.running.values())
            self.most_running[name] = max(self.most_running[name], running)

    def _finish(self, key: tuple[str, int], begun_s: float) -> None:
        assignment = self.running.pop(key, None)
        if assignment is None:
            return  # cancelled
        runner = self.leases.renew("runner-1", "1")
        reason = self.fails(assignment.environment)
        if not reason and self.duration_s[assignment.environment] > assignment.deadline_ms / 1000:
            reason = "DEADLINE_EXCEEDED"
        report = runner_pb2.GroupReport(
            group=runner_pb2.GroupAttempt(group_id=key[0], attempt=key[1]),
            outcome=runner_pb2.GROUP_OUTCOME_FAILED if reason else runner_pb2.GROUP_OUTCOME_FINISHED,
            reason=reason,
            detail=f"{reason}: it says why" if reason else "",
        )
        if not reason:
            spans = self._spans(begun_s)
            report.rollouts.extend(self._record(key, index, spans) for index in range(assignment.sample_count))
        self.sequencer.report(runner, [report])

    def _spans(self, begun_s: float) -> list[types_pb2.VersionSpan]:
        """Tokens come evenly over a rollout's life, each from the weights then served."""
        steps = Counter[int]()
        for index in range(TOKENS):
            at = begun_s + (self.now - begun_s) * index / TOKENS
            steps[max(step for since_s, step in self.served if since_s <= at)] += 1
        return [
            types_pb2.VersionSpan(token_count=count, version=PolicyVersion(1, step).to_proto())
            for step, count in sorted(steps.items())
        ]

    def _record(self, key: tuple[str, int], index: int, spans: list[types_pb2.VersionSpan]) -> runner_pb2.RolloutRecord:
        name = f"{key[0]}.{key[1]}.{index}"
        return runner_pb2.RolloutRecord(
            rollout_id=name,
            sample_index=index,
            reward=float(index),
            prompt_token_count=4,
            token_count=4 + TOKENS,
            loss_ranges=[types_pb2.RowRange(start=4, end=4 + TOKENS)],
            spans=spans,
            token_ids=types_pb2.RowsRef(holder="runner", key=f"{name}/t", dtype="int32"),
            logprobs=types_pb2.RowsRef(holder="runner", key=f"{name}/l", dtype="float32"),
        )

    def _train(self) -> None:
        step = self.sequencer.machine.trained_step + 1
        if self._training or step > self.sequencer.config.total_steps:
            return
        self.sequencer.want(step)
        if step in self.sequencer.plans:
            self._training = True
            self._after(self.step_s, lambda: self._trained(step))

    def _trained(self, step: int) -> None:
        self._training = False
        for group in self.sequencer.trained(PolicyVersion(1, step), {}, self.step_s):
            self.trained[group.environment] += 1

        def served() -> None:
            self.served.append((self.now, step))
            self.sequencer.serving_advanced(PolicyVersion(1, step))

        self._after(UPDATE_S, served)
