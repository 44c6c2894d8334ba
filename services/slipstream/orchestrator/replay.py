"""From the records of a journal to where its run stood when they end. Pure: no clock, no I/O.

| record | says |
|---|---|
| run, resumed | a process began: the first of the run, another one |
| serving | groups are dispatched at this version from now on |
| acquired | a runner has this attempt, dispatched at this version; of this task, where a curriculum chose it |
| reported | the attempt is ready to be trained; the success rate that its part of the tasks has by it |
| reopened | a new process of the orchestrator waits for that report once more |
| lost | its runner is gone, or gave it back: the position waits for another attempt |
| regenerated | it grew too old: the position waits for another attempt |
| ended | the position has come to an end without being trained |
| sealed | these positions are the step's, with its plans, one a data rank, and the figures of its record |
| trained, skipped | the step was taken, and its positions have ended; with the totals of the run so far |
| restored | a trainer that was restored after this step takes over as this incarnation |
| retrained | it has taken this step once more |
| checkpoint | the newest checkpoint is of this step |
| evaluating, evaluated | an evaluation began, and what it found |
| backed_off, healed | an environment that only fails is tried now and then; it ended well again |
| external | what a third party's group came to: asked for, taken, waiting again, ended |
| paused, unpaused | a client holds the run, or lets it go on |
| session | a session of an outside agent was opened, was closed, or has ended |
| run_ended | the run is over |
| summary | all of that, at the head of a segment: where it is the first record left, it stands for those before |

Numbers of attempts go on where they stopped, whatever became of the one before: no two share a name.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from slipstream.algorithms.staleness import Group, Outcome, Phase
from slipstream.api.training.v1 import batch_pb2
from slipstream.common.errors import JournalCorrupt
from slipstream.common.version import UNSET, PolicyVersion
from slipstream.orchestrator.packed import unpack
from slipstream.orchestrator.run_state import AccuracyResult
from slipstream.orchestrator.sealer import SealedPlan, references
from slipstream.orchestrator.session_history import KeptSession, session_of
from slipstream.orchestrator.tasks import group_id_of

Record = Mapping[str, Any]

KEPT_SESSIONS = 1000
"""That have ended, and are still shown after a restart."""
KEPT_STEPS = 2
"""Plans of covered steps that are kept for a repeat of GetPlan, which is possible only shortly after."""

KEPT_DURATIONS = 128
KEPT_STEP_TIMES = 16
KEPT_EXTERNAL = 1000
KEPT_EXTERNAL_BYTES = 8 << 20
"""Of third parties' groups that have ended, packed: older ones are not known after a restart."""

SUMMED_UP = (
    *("run_id", "seed", "bound", "ended", "reason", "paused", "incarnation", "lineage_step", "sealed_step"),
    *("trained_step", "next_position", "checkpoint_step", "released_step", "totals", "skipped_in_a_row", "began_s"),
    *("backed_off", "durations", "step_times_s", "last_trained_s", "external"),
    "external_counts",
)
"""Fields of a `History` that a summary has as they are."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Where the latest attempt at a position went."""

    version: PolicyVersion
    runner_id: str
    begun_s: float
    """When, in Unix seconds."""
    sessions: bool = False
    """Its members are sessions of an outside agent."""


