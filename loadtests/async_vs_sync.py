"""What asynchrony is worth: the same training, synchronous and asynchronous, one after the other on this machine.

    python loadtests/async_vs_sync.py

Runs the whole stack through `slipstream rl` twice, from one warmed-up model, on the same tasks. The configuration is
`examples/demo.toml` with `async_vs_sync.toml` on top; each rollout waits for its tools as long as `tool_waits.py` draws
for it, the same in both modes. The modes differ in one setting, `orchestrator.max_off_policy_steps`: 0 is synchronous.
Synchronous training gets its best: a place for every group of a step at once, two decode workers and a prefill worker
for the two cores, and for the optimizer step as many torch threads as make it fastest here (timed first).

Asserts, and ends with 1 if one does not hold:

* asynchronous training trains at least 1.5 times the tokens a second, from its first dispatch to its last step;
* it reaches at least 0.9 of the ideal overlap, by both readings of it.

**Ideal overlap.** A step needs three things: the trainer, one step after another (`trainer_s`); places in the runner,
each held by a group from dispatch to score (`generation_s`: what the groups of a step hold, over the places);
processors (`cpu_s`: what all processes use, over the cores). If the three overlap perfectly, a step takes as long as
the largest: `ideal_s`. Each is the smaller of what the two runs measured: the trainer's chain; a group's own tool waits
as drawn plus the mean time of its turn; processor time of every process of the run. Read twice, because each reading
alone can flatter:

* `ideal / asynchronous`: the part of the ideal's throughput that is reached. A slow opponent cannot improve it.
* `(synchronous - asynchronous) / (synchronous - ideal)`: the part of the time that could be hidden and was. The harder
  one where synchronous training is close to the ideal already.

Both use steps in full swing: the first, and the last ones that find no more groups to admit, are left out, as a run of
hundreds of steps has them once. The ratio of tokens a second includes them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import psutil
from phases import Ideal, RunPhases, StepPhases, percentile, reached_after_s
from tool_waits import ToolWaits

from slipstream.launcher.child import guarded

HERE = Path(__file__).resolve().parent
CONFIGS = ("@", str(HERE.parent / "examples" / "demo.toml"), "@", str(HERE / "async_vs_sync.toml"))
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(HERE.parent / "services"), str(HERE), os.environ.get("PYTHONPATH", "")]),
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",  # threads that spin for work would take the cores from the other processes
}
MAX_OFF_POLICY_STEPS = 6
SEED = 0
GROUPS_PER_STEP, SAMPLES_PER_GROUP, PLACES = 32, 8, 32

NEEDED_RATIO = 1.5
NEEDED_OVERLAP = 0.9
RUN_TIMEOUT_S = 900.0
SAMPLE_PERIOD_S = 0.5


@dataclass
class Processors:
    """Processor time of a process tree and of the whole machine, sampled while it runs."""

    samples: list[tuple[float, float, float]]
    """(Unix time, seconds used by the tree so far, seconds used on the machine so far)"""

    def used_s(self, start_s: float, end_s: float) -> tuple[float, float]:
        """Seconds that the tree, and everybody else, used between two times."""
        tree = self._at(end_s, 1) - self._at(start_s, 1)
        return tree, max(self._at(end_s, 2) - self._at(start_s, 2) - tree, 0.0)

    def _at(self, time_s: float, column: int) -> float:
        return min(self.samples, key=lambda sample: abs(sample[0] - time_s))[column]


@dataclass
class Mode:
    """One run and what it used."""

    name: str
    phases: RunPhases
    processors: Processors


def slipstream(*arguments: str, directory: Path) -> Processors:
    """Run a command of the launcher to its end, sampling what it uses. Raises when it fails."""
    command = guarded((sys.executable, "-m", "slipstream.launcher", *arguments))
    samples: list[tuple[float, float, float]] = []
    process = subprocess.Popen(command, cwd=directory, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    ended = threading.Event()
    sampler = threading.Thread(target=_sample, args=(psutil.Process(process.pid), samples, ended), daemon=True)
    sampler.start()
    try:
        output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    finally:
        ended.set()
        sampler.join()
        if process.poll() is None:
            process.terminate()
            process.wait(30)
    if process.returncode:
        raise SystemExit(f"slipstream {arguments[0]} ended with {process.returncode}:\n{output}")
    return Processors(samples)


def _sample(root: psutil.Process, samples: list[tuple[float, float, float]], ended: threading.Event) -> None:
    seen: dict[psutil.Process, float] = {}
    while not ended.wait(SAMPLE_PERIOD_S):
        try:
            tree = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in tree:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            seen[process] = times.user + times.system
        machine = psutil.cpu_times()
        busy = sum(machine) - machine.idle - machine.iowait - machine.guest - machine.guest_nice
        samples.append((time.time(), sum(seen.values()), busy))


def fastest_threads() -> tuple[int, dict[int, float]]:
    """Torch threads with which an optimizer step takes the least time here, and the seconds of each count."""
    times = {}
    for threads in range(1, (os.cpu_count() or 1) + 1):
        command = [sys.executable, str(HERE / "training_threads.py"), str(threads)]
        result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True, timeout=120)
        times[threads] = float(result.stdout)
    return min(times, key=lambda count: times[count]), times


def run_mode(name: str, bound: int, threads: int, model: Path, steps: int, directory: Path) -> Mode:
    processors = slipstream(
        *("rl", *CONFIGS, "--run.name", name, "--run.seed", str(SEED), "--trainer.initial-model", str(model)),
        *("--orchestrator.max-off-policy-steps", str(bound), "--orchestrator.total-steps", str(steps)),
        *("--trainer.torch-threads", str(threads)),
        directory=directory,
    )
    return Mode(name, RunPhases(directory / "runs" / name), processors)


def drawn_s(phases: RunPhases, waits: ToolWaits) -> dict[int, float]:
    """The tool wait of each group that a run trained on, by position."""
    return {p: waits.group_s(SEED, index, SAMPLES_PER_GROUP) for p, index in phases.task_indexes().items()}


def turn_s(phases: RunPhases, waits: ToolWaits) -> float:
    """Mean time that a group holds its place for anything but its tools: prompt, placement, prefill, decode, score."""
    drawn = drawn_s(phases, waits)
    return fmean(group.held_s - drawn[group.position] for group in phases.groups)


def ideal_of(modes: list[Mode], waits: ToolWaits, first: int, last: int) -> Ideal:
    """The ideal step from `first` to `last`: each resource as the more favourable of the runs measured it."""
    phases = modes[-1].phases
    drawn = drawn_s(phases, waits)
    wait_s = sum(drawn[position] for position in phases.trained_positions(first, last)) / (last - first + 1)
    shortest_turn_s = min(turn_s(mode.phases, waits) for mode in modes)
    return Ideal(
        trainer_s=min(mode.phases.trainer_s() for mode in modes),
        generation_s=(wait_s + GROUPS_PER_STEP * shortest_turn_s) / PLACES,
        cpu_s=min(cpu_step_s(mode, first, last) for mode in modes) / (os.cpu_count() or 1),
    )


def cpu_step_s(mode: Mode, first: int, last: int) -> float:
    start_s, end_s = mode.phases.trained_s[first - 1], mode.phases.trained_s[last]
    return mode.processors.used_s(start_s, end_s)[0] / (last - first + 1)


def common_accuracy(modes: list[Mode]) -> float:
    """The highest accuracy, in steps of 0.05, that the training rollouts of both runs came to."""
    return min(int(max(value for _, value in mode.phases.curve()) * 20) / 20 for mode in modes)


def print_mode(mode: Mode, waits: ToolWaits) -> None:
    phases = mode.phases
    start_s, end_s = phases.started_s, phases.trained_s[phases.last_step]
    ours_s, others_s = mode.processors.used_s(start_s, end_s)
    wall_s = phases.training_wall_s
    lags = phases.lags()
    lag_mean = sum(lag * count for lag, count in lags.items()) / sum(lags.values())
    print(
        f"{mode.name:12}  {phases.last_step} steps, {phases.trained_tokens} tokens in {wall_s:.1f} s: "
        f"{phases.tokens_per_s:.0f} tokens/s\n"
        f"              lag mean {lag_mean:.2f}, p95 {percentile(lags, 0.95)}, max {max(lags)} versions; "
        f"{phases.cancelled_groups} groups given up\n"
        f"              processors {ours_s / wall_s:.2f} of {os.cpu_count()} cores, others on the machine "
        f"{others_s / wall_s:.2f}; places held {phases.places_held() / PLACES:.0%}\n"
        f"              a group waits {fmean(drawn_s(phases, waits).values()):.3f} s for tools, its turn takes "
        f"{turn_s(phases, waits):.3f} s; a step's trainer {phases.trainer_s():.3f} s"
    )
    held_out = ", ".join(f"{accuracy:.2f} {name}" for name, accuracy in phases.evaluations.items())
    print(f"              held-out accuracy {held_out}; rollouts {phases.curve()[-1][1]:.2f} at the end")


def print_phases(phases: StepPhases) -> None:
    print(
        f"synchronous step {phases.total_s:.3f} s = generate {phases.generate_s:.3f} + train {phases.train_s:.3f}"
        f" + publish {phases.publish_s:.3f} + update {phases.update_s:.3f}"
    )


def judge(modes: list[Mode], waits: ToolWaits) -> bool:
    """Print the comparison; whether it holds."""
    synchronous, asynchronous = modes
    first, last = 3, asynchronous.phases.last_step - MAX_OFF_POLICY_STEPS - 1
    ideal = ideal_of(modes, waits, first, last)
    synchronous_s, step_s = (mode.phases.step_s(first, last) for mode in modes)
    ratio = asynchronous.phases.tokens_per_s / synchronous.phases.tokens_per_s
    print_phases(synchronous.phases.phases())
    print(
        f"steps {first} to {last}: synchronous {synchronous_s:.3f} s, asynchronous {step_s:.3f} s, ideal "
        f"{ideal.step_s:.3f} s, bound by {ideal.bound_by}\n"
        f"              trainer {ideal.trainer_s:.3f} s, generation {ideal.generation_s:.3f} s, "
        f"processors {ideal.cpu_s:.3f} s"
    )
    accuracy = common_accuracy(modes)
    reached = [reached_after_s(mode.phases.curve(), accuracy) for mode in modes]
    print(
        f"accuracy {accuracy:.2f} of training rollouts after "
        + ", ".join(
            f"{mode.name} {time_s:.1f} s" for mode, time_s in zip(modes, reached, strict=True) if time_s is not None
        )
    )
    checks = [
        ("trained tokens a second, asynchronous / synchronous", ratio, NEEDED_RATIO),
        ("overlap: ideal / asynchronous step", ideal.reached(step_s), NEEDED_OVERLAP),
        ("overlap: hidden / hideable time", ideal.hidden(synchronous_s, step_s), NEEDED_OVERLAP),
    ]
    for what, value, needed in checks:
        print(f"{'ok' if value >= needed else 'MISSED':6}  {what}: {value:.2f}, needed {needed:.2f}")
    return all(value >= needed for _, value, needed in checks)


def compare(steps: int, model: Path | None, directory: Path) -> int:
    waits = ToolWaits()
    shape = ", ".join(f"p{round(100 * q)} {waits.quantile_s(q):.2f} s" for q in (0.5, 0.9, 0.99))
    print(f"tool waits of a rollout: {shape}, cut at {waits.cut_s:.2f} s; {SAMPLES_PER_GROUP} rollouts a group")
    threads, times = fastest_threads()
    timed = ", ".join(f"{count} torch threads {time_s:.3f} s" for count, time_s in times.items())
    print(f"optimizer step alone: {timed}; the synchronous trainer gets {threads}", flush=True)
    if model is None:
        slipstream("sft", *CONFIGS, "--run.name", "warm-up", "--run.seed", str(SEED), directory=directory)
        model = directory / "runs" / "warm-up" / "model"
    modes = []
    for name, bound, count in (("synchronous", 0, threads), ("asynchronous", MAX_OFF_POLICY_STEPS, 1)):
        modes.append(run_mode(name, bound, count, model.resolve(), steps, directory))
        print_mode(modes[-1], waits)
        print(f"              load average {os.getloadavg()[0]:.1f}", flush=True)
    return 0 if judge(modes, waits) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Asynchronous against synchronous training on this machine.")
    parser.add_argument("--steps", type=int, default=28, help="optimizer steps of each run (default 28, at least 16)")
    parser.add_argument("--directory", type=Path, help="keep the runs here (default: a temporary directory)")
    parser.add_argument("--initial-model", type=Path, help="a model of `slipstream sft`; otherwise one is warmed up")
    arguments = parser.parse_args()
    if arguments.steps < 16:  # fewer leave no steps in full swing to measure
        parser.error("--steps: at least 16")
    with tempfile.TemporaryDirectory(prefix="async-vs-sync-") as scratch:
        directory = (arguments.directory or Path(scratch)).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        return compare(arguments.steps, arguments.initial_model, directory)


if __name__ == "__main__":
    sys.exit(main())
