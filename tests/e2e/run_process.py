"""A run of all services, started as a person would start it, and what can be seen of it from outside."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.environments.tokenizer import TextCodec
from slipstream.launcher.child import guarded
from slipstream.launcher.rollout_files import read_rollouts
from slipstream.orchestrator.tasks import MixtureEntry, TaskSequence

HERE = Path(__file__).parent
SERVICES = HERE.parents[1] / "services"

DEADLINE_S = 400.0
"""By then a thing has happened that is going to happen, on any machine. No figure of how long it takes."""
LEFT_S = 60.0
"""The same of what ends by itself once its parent has ended. What should not be there lives longer."""

RETRIES = 60
"""Of an OpenAI client, eight seconds apart, whose processes are started again meanwhile."""

PREFILLING = ("--prefill.replicas", "1")
"""A worker that computes prompts, beside the one that samples."""

TERMINAL = {"filtered", "failed", "dropped", "aged_out", "cancelled"}
"""How a position ends that is not sealed."""

SMALL = """
[run]
name = "small"

[sft]
enabled = false

[orchestrator]
total_steps = 4
groups_per_step = 4
samples_per_group = 4
micro_batch_tokens = 1024
# Starts and ends take as long as the machine needs.
pool_timeout_s = 300

[launcher]
stop_timeout_s = 120

# Who needs a prefill pool says so: it takes a fifth of a run's start.
[prefill]
replicas = 0

[decode]
replicas = 1

# Groups wait at a gate for as long as a test needs.
[runner]
environment_timeout_s = 600

[evaluation]
before = false
after = false

[[environments]]
type = "import"
name = "letters"
path = "letters:Letters"
max_new_tokens = 40
evaluation_task_count = 4
"""


GROUPS_PER_STEP = 4
TASK_COUNT = 1_000_000
"""Of the environment, as is its default."""


def gated(gate: Path, positions: Iterable[int]) -> str:
    """Options of the environment: groups at these positions do not end before the file `gate` is there.

    So a run waits at a step for what a test does to it, however fast its machine is.
    """
    tasks = TaskSequence(0, [MixtureEntry("letters", 1.0, TASK_COUNT)])
    return f'gate = "{gate}"\ngated = {[tasks.task(position).index for position in positions]}'


def gated_after(step: int, gate: Path) -> str:
    """The same for a run that is to take this step and not the next, for which half of the groups are let through.

    So it does not matter if that many before were filtered out.
    """
    first = GROUPS_PER_STEP * step + 2
    return gated(gate, range(first, first + 1000))


def living_paths(directory: Path, pattern: str) -> list[Path]:
    """The paths of a pattern in a directory where a service deletes at the same time.

    `Path.glob` raises where a folder is gone between its listing and its reading; this leaves it out.
    """
    return [directory / path for path in glob.iglob(pattern, root_dir=directory)]


class RunProcess:
    """`slipstream rl` or `up` in a directory of its own, on a configuration that ends in seconds."""

    def __init__(
        self,
        directory: Path,
        name: str,
        *arguments: str,
        command: str = "rl",
        options: str = "",
        enter: tuple[str, ...] = (),
        inside: Path | None = None,
        resume: bool = False,
    ) -> None:
        """`enter`: what to start commands through, where the run has a file system of its own.

        Its directory, `directory` from here, is then `inside` from there. `resume`: go on with the run of that name.
        """
        self.directory = directory
        self.inside = inside or directory
        self.enter = enter
        self.path = directory / "runs" / name
        config_file = directory / f"{name}.toml"
        config_file.write_text(SMALL + (f"[environments.options]\n{options}\n" if options else ""))
        # Beside a small disk, not on it.
        self.output_file = self.inside.with_name(f"{name}.out") if enter else directory / f"{name}.out"
        fresh = ("@", config_file.name, "--run.name", name, *arguments)
        command_words = command_line(command, *(("--resume", name) if resume else fresh))
        with self.output_file.open("wb") as output:
            self.process = subprocess.Popen(
                # Guarded: it dies with the tests, whatever ends those.
                guarded((*enter, *command_words)),
                cwd=None if enter else directory,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # as a terminal would
            )
        self._seen: dict[int, psutil.Process] = {}

    def slipstream(self, *arguments: str, timeout_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
        """Another `slipstream` command, typed in the same directory."""
        return subprocess.run(
            [*self.enter, *command_line(*arguments)],
            cwd=None if self.enter else self.directory,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    # ---- what the run says of itself

    @property
    def output(self) -> str:
        return self.output_file.read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return of_kind(read_lines(self.path / "launcher.jsonl"), kind)

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        return of_kind(read_lines(self.path / "metrics.jsonl"), kind)

    def journal(self) -> list[dict[str, Any]]:
        return [json.loads(line.partition(" ")[2]) for line in whole_lines(self.path / "journal" / "journal.jsonl")]

    def rollouts(self) -> list[dict[str, Any]]:
        return list(read_rollouts(self.path / "rollouts"))

    def report(self) -> dict[str, Any]:
        return json.loads((self.path / "report.json").read_text())

    def setting(self, replica: str, section: str, key: str) -> Any:
        return tomllib.loads((self.path / "configs" / f"{replica}.toml").read_text())[section][key]

    def pid(self, replica: str) -> int:
        return [event["pid"] for event in self.events("service_started") if event["replica"] == replica][-1]

    # ---- waiting

    def wait_until(self, condition: Callable[[], Any], timeout_s: float = DEADLINE_S) -> None:
        """Wait while the run goes on; fail with its output when it ends before."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            over = self.process.poll() is not None  # looked at first: what it did last counts
            if condition():
                return
            assert not over, self.output
            assert time.monotonic() < deadline_s, f"not within {timeout_s} s\n{self.output}"
            time.sleep(0.05)

    def wait_up(self) -> None:
        self.wait_until(lambda: "all services are up" in self.output)
        self.processes()

    def wait_step(self, step: int) -> None:
        self.wait_until(lambda: any(record["step"] >= step for record in self.metrics("step")))

    def end(self, timeout_s: float = DEADLINE_S) -> int:
        """Wait for the launcher's end; its exit code."""
        return self.process.wait(timeout=timeout_s)

    # ---- processes

    def processes(self) -> list[psutil.Process]:
        """Every process of the run: what descends from the launcher, and whoever has its directory on the command line.

        What was seen once is looked for again by itself, since it may have lost its parent since.
        """
        if self.process.poll() is None:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self._seen[process.pid] = process
        found = {pid: process for pid, process in self._seen.items() if lives(process)}
        run_path = str(self.inside / "runs" / self.path.name)
        for process in psutil.process_iter(["cmdline"]):
            named = any(run_path in part for part in process.info["cmdline"] or ())
            if named and process.pid != self.process.pid and lives(process):
                found[process.pid] = process
        return list(found.values())

    def left_after(self, grace_s: float = LEFT_S) -> list[str]:
        """Command lines of what is still there after `grace_s`; ends early when nothing is."""
        return left_of(lambda: [described(process) for process in self.processes()], grace_s)

    def destroy(self) -> None:
        """Leave nothing to other tests, however this one ended."""
        left = self.processes()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for process in left:
            if lives(process):
                process.kill()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., RunProcess]]:
    """Starts runs in one directory: `launch("small", "--orchestrator.total-steps", "9")`; with `disk=`, on that."""
    with launching(tmp_path) as start:
        yield start