@dataclass(slots=True)
class History:
    """Where a run stood."""

    environment_of: Callable[[int], str]
    run_id: str = ""
    seed: int = 0
    bound: int | None = None
    """Versions that a group may lag; None where tokens are masked instead."""
    ended: str = ""
    """"finished", "failed" or "stopped"; empty while the run goes on."""
    reason: str = ""
    """Why it ended."""
    paused: str = ""
    """The reason that a client gave for holding it; empty while nobody does."""
    serving: PolicyVersion = UNSET
    incarnation: int = 1
    lineage_step: int = 0
    """The last step that is taken on the lineage of the latest incarnation."""
    sealed_step: int = 0
    trained_step: int = 0
    next_position: int = 0
    checkpoint_step: int | None = None
    released_step: int = 0
    groups: dict[int, Group] = field(default_factory=dict[int, Group])
    """Those that have not ended."""
    dispatches: dict[int, Dispatch] = field(default_factory=dict[int, Dispatch])
    """Of `groups`."""
    outcomes: Counter[Outcome] = field(default_factory=Counter[Outcome])
    sealed: dict[int, Record] = field(default_factory=dict[int, Record])
    """By step: those of which the plans may be asked for again."""
    accuracies: dict[str, list[AccuracyResult]] = field(default_factory=dict[str, list[AccuracyResult]])
    """By evaluation: those that are done."""
    evaluation_starts: Counter[str] = field(default_factory=Counter[str])
    tasks: dict[int, int] = field(default_factory=dict[int, int])
    """Of `groups`: tasks that a curriculum chose."""
    success_rates: dict[tuple[str, int], tuple[float, int]] = field(
        default_factory=dict[tuple[str, int], tuple[float, int]]
    )
    """By environment and part: the rate, and how many groups it is of."""
    counted: dict[int, int] = field(default_factory=dict[int, int])
    """Of `groups`: attempts that those rates have taken in."""
    totals: dict[str, Any] = field(default_factory=dict[str, Any])
    began_s: float = 0.0
    """When the latest process began, in Unix seconds: how long what was under way before took, nobody measured."""
    skipped_in_a_row: int = 0
    backed_off: dict[str, Record] = field(default_factory=dict[str, Record])
    """By environment: what was said of it last."""
    durations: dict[str, list[list[float | None]]] = field(default_factory=dict[str, list[list[float | None]]])
    """By environment, of the newest groups: how long, None where that was cut off, and how long at least."""
    step_times_s: list[float] = field(default_factory=list[float])
    last_trained_s: float | None = None
    external: dict[str, Record] = field(default_factory=dict[str, Record])
    """By group: what was said last of it, with what was asked for as long as it has not ended."""
    external_counts: dict[str, int] = field(default_factory=dict[str, int])
    """Those that have ended, also such as are no longer kept, by environment."""
    sessions: dict[str, KeptSession] = field(default_factory=dict[str, KeptSession])
    """By name, in the order in which they were opened: those that have not ended, and the newest that have."""
    ended_sessions: deque[str] = field(default_factory=deque[str])

    def plan(self, step: int) -> SealedPlan:
        """The plan of a sealed step that is kept."""
        record = self.sealed[step]
        plans = [unpacked(text) for text in record["plans"]]
        sequences = [each for plan in plans for batch in plan.micro_batches for each in batch.sequences]
        rows = [ref for each in sequences for ref in references(each)]
        attempts = frozenset(zip(map(group_id_of, record["positions"]), record["attempts"], strict=True))
        return SealedPlan(step, plans, record["figures"], rows, attempts)

    def begin_again(self) -> None:
        """Whoever starts a run that failed thinks that it can go on: what it failed by gets another try."""
        if self.ended == "failed":
            self.ended = self.reason = ""
            self.backed_off, self.skipped_in_a_row = {}, 0

    # ---- one record

    def take(self, record: Record) -> None:
        """Take in the next record; one of a kind that is not known says nothing here."""
        handle = _KINDS.get(record["kind"])
        if handle is None:
            return
        try:
            handle(self, record)
        except (KeyError, ValueError) as error:
            number, kind = record.get("n"), record["kind"]
            raise JournalCorrupt(
                f"record {number} of the journal, {kind!r}, does not follow from those before it: {error}",
                record=number,
            ) from None

    def _summary(self, record: Record) -> None:
        """Begin where it says that the run stood; later ones say what is known."""
        if self.run_id:
            return
        for name in SUMMED_UP:
            setattr(self, name, deepcopy(record[name]))
        self.serving = PolicyVersion.parse(record["serving"])
        self.outcomes.update({Outcome(name): count for name, count in record["outcomes"].items()})
        self.evaluation_starts.update(record["evaluation_starts"])
        for name, results in record["accuracies"].items():
            self.accuracies[name] = [AccuracyResult(name, *result) for result in results]
        for session in record["sessions"]:
            self._session(session)
        self.tasks = dict(record["tasks"])
        self.success_rates = {(name, part): (rate, count) for name, part, rate, count in record["success_rates"]}
        self.counted = dict(record["counted"])
        for known in record["groups"]:
            position, phase = known["position"], Phase(known["phase"])
            fields = {
                name: known[name] for name in ("attempt", "dispatch_step", "regenerations", "losses", "sealed_step")
            }
            self.groups[position] = Group(position, self.environment_of(position), phase, **fields)
            if "version" in known:
                version = PolicyVersion.parse(known["version"])
                self.dispatches[position] = Dispatch(version, known["runner"], known["begun_s"], known["sessions"])

    def _run(self, record: Record) -> None:
        self.run_id, self.seed = record["run_id"], record["seed"]
        self._begin(record)

    def _resumed(self, record: Record) -> None:
        self._begin(record)
        self.begin_again()

    def _begin(self, record: Record) -> None:
        self.bound = record.get("max_off_policy_steps")
        self.began_s, self.last_trained_s = record.get("time_s", 0.0), None

    def _run_ended(self, record: Record) -> None:
        self.ended, self.reason = record["state"], record["reason"]

    def _paused(self, record: Record) -> None:
        self.paused = record["reason"]

    def _unpaused(self, record: Record) -> None:
        self.paused = ""

    def _serving(self, record: Record) -> None:
        self.serving = PolicyVersion.parse(record["version"])

    def _acquired(self, record: Record) -> None:
        position, version = record["position"], PolicyVersion.parse(record["version"])
        self._reach(position)
        group = self._open(position)
        if record["attempt"] != group.attempt + 1 or group.phase not in (Phase.WAITING, Phase.PARKED):
            raise ValueError(f"attempt {record['attempt']} comes after {group.attempt}, which is {group.phase}")
        group.attempt = record["attempt"]
        group.phase, group.dispatch_step = Phase.RUNNING, version.step
        if "task" in record:
            self.tasks[position] = record["task"]
        self.dispatches[position] = Dispatch(
            version, record["runner"], record.get("time_s", 0.0), record.get("sessions", False)
        )

    def _reported(self, record: Record) -> None:
        group = self._attempt(record)
        self._time(group, record)
        group.phase = Phase.SCORED
        self._succeeded(record)

    def _succeeded(self, record: Record) -> None:
        if "success" in record:
            name, part, rate, count = record["success"]
            self.success_rates[name, part] = (rate, count)
            self.counted[record["position"]] = record["attempt"]

    def _reopened(self, record: Record) -> None:
        self._attempt(record).phase = Phase.RUNNING

    def _lost(self, record: Record) -> None:
        group = self._attempt(record)
        group.phase = Phase.WAITING
        group.losses += record["counted"]

    def _regenerated(self, record: Record) -> None:
        group = self._attempt(record)
        self._time(group, record, cut_off=True)
        group.phase = Phase.WAITING
        group.regenerations += 1

    def _ended(self, record: Record) -> None:
        self._reach(record["position"])
        self._succeeded(record)
        group, outcome = self._attempt(record), Outcome(record["outcome"])
        if outcome in (Outcome.FILTERED, Outcome.AGED_OUT):
            self._time(group, record, cut_off=outcome is Outcome.AGED_OUT)
        self._end(group, outcome)

    def _sealed(self, record: Record) -> None:
        step = record["step"]
        if step != self.sealed_step + 1:
            raise ValueError(f"step {self.sealed_step} was sealed last")
        for position, attempt in zip(record["positions"], record["attempts"], strict=True):
            group = self._attempt({"position": position, "attempt": attempt})
            group.phase, group.sealed_step = Phase.SEALED, step
        self.sealed_step = step
        self.sealed[step] = record

    def _trained(self, record: Record) -> None:
        step = record["step"]
        if step != self.trained_step + 1 or step > self.sealed_step:
            raise ValueError(f"step {self.trained_step} was trained last, and {self.sealed_step} sealed")
        for group in [group for group in self.groups.values() if group.sealed_step == step]:
            self._end(group, Outcome(record["kind"]))
        self.trained_step = self.lineage_step = step
        self.totals = record["totals"]
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if record["kind"] == Outcome.SKIPPED else 0
        now_s = record.get("time_s", 0.0)
        if self.last_trained_s is not None:
            self.step_times_s = [*self.step_times_s, now_s - self.last_trained_s][-KEPT_STEP_TIMES:]
        self.last_trained_s = now_s
        self._let_go()

    def _backed_off(self, record: Record) -> None:
        self.backed_off[record["environment"]] = record

    def _healed(self, record: Record) -> None:
        self.backed_off.pop(record["environment"], None)

    def _external(self, record: Record) -> None:
        name = record["group"]
        before = self.external.pop(name, {})  # what ended last is the last of them
        asked = {} if record["rollout"] else {"request": before.get("request")}
        if environment := record.get("environment"):
            self.external_counts[environment] = self.external_counts.get(environment, 0) + 1
        self.external[name] = {**asked, **record}
        ended = [(each, said) for each, said in self.external.items() if said["rollout"]]
        count, size_bytes = len(ended), sum(len(said["rollout"]) for _, said in ended)
        for each, said in ended[:-1]:
            if count <= KEPT_EXTERNAL and size_bytes <= KEPT_EXTERNAL_BYTES:
                break
            count, size_bytes = count - 1, size_bytes - len(said["rollout"])
            del self.external[each]

    def _restored(self, record: Record) -> None:
        self.incarnation, self.lineage_step = record["incarnation"], record["step"]

    def _retrained(self, record: Record) -> None:
        self.lineage_step = record["step"]

    def _checkpoint(self, record: Record) -> None:
        self.checkpoint_step = record["step"]
        self._let_go()

    def _evaluating(self, record: Record) -> None:
        self.evaluation_starts[record["name"]] += 1

    def _evaluated(self, record: Record) -> None:
        name, step = record["name"], record["step"]
        self.accuracies[name] = [
            AccuracyResult(name, environment, accuracy, count, step)
            for environment, accuracy, count in record["results"]
        ]

    def _session(self, record: Record) -> None:
        name, session = record["session_id"], session_of(record)
        self.sessions[name] = session
        if session.over:
            self.ended_sessions.append(name)
        if len(self.ended_sessions) > KEPT_SESSIONS:
            del self.sessions[self.ended_sessions.popleft()]

    # ---- inside

    def _reach(self, position: int) -> None:
        """Positions that were passed by on the way, as their environment was backed off, are parked."""
        for passed in range(self.next_position, position + 1):
            self.groups[passed] = Group(passed, self.environment_of(passed), Phase.PARKED)
        self.next_position = max(self.next_position, position + 1)

    def _open(self, position: int) -> Group:
        if position not in self.groups:
            raise ValueError(f"position {position} has ended")
        return self.groups[position]

    def _attempt(self, record: Record) -> Group:
        group = self._open(record["position"])
        if group.attempt != record["attempt"] or group.phase is Phase.SEALED:
            raise ValueError(f"attempt {record['attempt']} at position {record['position']} is not open")
        return group

    def _time(self, group: Group, record: Record, *, cut_off: bool = False) -> None:
        """How long an attempt took that ends here; one that had ended before, or outlived a process, says nothing.

        Neither do sessions: how long they take is their agent's affair, and no environment's.
        """
        begun_s = self.dispatches[group.position].begun_s if group.position in self.dispatches else 0.0
        of_sessions = group.position in self.dispatches and self.dispatches[group.position].sessions
        if group.phase is Phase.RUNNING and begun_s >= self.began_s and not of_sessions:
            took_s = record.get("time_s", 0.0) - begun_s
            times = self.durations.setdefault(group.environment, [])
            times.append([None if cut_off else took_s, took_s])
            del times[:-KEPT_DURATIONS]

    def _end(self, group: Group, outcome: Outcome) -> None:
        self.outcomes[outcome] += 1
        del self.groups[group.position]
        for known in (self.dispatches, self.tasks, self.counted):
            known.pop(group.position, None)

    def _let_go(self) -> None:
        covered = self.trained_step if self.checkpoint_step is None else min(self.trained_step, self.checkpoint_step)
        self.released_step = max(self.released_step, covered)
        for step in [step for step in self.sealed if step < self.released_step - KEPT_STEPS]:
            del self.sealed[step]


