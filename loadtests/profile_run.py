"""Where the processor time of a whole run goes: by process and phase, and what bounds a training step.

    python loadtests/profile_run.py @ examples/demo.toml --run.directory /tmp/runs
    python loadtests/profile_run.py --stacks /tmp/stacks @ examples/demo.toml       # functions too; needs py-spy
    python loadtests/profile_run.py --budget-s 260 @ examples/demo.toml             # exits 1 above 260 CPU seconds

Prints Markdown tables. Seconds are user plus system time of a process and of all it started, read from /proc four
times a second; they hardly depend on what else the machine does, unlike the wall times beside them. Phases come from
the run's own `metrics.jsonl`, the anatomy of a step from its step records and `timeline/`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from slipstream.launcher.intervals import clip, intersection, total_s, union
from slipstream.launcher.records import RunRecords, read_run
from slipstream.launcher.rundir import RunDir

PERIOD_S = 0.25
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
LAUNCHER = "launcher"
PHASES = ("start", "warm_up", "evaluating_before", "training", "evaluating_after", "stop")
STACK_SAMPLES_A_SECOND = 50

Sample = tuple[float, dict[str, float]]


class CpuSampler:
    """Processor seconds of a run's processes over time, each with its descendants, the launcher without."""

    def __init__(self, launcher_pid: int) -> None:
        self.launcher_pid = launcher_pid
        self.names: dict[int, str] = {}
        self.samples: list[Sample] = []
        self._totals: dict[str, float] = {}

    def sample(self) -> None:
        stats = {pid: stat for pid in _pids() if (stat := _stat(pid)) is not None}
        children: defaultdict[int, list[int]] = defaultdict(list)
        for pid, (parent, _, _) in stats.items():
            children[parent].append(pid)

        def whole(pid: int) -> float:
            own = stats[pid]
            return own[1] + own[2] + sum(whole(child) for child in children[pid])

        if self.launcher_pid in stats:
            self._totals[LAUNCHER] = stats[self.launcher_pid][1]
        for pid in children[self.launcher_pid]:
            name = self.names.get(pid) or _replica(pid)
            if name:
                self.names[pid] = name
                self._totals[name] = max(whole(pid), self._totals.get(name, 0.0))
        self.samples.append((time.time(), dict(self._totals)))

    def at(self, moment_s: float) -> dict[str, float]:
        """Totals at a moment: those of the first look after it."""
        return next((totals for when_s, totals in self.samples if when_s >= moment_s), self.samples[-1][1])


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> tuple[int, float, float] | None:
    """Parent, own seconds, seconds of ended children that were waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1]), (int(fields[11]) + int(fields[12])) * TICK_S, (int(fields[13]) + int(fields[14])) * TICK_S


def _replica(pid: int) -> str:
    """`decode-1` for a process whose command names configs/decode-1.toml; Valkey by its program."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    for word in words:
        if "/configs/" in word:
            return Path(word).stem
        if "valkey" in Path(word).name:
            return "valkey"
    return ""


class Stacks:
    """One py-spy a process of interest, from when it appears."""

    def __init__(self, directory: Path, launcher_pid: int) -> None:
        self.directory = directory
        self.launcher_pid = launcher_pid
        self._recorders: dict[int, subprocess.Popen[bytes]] = {}
        directory.mkdir(parents=True, exist_ok=True)

    def follow(self, names: dict[int, str]) -> None:
        for pid, name in names.items():
            if pid not in self._recorders and name != "valkey" and _is_python(pid):
                command = ["py-spy", "record", "-p", str(pid), "-r", str(STACK_SAMPLES_A_SECOND), "-f", "raw", "-t"]
                command += ["--nonblocking", "-d", "unlimited", "-o", str(self.directory / f"{name}.txt")]
                self._recorders[pid] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def close(self) -> None:
        for recorder in self._recorders.values():
            try:
                recorder.wait(timeout=20)
            except subprocess.TimeoutExpired:
                recorder.kill()


