"""Asserts that a long run neither grows nor fills the disk: 500 steps of the whole stack, in minutes.

    python loadtests/soak.py --steps 500

Every process of a run of a very small model is looked at five times a second: the memory it took, and the bytes of each
directory of the run. After the first third, caches and pools are full; from there on a straight line through each
process's memory must rise by less than 0.1 MB a step. The bounds of all files are set so low that they are reached.
Prints a table of both and exits non-zero when one does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "services"))

if TYPE_CHECKING:
    from slipstream.environments.base import Completion, Score, Split, Task
    from slipstream.environments.config import ImportedConfig
    from slipstream.environments.tools import Tools

ALLOWED_MB_A_STEP = 0.1
SAMPLE_INTERVAL_S = 0.2
START_TIMEOUT_S = 120.0
STEP_TIMEOUT_S = 60.0
PROGRESS_STEPS = 50

KIB, MIB = 2**10, 2**20
LOG_BYTES, LOG_FILES = 16 * KIB, 1
TIMELINE_BYTES = 16 * KIB
ROLLOUT_BYTES = 64 * KIB
METRICS_BYTES = 128 * KIB
JOURNAL_BYTES = 128 * KIB
VERSIONS = 3
SLACK_BYTES = 16 * KIB
"""What a file may exceed its bound by between two looks at it: a record, or what was printed."""

CONFIG = f"""
[run]
name = "soak"

[launcher]
log_limit_bytes = {LOG_BYTES}
log_kept_files = {LOG_FILES}

[model]
dim = 32
n_layers = 1
n_heads = 2
n_kv_heads = 1
head_dim = 16
expert_dim = 32

[sft]
enabled = false

[orchestrator]
groups_per_step = 2
samples_per_group = 4
micro_batch_tokens = 1024
metrics_limit_bytes = {METRICS_BYTES}
journal_limit_bytes = {JOURNAL_BYTES}

[orchestrator.keeper]
poll_interval_s = 0.5

[broadcaster]
keep_version_count = {VERSIONS}
prune_interval_s = 0.5

[runner]
rollout_log_limit_bytes = {ROLLOUT_BYTES}
spool_limit_bytes = {MIB}

[trainer]
timeline_limit_bytes = {TIMELINE_BYTES}

[prefill]
timeline_limit_bytes = {TIMELINE_BYTES}
engine = {{ block_count = 512, route_bytes = {MIB} }}

[decode]
replicas = 1
timeline_limit_bytes = {TIMELINE_BYTES}
engine = {{ block_count = 512, route_bytes = {MIB} }}

[evaluation]
before = false
after = false

[[environments]]
type = "import"
name = "letters"
path = "soak:Letters"
max_new_tokens = 6
evaluation_task_count = 4
"""


class Letters:
    """Rewards late letters of the alphabet: a random model's groups differ, so every one is trained on.

    One group in eight is judged by a program in the sandbox, too.
    """

    def __init__(self, config: ImportedConfig, seed: int) -> None:
        self.name = config.name

    def task(self, split: Split, index: int) -> Task:
        from slipstream.environments.base import Task

        return Task(split, index)

    def prompt(self, task: Task) -> str:
        return f"{task.split} {task.index}\n"

    async def score(self, task: Task, completions: Sequence[Completion], tools: Tools) -> list[Score]:
        from slipstream.common.sandbox_client import SandboxLimits
        from slipstream.environments.base import Score

        if task.index % 8 == 0:
            await tools.run_python("print(sum(range(1000)))", b"", SandboxLimits(wall_s=5.0))
        rewards = [ord(completion.text[0]) / 128 if completion.text else 0.0 for completion in completions]
        return [Score(reward, reward > 0.75) for reward in rewards]

    def demonstration(self, index: int, *, validation: bool = False) -> tuple[str, str] | None:
        return None


@dataclass
class Samples:
    """What was seen over the run."""

    steps: list[int] = field(default_factory=list)
    memory_mb: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    """By process: step and memory."""
    disk_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """By directory: the most at any time."""


class Soak:
    """A run and what can be seen of it from outside."""

    def __init__(self, directory: Path, steps: int) -> None:
        self.steps = steps
        self.path = directory / "runs" / "soak"
        self.samples = Samples()
        config = directory / "soak.toml"
        config.write_text(CONFIG)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "services"), str(ROOT / "loadtests")]),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "slipstream.launcher", "rl", "@", str(config)]
        command += ["--orchestrator.total-steps", str(steps)]
        self.output = directory / "soak.out"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(command, cwd=directory, env=environment, stdout=output, stderr=output)

    def watch(self) -> None:
        """Sample until the run has ended."""
        looked_s = time.monotonic()
        while self.process.poll() is None:
            time.sleep(SAMPLE_INTERVAL_S)
            step = self._step()
            if not self.samples.steps or step > self.samples.steps[-1]:
                looked_s = time.monotonic()
            waited_s = time.monotonic() - looked_s
            if waited_s > (STEP_TIMEOUT_S if step else START_TIMEOUT_S):
                raise TimeoutError(f"no step in {waited_s:.0f} s\n{self.output.read_text()}")
            if step // PROGRESS_STEPS > (self.samples.steps or [0])[-1] // PROGRESS_STEPS:
                print(f"soak: step {step} of {self.steps}", file=sys.stderr, flush=True)
            self.samples.steps.append(step)
            self._sample(step)
        if self.process.returncode:
            raise RuntimeError(self.output.read_text())

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()

    def _step(self) -> int:
        """The newest step in the metrics; they may have moved to a new file this moment."""
        for name in ("metrics.jsonl", "metrics.jsonl.1"):
            for record in reversed(json_lines(self.path / name)):
                if record.get("kind") == "step":
                    return int(record["step"])
        return 0

    def _sample(self, step: int) -> None:
        for name, pid in self._processes().items():
            size_mb = memory_mb(pid)
            if size_mb is not None and step:
                self.samples.memory_mb[name].append((step, size_mb))
        for name in ("logs", "journal", "rollouts", "timeline", "versions", "metrics.jsonl"):
            size_bytes = disk_bytes(self.path, name)
            self.samples.disk_bytes[name] = max(self.samples.disk_bytes[name], size_bytes)

    def _processes(self) -> dict[str, int]:
        found = {"launcher": self.process.pid}
        for event in json_lines(self.path / "launcher.jsonl"):
            if event.get("kind") == "service_started":
                found[str(event["replica"])] = int(event["pid"])
        for child in children(found.get("runner-1", 0)):
            found["environment worker"] = child
        return found


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a file that somebody writes."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def memory_mb(pid: int) -> float | None:
    """Anonymous memory: what a process took for itself. Shared pages of files come and go with other processes."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024


