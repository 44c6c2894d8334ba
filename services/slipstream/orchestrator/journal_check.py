"""Whether a run kept its promise: one terminal outcome a position on the surviving lineage, none trained twice.

    python -m slipstream.orchestrator.journal_check runs/demo --prefix 640

It reads the journal alone, and none of the code that wrote it or goes on from it. The lineage is what is left when each
restore takes the steps after its checkpoint back: those are trained once more, as they were sealed. Exit codes: 0, or 1
with the record that breaks a rule, or 2 where the journal cannot be read.

| rule | |
|---|---|
| names | attempts at a position count from 1, without a gap; none begins while another is open |
| versions | nothing is handed out before a process of the orchestrator heard what is served, nor at another version |
| bound | no group is sealed that lags more than the run allows |
| outcomes | a position ends once: in one sealed step, or by itself |
| lineage | steps are sealed, trained and trained again in order; a restore goes back to a step that was trained |
| end | a run that finished leaves no position open, and no sealed step untrained |
| prefix | with --prefix N: exactly the positions below N were trained |
| summary | at the head of a segment: it says what the records before it say, or stands for them where they are gone |
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.common.errors import JournalCorrupt
from slipstream.orchestrator.journal import read_journal

Record = Mapping[str, Any]

USAGE = "usage: python -m slipstream.orchestrator.journal_check RUN [--prefix N]"


class Violation(Exception):
    """A record that breaks a rule."""


@dataclass
class Checked:
    """What the records say so far; `take` raises `Violation`."""

    bound: int | None = None
    """Versions that a group may lag; None: tokens are masked instead, or it is not known."""
    first_record: int = 0
    """The first that is left; those before are known by its summary alone."""
    processes: int = 0
    served: str = ""
    """What this process of the orchestrator heard."""
    incarnation: int = 1
    sealed_step: int = 0
    trained_step: int = 0
    """On the surviving lineage."""
    finished: bool = False
    attempts: dict[int, int] = field(default_factory=dict[int, int])
    """By position: the latest; 0 for one that was passed by."""
    running: dict[int, str] = field(default_factory=dict[int, str])
    """Attempts that are open, with the version they were dispatched at, by position."""
    outcomes: dict[int, str] = field(default_factory=dict[int, str])
    """Of positions that ended untrained."""
    steps: dict[int, int] = field(default_factory=dict[int, int])
    """Positions that are sealed, and their step."""
    skipped_steps: set[int] = field(default_factory=set[int])
    reached: int = 0
    """The lowest position that nothing was said of."""
    before: int = 0
    """Positions below it, but those in `attempts`, had ended before the first record that is left."""
    ended_before: Counter[str] = field(default_factory=Counter[str])
    """What those came to: positions by outcome."""
    counts: Counter[str] = field(default_factory=Counter[str])

    def take(self, record: Record) -> None:
        """Take in the next record."""
        kind = record["kind"]
        self.counts[kind] += 1
        match kind:
            case "run" | "resumed":
                self.processes += 1
                self.served = ""  # of a run that has finished it says so once more, and no more
                self.bound = record.get("max_off_policy_steps")
            case "summary":
                self._summary(record)
            case "serving":
                self.served = record["version"]
            case "acquired":
                self._acquired(record)
            case "reported":
                self._open(record)
            case "lost" | "regenerated":
                self._open(record)
                del self.running[record["position"]]
            case "ended":
                self._ended(record)
            case "sealed":
                self._sealed(record)
            case "trained" | "skipped" | "retrained":
                self._trained(record)
            case "restored":
                self._restored(record)
            case "run_ended":
                self.finished = record["state"] == "finished"

    def _summary(self, record: Record) -> None:
        if not self.processes:  # the first record that is left
            self._begin(record)
            return
        claimed = {
            "next_position": self.reached,
            **{name: getattr(self, name) for name in ("incarnation", "sealed_step", "bound")},
            "lineage_step": self.trained_step,
        }
        for name, value in claimed.items():
            self._refuse_if(record[name] != value, f"{name} is {record[name]}, and {value} by the records before it")
        open_groups = {group["position"]: group["attempt"] for group in record["groups"]}
        ended = sum(record["outcomes"].values())
        self._refuse_if(
            ended + len(open_groups) != record["next_position"],
            f"{ended} positions have ended and {len(open_groups)} are open, of {record['next_position']}",
        )
        for position, attempt in open_groups.items():
            known = position not in self.outcomes and self.attempts.get(position) == attempt
            self._refuse_if(not known, f"attempt {attempt} at position {position} is not open")
        ours = self.ended_before + Counter(self.outcomes.values())
        theirs = {name: count for name, count in record["outcomes"].items() if name not in ("trained", "skipped")}
        for name in theirs.keys() | ours.keys() - {"trained", "skipped"}:
            self._refuse_if(
                theirs.get(name, 0) != ours[name], f"{theirs.get(name, 0)} positions {name}, not {ours[name]}"
            )

    def _begin(self, record: Record) -> None:
        self.processes, self.first_record = 1, record["n"]
        self.bound, self.incarnation = record["bound"], record["incarnation"]
        self.served = record["serving"]
        self.sealed_step, self.trained_step = record["sealed_step"], record["lineage_step"]
        self.before = self.reached = record["next_position"]
        self.ended_before = Counter(record["outcomes"])
        for group in record["groups"]:
            position = group["position"]
            self.attempts[position] = group["attempt"]
            if group["phase"] == "sealed":
                self.steps[position] = group["sealed_step"]
            elif group["phase"] in ("running", "scored"):
                self.running[position] = group["version"]
        self._refuse_if(
            self.ended_before.total() + len(self.attempts) != self.before,
            f"{self.ended_before.total()} positions have ended and {len(self.attempts)} are open, of {self.before}",
        )

    def _acquired(self, record: Record) -> None:
        position, attempt = record["position"], record["attempt"]
        known = position in self.attempts or position >= self.before
        had_ended = position in self.outcomes or position in self.steps or not known
        self._refuse_if(had_ended, f"position {position} had ended")
        self._refuse_if(position in self.running, f"another attempt at position {position} is open")
        self._reach(position)
        before = self.attempts[position]
        self._refuse_if(attempt != before + 1, f"attempt {attempt} at position {position} comes after {before}")
        self._refuse_if(
            record["version"] != self.served, f"dispatched at {record['version']}, with {self.served or 'none'} served"
        )
        self.attempts[position] = attempt
        self.running[position] = record["version"]

    def _ended(self, record: Record) -> None:
        position = record["position"]
        self._refuse_if(position in self.outcomes, f"position {position} ended before: {self.outcomes.get(position)}")
        self._refuse_if(position in self.steps, f"position {position} is sealed in step {self.steps.get(position)}")
        self._reach(position)
        self._refuse_if(record["attempt"] != self.attempts.get(position), f"no such attempt at position {position}")
        self.running.pop(position, None)
        self.outcomes[position] = record["outcome"]

    def _sealed(self, record: Record) -> None:
        step = record["step"]
        self._refuse_if(step != self.sealed_step + 1, f"step {self.sealed_step} was sealed last")
        for position, attempt in zip(record["positions"], record["attempts"], strict=True):
            self._refuse_if(
                position in self.outcomes, f"position {position} ended before: {self.outcomes.get(position)}"
            )
            self._refuse_if(
                position in self.steps, f"position {position} is sealed in step {self.steps.get(position)} as well"
            )
            self._open({"position": position, "attempt": attempt})
            lag = step - 1 - int(self.running.pop(position).partition(".")[2])
            self._refuse_if(self.bound is not None and lag > self.bound, f"position {position} lags {lag} versions")
            self.steps[position] = step
        self.sealed_step = step

    def _trained(self, record: Record) -> None:
        step = record["step"]
        self._refuse_if(step > self.sealed_step, f"step {step} is not sealed")
        self._refuse_if(step <= self.trained_step, f"step {step} is trained already on this lineage")
        self._refuse_if(step != self.trained_step + 1, f"step {self.trained_step} was trained last on this lineage")
        again = record["kind"] == "retrained"
        self._refuse_if(again and record["incarnation"] != self.incarnation, f"incarnation {self.incarnation} trains")
        self.trained_step = step
        if record["kind"] == "skipped":
            self.skipped_steps.add(step)

    def _restored(self, record: Record) -> None:
        incarnation, step = record["incarnation"], record["step"]
        self._refuse_if(incarnation <= self.incarnation, f"incarnation {self.incarnation} trains already")
        self._refuse_if(step > self.trained_step, f"step {self.trained_step} is the last that this lineage has trained")
        self.incarnation, self.trained_step = incarnation, step

    def _reach(self, position: int) -> None:
        """What was passed by on the way, as its environment was backed off, has had no attempt yet."""
        for passed in range(self.reached, position + 1):
            self.attempts[passed] = 0
        self.reached = max(self.reached, position + 1)

    def _open(self, record: Record) -> None:
        position, attempt = record["position"], record["attempt"]
        known = position in self.running and self.attempts[position] == attempt
        self._refuse_if(not known, f"attempt {attempt} at position {position} is not open")

    def _refuse_if(self, broken: bool, sentence: str) -> None:
        if broken:
            raise Violation(sentence)

    # ---- at the end

    @property
    def trained(self) -> set[int]:
        """Positions that are trained on the surviving lineage, as far as the records that are left name them."""
        return {position for position, step in self.steps.items() if step <= self.trained_step}

    @property
    def _trained_or_before(self) -> set[int]:
        """Those, and what had ended before, of which none but the count is known: unless that was not by training."""
        otherwise = self.ended_before.keys() - {"trained", "skipped"}
        before = () if otherwise else (p for p in range(self.before) if p not in self.attempts)
        return self.trained.union(before)

    @property
    def frontier(self) -> int:
        """The lowest position without a terminal outcome."""
        ended = self.trained | self.outcomes.keys()
        return min((position for position in self.attempts if position not in ended), default=self.reached)

    def end(self, prefix: int | None = None) -> None:
        """Raise `Violation` where what is left at the end breaks a rule."""
        left = self.reached - self.frontier
        self._refuse_if(self.finished and left > 0, f"the run finished, and position {self.frontier} has no outcome")
        self._refuse_if(
            self.finished and self.trained_step != self.sealed_step,
            f"the run finished, and of {self.sealed_step} sealed steps {self.trained_step} were trained",
        )
        if prefix is not None:
            trained = self._trained_or_before
            missing = sorted(set(range(prefix)) - trained)[:5]
            beyond = sorted(trained - set(range(prefix)))[:5]
            self._refuse_if(bool(missing), f"not trained: positions {missing}")
            self._refuse_if(bool(beyond), f"trained beyond the first {prefix}: positions {beyond}")

    def figures(self) -> dict[str, object]:
        """What there is to say of a run that kept the rules."""
        outcomes = self.ended_before + Counter(self.outcomes.values())
        steps = [step for step in self.steps.values() if step <= self.trained_step]
        outcomes["skipped"] += (skipped := sum(step in self.skipped_steps for step in steps))
        outcomes["trained"] += len(steps) - skipped
        prefix = self._trained_or_before
        return {
            "positions": self.reached,
            "frontier": self.frontier,
            **{name: count for name, count in sorted(outcomes.items()) if count},
            "first record": self.first_record,
            "attempts": self.counts["acquired"],
            "lost": self.counts["lost"],
            "regenerated": self.counts["regenerated"],
            "steps": self.trained_step,
            "steps taken again": self.counts["retrained"],
            "restores of the trainer": self.counts["restored"],
            "processes of the orchestrator": self.processes,
            "trained positions are a prefix": prefix == set(range(len(prefix))),
        }


def check_records(records: Iterable[Record], prefix: int | None = None) -> Checked:
    """Check the journal of a run, all that is left of it. Raises `Violation`."""
    checked = Checked()
    for record in records:
        try:
            if record["n"] and record["kind"] != "summary" and not checked.processes:
                raise Violation(f"the first record left is number {record['n']}, and does not say what came before")
            checked.take(record)
        except Violation as violation:
            raise Violation(f"record {record['n']} ({record['kind']}): {violation}") from None
    checked.end(prefix)
    return checked


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    prefix: int | None = None
    if len(arguments) == 3 and arguments[1] == "--prefix" and arguments[2].isdecimal():
        prefix = int(arguments[2])
        arguments = arguments[:1]
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    path = Path(arguments[0]) / "journal" / "journal.jsonl"
    try:
        recovered = read_journal(path)
    except (OSError, JournalCorrupt) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        checked = check_records(recovered.records, prefix)
    except Violation as violation:
        print(f"violation: {violation}", file=sys.stderr)
        return 1
    for name, value in checked.figures().items():
        print(
            f"{name:32}{value:>10,}"
            if isinstance(value, int) and not isinstance(value, bool)
            else f"{name:32}{'yes' if value else 'no':>10}"
        )
    if recovered.cut_bytes:
        print(f"{recovered.cut_bytes} bytes of an unfinished record at its end were left out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