@contextlib.contextmanager
def launching(directory: Path) -> Iterator[Callable[..., RunProcess]]:
    """What `launch` is, for fixtures of a wider scope."""
    launched: list[RunProcess] = []

    def start(name: str, *arguments: str, disk: Any = None, **options: Any) -> RunProcess:
        if disk is not None:
            launched.append(RunProcess(disk.path, name, *arguments, enter=disk.enter, inside=disk.inside, **options))
            return launched[-1]
        launched.append(RunProcess(directory, name, *arguments, **options))
        return launched[-1]

    try:
        yield start
    finally:
        for run in launched:
            run.destroy()


def command_line(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "slipstream.launcher", *arguments]


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(SERVICES), str(HERE), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def marked(marker: str) -> list[str]:
    """Command lines of all processes that have `marker` on theirs."""
    found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [" ".join(parts) for parts in found if any(marker in part for part in parts)]


def left_of(found: Callable[[], list[str]], grace_s: float = LEFT_S) -> list[str]:
    """What `found` still finds after `grace_s`; ends early when it finds nothing."""
    deadline_s = time.monotonic() + grace_s
    while (left := found()) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return left


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def described(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())}"
    except psutil.Error:
        return str(process.pid)


def whole_lines(path: Path) -> list[str]:
    """Lines of a file; the last one may still be on its way, and is left out."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines of a file that may still grow."""
    return [json.loads(line) for line in whole_lines(path)]


def of_kind(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record.get("kind") == kind]


def terminal_outcomes(journal: list[dict[str, Any]]) -> set[int]:
    """How often the positions that were handed out ended."""
    return set(ends_of_positions(journal).values())


def open_positions(journal: list[dict[str, Any]]) -> set[int]:
    """Positions that were handed out and have not ended."""
    return {position for position, ends in ends_of_positions(journal).items() if not ends}


def ends_of_positions(journal: list[dict[str, Any]]) -> dict[int, int]:
    """How often each position that was handed out has ended."""
    ends: Counter[int] = Counter()
    for record in journal:
        if record["kind"] == "ended":
            assert record["outcome"] in TERMINAL
            ends[record["position"]] += 1
        if record["kind"] == "sealed":
            ends.update(record["positions"])
    return {record["position"]: ends[record["position"]] for record in journal if record["kind"] == "acquired"}


def steps_of(rollout: dict[str, Any]) -> list[int]:
    """Step of the weights that sampled each span of a rollout."""
    return [int(version.partition(".")[2]) for _, version in rollout["versions"]]


def said_by(codec: TextCodec, token_ids: list[int]) -> str:
    """What an environment is shown of a turn: all tokens but the end token, other special ones among them."""
    return codec.decode_all([each for each in token_ids if each != codec.end_id]).strip()
