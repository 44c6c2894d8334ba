"""`slipstream sft`: the supervised warm-up alone, in a run directory of its own."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from slipstream.common.config import dump_toml
from slipstream.launcher import child
from slipstream.launcher.cards import variables_of
from slipstream.launcher.config import RunConfig
from slipstream.launcher.ports import LOOPBACK
from slipstream.launcher.resolve import resolve
from slipstream.launcher.rundir import RunLock, create_run_dir, shown
from slipstream.launcher.services import service_command, write_configs
from slipstream.launcher.session import ASKED_TO_STOP, STOP_SIGNALS

REPLICA = "trainer"
POLL_S = 0.1
GRACE_S = 10.0
"""In which ranks find out by themselves that one is gone, and say which."""


def run_sft(config: RunConfig) -> int:
    """Warm up and leave the model in the run directory; returns the exit code."""
    run = create_run_dir(config.run.directory, config.run.name)
    lock = RunLock(run)
    # It speaks to nobody, so its peers' addresses do not matter; only its own file is written.
    nowhere: dict[str, str] = dict.fromkeys(
        (REPLICA, "orchestrator", "broadcaster", "prefill-1", "decode-1"), f"{LOOPBACK}:1"
    )
    run.config_file.write_text(dump_toml(config))
    write_configs(run, {REPLICA: resolve(config, run, nowhere, redis_url="redis://localhost")[REPLICA]})
    print(f"warming up in {shown(run.path)}; log: {shown(run.log_file(REPLICA))}", flush=True)
    try:
        code = run_children([service_command("slipstream.trainer.sft", run, REPLICA, variables_of(config, REPLICA))])
    finally:
        lock.release()
    if code is None:
        print(f"{run.name} was stopped before the warm-up ended")
        return 0
    if code == 0:
        print(f"{run.name} finished: the model is in {shown(run.path / 'model')}")
    else:
        why = f"the warm-up exited with code {code}; its log is {run.log_file(REPLICA)}"
        print(f"{run.name} ended: {why}", file=sys.stderr)
    return code


def run_children(commands: Sequence[tuple[str, ...]]) -> int | None:
    """Run all to the end with our own output; they get a stop signal, and die with us. None: `slipstream stop`.

    The code is that of the first that failed; the others have `GRACE_S` then.
    """
    processes = [subprocess.Popen(child.guarded(command), process_group=0) for command in commands]

    def pass_on(number: int, _frame: FrameType | None) -> None:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        stopped.append(None if number == ASKED_TO_STOP else 128 + number)

    stopped: list[int | None] = []
    for number in STOP_SIGNALS:
        signal.signal(number, pass_on)
    code = _first_failure(processes)
    return stopped[0] if stopped else 128 - code if code < 0 else code


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all to end; returns the code of the first that did not end well, or 0."""
    first, deadline_s, left = 0, math.inf, list(processes)
    while left:
        if len(left) == 1 and not first:
            return left[0].wait()
        ended = [process for process in left if process.poll() is not None]
        left = [process for process in left if process not in ended]
        failed = [process.returncode for process in ended if process.returncode]
        if failed and not first:
            first, deadline_s = failed[0], time.monotonic() + GRACE_S
        if time.monotonic() > deadline_s:
            for process in left:
                process.kill()
        time.sleep(POLL_S)
    return first