def _is_python(pid: int) -> bool:
    """Past the wrappers' exec: py-spy looks at the program that it finds when it attaches."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1] == b"-m"
    except (OSError, IndexError):
        return False


def run(arguments: list[str], stacks_dir: Path | None) -> tuple[RunDir, CpuSampler, float, float]:
    """Run `slipstream rl`; returns its directory, the samples, and when it began and ended."""
    command = [sys.executable, "-m", "slipstream.launcher", "rl", *arguments]
    begun_s = time.time()
    launcher = subprocess.Popen(command)
    sampler = CpuSampler(launcher.pid)
    stacks = Stacks(stacks_dir, launcher.pid) if stacks_dir else None
    try:
        while launcher.poll() is None:
            sampler.sample()
            if stacks is not None:
                stacks.follow(sampler.names)
            time.sleep(PERIOD_S)
    except BaseException:
        launcher.terminate()
        launcher.wait(timeout=60)
        raise
    if stacks is not None:
        stacks.close()
    if launcher.returncode != 0:
        sys.exit(f"the run ended with code {launcher.returncode}")
    return _run_dir(arguments, begun_s), sampler, begun_s, time.time()


def _run_dir(arguments: list[str], begun_s: float) -> RunDir:
    directory = Path("runs")
    for index, word in enumerate(arguments):
        if word.startswith("--run.directory"):
            directory = Path(word.partition("=")[2] or arguments[index + 1])
    made = [path.parent for path in directory.glob("*/launcher.jsonl") if path.stat().st_mtime >= begun_s]
    return RunDir(max(made, key=lambda path: (path / "launcher.jsonl").stat().st_mtime).resolve())


def boundaries(records: RunRecords, begun_s: float, ended_s: float) -> dict[str, tuple[float, float]]:
    """Start and end of each phase."""
    entered = {str(record["phase"]): float(record["time_s"]) for record in records.of_kind("phase")}
    marks = [("start", begun_s)] + [(name, entered[name]) for name in PHASES[1:-1] if name in entered]
    marks += [("stop", entered.get("ended", ended_s))]
    ends = [start_s for _, start_s in marks[1:]] + [ended_s]
    return {name: (start_s, end_s) for (name, start_s), end_s in zip(marks, ends, strict=True)}


def by_process(sampler: CpuSampler, phases: dict[str, tuple[float, float]]) -> dict[str, dict[str, float]]:
    """CPU seconds of each process in each phase."""
    table: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for phase, (start_s, end_s) in phases.items():
        before = sampler.at(start_s) if phase != "start" else {}
        for name, total in sampler.at(end_s).items():
            table[name][phase] = total - before.get(name, 0.0)
    return dict(table)


def anatomy(records: RunRecords) -> dict[str, float]:
    """Medians over the steps, seconds: what the trainer and the workers do between two reports."""
    steps = records.steps[3:]
    reported = {name: [float(s[name]) for s in steps if name in s] for name in ("wait_s", "fetch_s", "train_s")}
    reported["interval_s"] = [float(s["interval_s"]) for s in steps if "interval_s" in s]
    figures = {name: statistics.median(values) for name, values in reported.items() if values}
    trained = union(records.intervals("train_step"))
    if not trained:
        return figures
    window = trained[0][0], trained[-1][1]
    length_s = window[1] - window[0]
    for name in sorted(records.timeline):
        for kind in ("prefill", "decode", "train_step", "publish"):
            busy = union(clip(records.intervals(kind, replica=name), *window))
            if busy:
                figures[f"{name} {kind}, part of the time"] = total_s(busy) / length_s
    decoding = union(clip(records.intervals("decode"), *window))
    figures["training and decoding at once, part of the time"] = total_s(intersection(trained, decoding)) / length_s
    return figures


def functions(stacks_dir: Path, limit: int = 12) -> dict[str, list[tuple[str, float]]]:
    """For each process the functions with the most samples of their own, in parts of the process's samples."""
    found: dict[str, list[tuple[str, float]]] = {}
    for file in sorted(stacks_dir.glob("*.txt")):
        own: Counter[str] = Counter()
        for line in file.read_text(errors="replace").splitlines():
            frames, _, count = line.rpartition(" ")
            own[frames.split(";")[-1]] += int(count)
        total = sum(own.values())
        found[file.stem] = [(name, count / total) for name, count in own.most_common(limit)]
    return found


def print_tables(table: dict[str, dict[str, float]], phases: dict[str, tuple[float, float]], records: Any) -> float:
    names = sorted(table, key=lambda name: -sum(table[name].values()))
    print(f"\n| CPU seconds | {' | '.join(phases)} | all |\n|{'---|' * (len(phases) + 2)}")
    for name in names:
        cells = [f"{table[name].get(phase, 0.0):.1f}" for phase in phases]
        print(f"| {name} | {' | '.join(cells)} | {sum(table[name].values()):.1f} |")
    sums = {phase: sum(row.get(phase, 0.0) for row in table.values()) for phase in phases}
    total = sum(sums.values())
    print(f"| **together** | {' | '.join(f'{value:.1f}' for value in sums.values())} | {total:.1f} |")
    walls = {phase: end_s - start_s for phase, (start_s, end_s) in phases.items()}
    print(f"| wall | {' | '.join(f'{value:.1f}' for value in walls.values())} | {sum(walls.values()):.1f} |\n")
    print("| a step, median | |\n|---|---|")
    for name, value in anatomy(records).items():
        print(f"| {name} | {value:.3f} |")
    for accuracy in records.of_kind("evaluation"):
        print(json.dumps(accuracy))
    return total


def _option(arguments: list[str], name: str) -> str | None:
    if name not in arguments:
        return None
    index = arguments.index(name)
    value = arguments[index + 1]
    del arguments[index : index + 2]
    return value


def main() -> None:
    arguments = sys.argv[1:]
    stacks, budget = _option(arguments, "--stacks"), _option(arguments, "--budget-s")
    stacks_dir = Path(stacks) if stacks else None
    directory, sampler, begun_s, ended_s = run(arguments, stacks_dir)
    records = read_run(directory)
    phases = boundaries(records, begun_s, ended_s)
    total = print_tables(by_process(sampler, phases), phases, records)
    if stacks_dir is not None:
        for name, top in functions(stacks_dir).items():
            print(f"\n{name}")
            for function, part in top:
                print(f"  {part:6.1%}  {function}")
    if budget is not None and total > float(budget):
        sys.exit(f"{total:.0f} CPU seconds exceed the budget of {budget} s")


if __name__ == "__main__":
    main()
