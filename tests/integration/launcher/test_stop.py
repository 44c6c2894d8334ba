"""`slipstream stop` from another process."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from slipstream.launcher.errors import RunDirError
from slipstream.launcher.report import write_report
from slipstream.launcher.rundir import RunLock, create_run_dir, launcher_pid
from slipstream.launcher.status import ended_run
from slipstream.launcher.stop import stop_run, stop_timeout_s

HOLD = """
import pathlib, sys, time
from slipstream.launcher.rundir import RunDir, RunLock
lock = RunLock(RunDir(pathlib.Path(sys.argv[1])))
print("held", flush=True)
time.sleep(60)
"""


def test_stop_waits_as_long_as_the_run_may_take(tmp_path):
    run = create_run_dir(tmp_path, "demo")
    assert stop_timeout_s(run) == 20.0
    run.config_file.write_text("[launcher]\nstop_timeout_s = 300.0\n")
    assert stop_timeout_s(run) == 300.0


def test_stop_ends_the_launcher_and_waits_for_it(tmp_path, capsys):
    run = create_run_dir(tmp_path, "demo")
    run.config_file.write_text("[trainer.checkpoint]\ninterval_steps = 10\n")
    (run.path / "metrics.jsonl").write_text('{"kind":"step","step":1}\n')
    assert stop_run(run) == 0
    with subprocess.Popen([sys.executable, "-c", HOLD, str(run.path)], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "held\n"
        assert launcher_pid(run) == launcher.pid
        assert stop_run(run) == 0
        assert launcher_pid(run) is None
        assert launcher.wait() == -signal.SIGUSR1
    assert capsys.readouterr().out.splitlines() == [
        "demo is not running",
        "demo has stopped",
        "no checkpoint holds the weights: the one step trained is lost; "
        "trainer.checkpoint.interval_steps sets how often one is written",
        "it can go on: slipstream rl --resume demo",
    ]


def test_a_directory_in_use_is_refused_read_by_others_and_free_again_after_a_kill(tmp_path):
    run = create_run_dir(tmp_path, "demo")
    run.config_file.write_text("")
    with subprocess.Popen([sys.executable, "-c", HOLD, str(run.path)], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "held\n"
        with pytest.raises(RunDirError, match=r"demo is in use by another launcher"):
            RunLock(run)
        assert create_run_dir(tmp_path, "demo").name == "demo-2", "another run takes another name"
        assert write_report(run).exists(), "a report of a run that goes on harms nobody"
        launcher.kill()
        launcher.wait()
    assert run.lock_file.read_text() == str(launcher.pid), "the stale file stays"
    assert launcher_pid(run) is None
    assert ended_run(run)[1].startswith("demo was killed")
    RunLock(run).release()