_KINDS: dict[str, Callable[[History, Record], None]] = {
    "summary": History._summary,
    "run": History._run,
    "resumed": History._resumed,
    "run_ended": History._run_ended,
    "backed_off": History._backed_off,
    "healed": History._healed,
    "external": History._external,
    "paused": History._paused,
    "unpaused": History._unpaused,
    "serving": History._serving,
    "acquired": History._acquired,
    "reported": History._reported,
    "reopened": History._reopened,
    "lost": History._lost,
    "regenerated": History._regenerated,
    "ended": History._ended,
    "sealed": History._sealed,
    "trained": History._trained,
    "skipped": History._trained,
    "restored": History._restored,
    "retrained": History._retrained,
    "checkpoint": History._checkpoint,
    "evaluating": History._evaluating,
    "evaluated": History._evaluated,
    "session": History._session,
}


def replay(records: Iterable[Record], environment_of: Callable[[int], str]) -> History:
    """What all records say; raises `JournalCorrupt` where one cannot follow from those before it."""
    history = History(environment_of)
    for record in records:
        history.take(record)
    missing = sorted(set(range(history.released_step + 1, history.sealed_step + 1)) - history.sealed.keys())
    if missing:
        raise JournalCorrupt(f"step {missing[0]} is sealed, and its plan is gone", record=None)
    return history


def unpacked(text: str) -> batch_pb2.Plan:
    """Return a plan from the journal."""
    return unpack(text, batch_pb2.Plan)