def disk_bytes(run: Path, name: str) -> int:
    """Bytes of a directory, or of a file and the older ones that it became."""
    if (run / name).is_dir():  # walked, since a folder may go while it is looked at
        paths = [Path(folder, file) for folder, _, files in os.walk(run / name) for file in files]
    else:
        paths = [*run.glob(f"{name}*")]
    total = 0
    for path in paths:
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # moved or pruned meanwhile
            continue
    return total


def slope(points: Sequence[tuple[int, float]]) -> float:
    """Of the straight line through the points with the least squared error."""
    count = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def report_memory(samples: Samples, steps: int) -> list[str]:
    """Print the table; returns what is too much."""
    failures = []
    print(f"{'process':<20}{'MB at 1/3':>12}{'MB at end':>12}{'MB a step':>12}")
    for name, points in samples.memory_mb.items():
        later = [(step, size) for step, size in points if step >= steps / 3]
        if len(later) < 3:
            failures.append(f"{name}: only {len(later)} samples; take more steps")
            continue
        rise = slope(later)
        print(f"{name:<20}{later[0][1]:>12.1f}{later[-1][1]:>12.1f}{rise:>12.4f}")
        if rise >= ALLOWED_MB_A_STEP:
            failures.append(f"{name} grows by {rise:.3f} MB a step, {ALLOWED_MB_A_STEP} are allowed")
    return failures


def allowed_bytes(run: Path) -> dict[str, int]:
    """The most that each directory may hold, from the configured bounds."""
    replicas = len(list((run / "configs").glob("*.toml"))) + 1  # Valkey has a log and no configuration
    # Of each process a log and what it printed; the latter is looked at every two seconds.
    logs = replicas * 2 * ((LOG_BYTES + SLACK_BYTES) * (LOG_FILES + 1))
    timelines = len(list((run / "timeline").glob("*.jsonl")))
    version = max(disk_bytes(path, "") for path in (run / "versions").iterdir())
    return {
        "logs": logs,
        "journal": JOURNAL_BYTES + SLACK_BYTES,
        "rollouts": ROLLOUT_BYTES + SLACK_BYTES,
        "timeline": timelines * (TIMELINE_BYTES + SLACK_BYTES),
        "metrics.jsonl": METRICS_BYTES + SLACK_BYTES,
        # Those kept, the served one, the one that is being published, and those of one prune interval.
        "versions": (VERSIONS + 2 + 8) * version,
    }


def report_disk(samples: Samples, run: Path) -> list[str]:
    """Print the table; returns what is too much."""
    failures = []
    allowed = allowed_bytes(run)
    print(f"{'directory':<20}{'most KiB':>12}{'allowed':>12}")
    for name, most in samples.disk_bytes.items():
        print(f"{name:<20}{most / KIB:>12.0f}{allowed[name] / KIB:>12.0f}")
        if most > allowed[name]:
            failures.append(f"{name} held {most} bytes, {allowed[name]} are allowed")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=60, help="500 is a soak; the default fits into CI")
    steps = parser.parse_args().steps
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # leave nothing running
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        soak = Soak(Path(directory), steps)
        try:
            soak.watch()
        finally:
            soak.stop()
        wall_s = time.monotonic() - begun_s
        failures = report_memory(soak.samples, steps) + report_disk(soak.samples, soak.path)
    print(f"soak: {steps} steps in {wall_s:.0f} s; {'; '.join(failures) or 'memory and disk are bounded'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
