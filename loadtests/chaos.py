"""Kills services of a run with -9, again and again, and asks of the journal whether anything was lost or trained twice.

    python loadtests/chaos.py --kills 50 --seed 1        # make chaos
    python loadtests/chaos.py --kills 10 --every-s 60    # by the clock, twenty minutes

A small run on the real services, whose groups end within tenths of a second, restarts what dies. Kills are due as
positions end, at moments drawn from the seed, so that a slower machine is killed as often; the last step's groups do
not end before the last kill, so that a faster one is, too. The run ends at a position, and must have trained what an
uninterrupted one trains. `--every-s 60` kills by the clock instead, in a run that is as long as the kills need by the
pace of a short one before it; then the share of the time in which the run got on is measured. Otherwise it is worked
out from what a kill costs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "services"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "e2e"))

import psutil
from chaos_kv import KvHits
from chaos_outcome import REQUIRED_RATIO, Kill, Outcome, average, tell
from chaos_shape import CHECKPOINT_STEPS, Shape
from run_process import GROUPS_PER_STEP, RunProcess, gated, launching, of_kind, read_lines

from slipstream.common.version import PolicyVersion
from slipstream.orchestrator.journal import read_journal
from slipstream.orchestrator.journal_check import Violation, check_records
from slipstream.orchestrator.replay import unpacked

ONE_OF_EACH = Shape()
PACE_STEPS = 60
"""Of the run whose pace says how long another must be."""
SPARE = 1.1
"""So much longer than that, since others may leave more of the machine to it."""
EXACT = 1e-4
"""Log-probabilities of engine and trainer differ by less than this where both have the same weights."""
STUCK_S = 180.0
"""A run that does not get on for so long is given up, or of which a process is away."""


class Lost(Exception):
    """The run broke a promise; the message says which."""


class Growing:
    """The journal of a run that goes on, read as far as it has come."""

    def __init__(self, run_path: Path) -> None:
        self.ended: set[int] = set()
        """Positions whose rollouts have ended, one way or another."""
        self.record_count = 0
        self.trained_step = 0
        """The newest."""
        self._path = run_path / "journal" / "journal.jsonl"
        self._offset_bytes = 0

    def read(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset_bytes)
            whole, _, _ = file.read().rpartition(b"\n")
        if not whole:
            return
        self._offset_bytes += len(whole) + 1
        for line in whole.splitlines():
            self.record_count += 1
            record = json.loads(line.partition(b" ")[2])
            if record["kind"] in ("reported", "ended"):
                self.ended.add(record["position"])
            if record["kind"] == "trained":
                self.trained_step = record["step"]

    @property
    def between_checkpoints(self) -> bool:
        """Whether a trainer that is killed now has steps to take once more, also if it ends another one meanwhile."""
        return 1 <= self.trained_step % CHECKPOINT_STEPS < CHECKPOINT_STEPS - 1


class Chaos:
    """Kills services of one run."""

    def __init__(
        self,
        run: RunProcess,
        targets: Sequence[str],
        positions: int,
        gate: Path,
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        self.run = run
        self._targets = targets
        self.gate = gate
        self.positions = positions
        self.kills: list[Kill] = []
        self._random = random.Random(seed)
        self._say = say
        self._replicas = self._drawn()
        self._journal = Growing(run.path)
        self.kv = KvHits(run.path)
        self.loads: list[float] = []

    def kill_by_progress(self, count: int) -> None:
        """Kill so often, spread over the positions from a twentieth to nine tenths of them."""
        low, high = self.positions // 20, min(self.positions * 9 // 10, self.positions - GROUPS_PER_STEP)
        for due in sorted(self._random.randint(low, high) for _ in range(count)):
            self._await(lambda due=due: self._ended() >= due)
            self._kill()
        if len(self.kills) < count:
            raise Lost(f"the run ended after {len(self.kills)} kills:\n{self.run.output}")

    def kill_by_clock(self, every_s: float) -> None:
        """Kill at this period, from the first position that ends until the run does."""
        self.gate.touch()
        self._await(self._ended)
        begun_s = time.monotonic()
        for due_s in itertools.count(begun_s + every_s, every_s):
            self._await(lambda due_s=due_s: self._over or time.monotonic() >= due_s)
            if self._over:
                break
            self._kill()
        if not self.kills:
            raise Lost(f"the run ended before anything was killed:\n{self.run.output}")

    def finish(self) -> None:
        """Wait for the end of the run, which must be a good one."""
        self.gate.touch()
        self._await(lambda: self._over)
        if self.run.process.returncode != 0:
            raise Lost(f"the run ended with exit code {self.run.process.returncode}:\n{self.run.output}")

    @property
    def _over(self) -> bool:
        return self.run.process.poll() is not None

    def _drawn(self) -> Iterator[str]:
        while True:
            yield from self._random.sample(self._targets, len(self._targets))

    def _kill(self) -> None:
        """Kill the next service, once it lives; a moment later, so that it is not always right after a report."""
        replica = next(self._replicas)
        time.sleep(self._random.random() * 0.3)
        given_up_s = time.monotonic() + STUCK_S
        self._await(lambda: self._over or self._pid(replica) is not None or time.monotonic() > given_up_s)
        if not self._over and self._pid(replica) is None:
            raise Lost(f"{replica} does not live:\n{self.run.output}")
        if replica.startswith("trainer"):
            last = self.positions - 2 * GROUPS_PER_STEP  # near the end no more steps may come
            self._await(lambda: self._over or self._between_checkpoints() or self._ended() >= last)
        pid = self._pid(replica)
        if pid is None or self._over:
            return
        os.kill(pid, signal.SIGKILL)
        self.kills.append(Kill(replica, self._ended(), time.time(), self.kv.tokens))
        self._say(f"{len(self.kills)}: killed {replica} when {self.kills[-1].ended_positions} positions had ended")

    def _pid(self, replica: str) -> int | None:
        pids = [event["pid"] for event in self.run.events("service_started") if event["replica"] == replica]
        return pids[-1] if pids and psutil.pid_exists(pids[-1]) else None

    def _ended(self) -> int:
        self._journal.read()
        return len(self._journal.ended)

    def _between_checkpoints(self) -> bool:
        self._journal.read()
        return self._journal.between_checkpoints

    def _await(self, condition: Callable[[], Any]) -> None:
        moved_s, before = time.monotonic(), 0
        while not condition():
            if self._over:
                if condition():
                    return
                raise Lost(f"the run ended early:\n{self.run.output}")
            self._journal.read()
            self.kv.read()
            self.loads.append(os.getloadavg()[0])
            if self._journal.record_count != before:
                moved_s, before = time.monotonic(), self._journal.record_count
            if time.monotonic() - moved_s > STUCK_S:
                raise Lost(f"the run does not get on:\n{self.run.output}")
            time.sleep(0.1)


def check(path: Path, positions: int) -> Outcome:
    """What a run that has ended came to. Raises `Lost` where the guarantee does not hold.

    Beside what `journal_check` checks: every position is trained, none twice; nothing is sampled by weights, or on KV,
    older than those that its group was dispatched at, whatever incarnation they are of; all rows that were sealed could
    be fetched; and where engine and trainer say that they had the same weights, their log-probabilities agree.
    """
    records = read_journal(path / "journal" / "journal.jsonl").records
    try:
        checked = check_records(records, positions)
    except Violation as violation:
        raise Lost(str(violation)) from None
    for record in of_kind(records, "sealed"):
        _check_plans(record)
    steps = of_kind(read_lines(path / "metrics.jsonl"), "step")
    for step in steps:
        if step.get("sequences_lost"):  # unknown of one whose trainer died before it could say
            raise Lost(f"step {step['step']} was trained without {step['sequences_lost']:g} of its sequences")
        if not (difference := step.get("pure_max_abs_diff", 0.0)) <= EXACT:  # nan, too
            raise Lost(f"engine and trainer differ by {difference:g} in step {step['step']}, with the same weights")
    first_s = next(record["time_s"] for record in records if record["kind"] == "acquired")
    return Outcome(
        wall_s=records[-1]["time_s"] - first_s,
        trained=checked.steps,
        figures=checked.figures(),
        step_times_s=[record["time_s"] for record in of_kind(records, "trained")],
        pure_tokens=int(sum(step.get("pure_token_count", 0.0) for step in steps)),
        pure_max_abs_diff=max((step.get("pure_max_abs_diff", 0.0) for step in steps), default=0.0),
    )


def _check_plans(record: dict[str, Any]) -> None:
    for plan in map(unpacked, record["plans"]):
        for sequence in (s for batch in plan.micro_batches for s in batch.sequences):
            dispatched = PolicyVersion.from_proto(sequence.dispatch_version)
            for span in sequence.spans:
                oldest = min(map(PolicyVersion.from_proto, (span.version, span.kv_oldest_version)))
                if oldest < dispatched:
                    raise Lost(f"{sequence.rollout_id}, dispatched at {dispatched}, rests on {oldest}")


def live(
    directory: Path,
    name: str,
    steps: int,
    kill: Callable[[Chaos], None],
    seed: int = 0,
    say: Callable[[str], None] = print,
    shape: Shape = ONE_OF_EACH,
) -> Outcome:
    """One run from start to end, and what `kill` does to it."""
    positions = steps * GROUPS_PER_STEP
    arguments = [part for key, value in shape.arguments.items() for part in (f"--{key}", value)]
    with launching(directory) as launch:
        bounds = ("--orchestrator.total-positions", str(positions), "--orchestrator.total-steps", str(2 * steps))
        gate, last = directory / f"{name}.gate", range(positions - GROUPS_PER_STEP, positions)
        run = launch(name, *arguments, *bounds, options=f"{shape.options}\n{gated(gate, last)}")
        chaos = Chaos(run, shape.targets, positions, gate, seed, say)
        kill(chaos)
        chaos.finish()
        left = run.left_after(30.0)
        if left:
            raise Lost(f"left behind: {left}")
        outcome = check(run.path, positions)
        outcome.kills, outcome.load = chaos.kills, average(chaos.loads)
        outcome.kv_hit_tokens = dict(+chaos.kv.found)
        outcome.prefill_tokens = chaos.kv.asked["prefill-1"]
        check_kv(outcome, shape)
        return outcome


def check_kv(outcome: Outcome, shape: Shape) -> None:
    """That what is checked of KV, none of a dead incarnation, was put to the test. Raises `Lost` where it was not."""
    if not shape.offload or not outcome.kills:
        return
    if not outcome.kv_hit_tokens:
        raise Lost("no prompt was ever found in host memory or on disk")
    restored = [kill for kill in outcome.kills if kill.replica.startswith("trainer")]
    if restored and not outcome.figures["steps taken again"]:
        raise Lost("no trainer was killed between two checkpoints")
    if restored and sum(outcome.kv_hit_tokens.values()) == restored[0].kv_hit_tokens:
        raise Lost("no prompt was found in host memory or on disk after a trainer was restored")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="of the run; 0: two a kill, or as many as the clock needs")
    parser.add_argument("--every-s", type=float, default=0.0, help="kill by the clock, as long as the run goes")
    parser.add_argument("--runners", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="processes of the trainer")
    parser.add_argument("--offload", action="store_true", help="on vLLM, with KV in host memory and on disk")
    options = parser.parse_args(arguments)
    shape = Shape(options.runners, options.ranks, options.offload)

    def kill(chaos: Chaos) -> None:
        if options.every_s:
            chaos.kill_by_clock(options.every_s)
        else:
            chaos.kill_by_progress(options.kills)

    def say(sentence: str) -> None:
        print(sentence, flush=True)

    directory = Path(tempfile.mkdtemp(prefix="slip-"))
    with contextlib.ExitStack() as removal:
        removal.callback(shutil.rmtree, directory)
        try:
            steps = options.steps or max(10, 2 * options.kills)
            if options.every_s and not options.steps:
                step_s = live(directory, "pace", PACE_STEPS, lambda _: None, shape=shape).step_s
                steps = math.ceil(SPARE * options.kills * options.every_s / step_s)
                say(f"{step_s:.2f} s a step")
            say(f"seed {options.seed}: {steps} steps of {GROUPS_PER_STEP} groups, {options.kills} kills; {shape}")
            calm = live(directory, "calm", steps, lambda _: None, shape=shape)
            say(f"without kills: {calm.wall_s:.1f} s, load {calm.load:.1f}")
            killed = live(directory, "killed", steps, kill, options.seed, say, shape)
        except Lost as lost:
            removal.pop_all()
            print(f"chaos: FAILED: {lost}\nThe runs are kept in {directory}")
            return 1
    if killed.trained.keys() != calm.trained.keys():
        print(f"chaos: FAILED: trained {sorted(killed.trained.keys() ^ calm.trained.keys())} in one run only")
        return 1
    if not calm.pure_tokens:
        print("chaos: FAILED: no token was sampled by the weights that were trained on it, so none could be compared")
        return 1
    return 0 if tell(calm, killed, options.every_s) >= REQUIRED_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
