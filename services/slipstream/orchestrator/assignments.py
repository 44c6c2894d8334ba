"""What a runner is told about a group: task, sampling, dispatch version and salt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from slipstream.algorithms.staleness import Group
from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.version import PolicyVersion
from slipstream.orchestrator.config import SESSION, EnvironmentConfig
from slipstream.orchestrator.evaluation_config import EvaluationConfig
from slipstream.orchestrator.external import ExternalGroup
from slipstream.orchestrator.sessions import SessionGroup
from slipstream.orchestrator.tasks import Task, TaskSequence, group_id_of

TRAINING = runner_pb2.GROUP_PURPOSE_TRAINING
EVALUATION = runner_pb2.GROUP_PURPOSE_EVALUATION
EXTERNAL = runner_pb2.GROUP_PURPOSE_EXTERNAL


class Assigner:
    """Makes assignments. No state."""

    def __init__(
        self,
        run_id: str,
        kv_dtype: str,
        tasks: TaskSequence,
        environments: Mapping[str, EnvironmentConfig],
        samples_per_group: int,
    ) -> None:
        self._run_id = run_id
        self._kv_dtype = kv_dtype
        self._tasks = tasks
        self._environments = environments
        self._samples_per_group = samples_per_group

    def training(
        self, group: Group, version: PolicyVersion, task_index: int | None = None
    ) -> runner_pb2.GroupAssignment:
        """Assign the current attempt of a position; `task_index`: of another task than the sequence's."""
        task = self._tasks.task(group.position)
        if task_index is not None:
            task = replace(task, index=task_index)
        assignment = self._assignment(group_id_of(group.position), group.attempt, task, version)
        assignment.purpose = TRAINING
        assignment.position = group.position
        assignment.sample_count = self._samples_per_group
        spare = self._environments[assignment.environment].spare_samples
        if spare:
            assignment.needed_count = assignment.sample_count
            assignment.sample_count += spare
        return assignment

    def sessions(self, group: Group, members: SessionGroup, version: PolicyVersion) -> runner_pb2.GroupAssignment:
        """Assign the current attempt of a position to sessions. Of its environment's they have the sampling alone."""
        assignment = self.training(group, version)
        assignment.environment = SESSION
        assignment.sample_count, assignment.needed_count = members.size, 0
        assignment.deadline_ms = members.total_timeout_ms
        assignment.session_group.name = members.name
        assignment.session_group.idle_timeout_ms = members.idle_timeout_ms
        asked, sampling = members.request.sampling, assignment.sampling
        if members.request.HasField("sampling"):
            sampling.temperature = asked.temperature
            sampling.max_new_tokens = asked.max_new_tokens
            sampling.seed = asked.seed or sampling.seed
            if asked.stop_token_ids:
                sampling.stop_token_ids[:] = asked.stop_token_ids
        return assignment

    def evaluation(
        self, group_id: str, attempt: int, task: Task, version: PolicyVersion, config: EvaluationConfig
    ) -> runner_pb2.GroupAssignment:
        """Assign the samples of a held-out task."""
        assignment = self._assignment(group_id, attempt, task, version)
        assignment.purpose = EVALUATION
        assignment.sample_count = config.samples
        assignment.sampling.temperature = config.temperature_for(assignment.sampling.temperature)
        return assignment

    def external(self, group: ExternalGroup, version: PolicyVersion) -> runner_pb2.GroupAssignment:
        """Assign what a third party asked for."""
        request = group.request
        name = request.task.environment or next(iter(self._environments))
        task = Task(name, request.task.split or "train", request.task.index)
        assignment = self._assignment(group.rollout.group_id, group.attempts, task, version)
        assignment.purpose = EXTERNAL
        assignment.sample_count = request.sample_count
        if request.HasField("prompt"):
            assignment.environment = ""
            assignment.prompt = request.prompt
        if request.HasField("sampling"):
            assignment.sampling.CopyFrom(request.sampling)
        assignment.include_tokens = request.include_tokens
        return assignment

    def _assignment(
        self, group_id: str, attempt: int, task: Task, version: PolicyVersion
    ) -> runner_pb2.GroupAssignment:
        environment = self._environments[task.environment]
        return runner_pb2.GroupAssignment(
            group_id=group_id,
            position=-1,
            attempt=attempt,
            environment=task.environment,
            split=task.split,
            task_index=task.index,
            sampling=types_pb2.Sampling(
                temperature=environment.temperature,
                max_new_tokens=environment.max_new_tokens,
                stop_token_ids=environment.stop_token_ids,
                seed=self._tasks.sampling_seed(group_id, attempt),
            ),
            dispatch_version=version.to_proto(),
            # The salt invariant: a rollout never reads KV of weights older than those it was dispatched at.
            salt=f"{self._run_id}/{version.incarnation}/{version.step}/{self._kv_dtype}",
            deadline_ms=int(environment.deadline_s * 1000),
        )
