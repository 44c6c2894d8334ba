"""Processes of a run are started, watched, restarted and ended; none outlives its launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import standstill

STAND_IN = Path(__file__).parent / "stand_in_launcher.py"
DEADLINE_S = 90.0
"""By then a thing has happened that is going to happen, on any machine."""
SLEEP = "READY.touch(); import time; time.sleep(3600)"
STUBBORN = f"""
import signal
signal.signal(signal.SIGTERM, lambda *_: READY.with_suffix(".asked").touch())
{SLEEP}
"""
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n{SLEEP}"


class Launched:
    """A stand-in launcher and what it started."""

    def __init__(
        self, directory: Path, services: dict[str, str], restart: str, stop_timeout_s: float, hang_up: signal.Handlers
    ) -> None:
        self.directory = directory
        command = [sys.executable, str(STAND_IN), str(directory), restart, str(stop_timeout_s)]
        command += [f"{name}={code}" for name, code in services.items()]
        before = signal.signal(signal.SIGHUP, hang_up)  # it is inherited
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        signal.signal(signal.SIGHUP, before)

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.directory / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for line in lines if (event := json.loads(line))["kind"] == kind]

    def pid(self, replica: str) -> int:
        return [event["pid"] for event in self.events("service_started") if event["replica"] == replica][-1]

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, output.strip()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    launched: list[Launched] = []

    def start(
        restart: str = "never",
        stop_timeout_s: float = 4.0,
        hang_up: signal.Handlers = signal.SIG_DFL,
        **services: str,
    ) -> Launched:
        directory = tmp_path / str(len(launched))
        directory.mkdir()
        launched.append(Launched(directory, services, restart, stop_timeout_s, hang_up))
        return launched[-1]

    yield start
    for one in launched:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.02)


def gone(processes: list[psutil.Process]) -> bool:
    return not any(map(lives, processes))


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_death_of_one_ends_the_run_with_one_sentence_that_names_it(launch):
    launched = launch(router=SLEEP, decode=SLEEP)
    launched.wait_ready()
    family = launched.family()
    os.kill(launched.pid("decode"), signal.SIGKILL)
    code, sentence = launched.end()
    assert code == 1
    assert sentence == f"decode died (killed by SIGKILL); its log is {launched.directory / 'decode.log'}"
    assert gone(family)


def test_a_service_that_fails_to_start_ends_the_run(launch):
    code, sentence = launch(router=SLEEP, decode="raise SystemExit(3)").end()
    assert code == 1
    assert sentence.startswith("decode died (exited with code 3); its log is ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_ends_everything_also_what_ignores_it(launch, number):
    launched = launch(router=SLEEP, decode=STUBBORN)
    launched.wait_ready()
    family = launched.family()
    launched.process.send_signal(number)
    code, sentence = launched.end()
    assert code == 128 + number
    assert sentence == f"stopped by {number.name}"
    assert gone(family)
    assert [event["replica"] for event in launched.events("service_killed")] == ["decode"]


def test_a_hang_up_ends_nothing_under_nohup(launch):
    launched = launch(hang_up=signal.SIG_IGN, router=SLEEP)
    launched.wait_ready()
    launched.process.send_signal(signal.SIGHUP)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end() == (128 + signal.SIGTERM, "stopped by SIGTERM")


def test_a_stop_that_was_asked_for_is_no_failure(launch):
    launched = launch(router=SLEEP)
    launched.wait_ready()
    launched.process.send_signal(signal.SIGUSR1)
    assert launched.end() == (0, "")


def test_what_a_service_said_last_is_in_the_sentence(launch):
    talkative = "import sys; print('slipstream-decode: the jail cannot be made', file=sys.stderr); sys.exit(1)"
    code, sentence = launch(decode=talkative).end()
    assert code == 1
    assert "decode died (exited with code 1): the jail cannot be made; its log is " in sentence


def test_a_second_ctrl_c_does_not_wait(launch):
    launched = launch(stop_timeout_s=3600.0, decode=STUBBORN)
    launched.wait_ready()
    family = launched.family()
    launched.process.send_signal(signal.SIGINT)
    wait_until((launched.directory / "decode.asked").exists)
    launched.process.send_signal(signal.SIGINT)
    launched.end()
    assert gone(family)


def test_nothing_outlives_a_launcher_that_is_killed(launch):
    launched = launch(router=SLEEP, decode=STUBBORN)
    launched.wait_ready()
    family = launched.family()
    assert len(family) == 2
    launched.process.kill()
    wait_until(lambda: gone(family))


def test_what_a_dead_service_left_behind_is_killed_with_its_group(launch):
    launched = launch(runner=PARENT)
    launched.wait_ready()
    wait_until(lambda: len(launched.family()) == 2)
    family = launched.family()
    os.kill(launched.pid("runner"), signal.SIGKILL)
    launched.end()
    wait_until(lambda: gone(family))


def test_on_failure_restarts_until_the_budget_is_spent(launch):
    launched = launch(restart="on_failure", router=SLEEP, decode=SLEEP)
    launched.wait_ready()
    for count in (1, 2):
        dead = launched.pid("decode")
        os.kill(dead, signal.SIGKILL)
        wait_until(lambda dead=dead: launched.pid("decode") != dead)
        assert [event["restart"] for event in launched.events("service_restart")][-1] == count
    os.kill(launched.pid("decode"), signal.SIGKILL)
    code, sentence = launched.end()
    assert code == 1
    assert sentence.startswith("decode died (killed by SIGKILL) after 2 restarts, which is its budget; its log is ")


def test_ranks_of_a_group_start_again_together(launch):
    launched = launch(restart="on_failure", router=SLEEP, rank_0=SLEEP, rank_1=STUBBORN)
    launched.wait_ready()
    before = {replica: launched.pid(replica) for replica in ("router", "rank_0", "rank_1")}
    os.kill(before["rank_0"], signal.SIGKILL)
    wait_until(lambda: all(launched.pid(replica) != before[replica] for replica in ("rank_0", "rank_1")))
    assert launched.pid("router") == before["router"]
    assert not psutil.pid_exists(before["rank_1"])
    assert [event["replica"] for event in launched.events("service_restart")] == ["rank_0"]  # one death


def test_what_cannot_be_resumed_is_not_restarted(launch):
    launched = launch(restart="on_failure", router=SLEEP, trainer=SLEEP)
    launched.wait_ready()
    os.kill(launched.pid("trainer"), signal.SIGKILL)
    code, sentence = launched.end()
    assert code == 1
    assert sentence.startswith("trainer died (killed by SIGKILL); its log is ")
    assert launched.events("service_restart") == []


REFUSAL = "import sys; print('error: model/config.json is damaged', file=sys.stderr); sys.exit(2)"
REFUSES_ON_TERM = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))"


def test_what_was_refused_is_not_tried_again(launch):
    launched = launch(restart="on_failure", router=SLEEP, decode=REFUSAL)
    code, sentence = launched.end()
    assert code == 1
    told = "decode died (exited with code 2) and would again: model/config.json is damaged; its log is "
    assert sentence.startswith(told)
    assert [event["replica"] for event in launched.events("service_started")] == ["router", "decode"]
    assert launched.events("service_restart") == []


def test_the_refusal_of_one_rank_counts_and_not_what_it_did_to_the_others(launch):
    launched = launch(restart="on_failure", rank_0=SLEEP, rank_1=f"{REFUSES_ON_TERM}; {SLEEP}")
    launched.wait_ready()
    ranks = [psutil.Process(launched.pid(rank)) for rank in ("rank_0", "rank_1")]
    standstill.stop(launched.process.pid)  # so that it sees both at once
    os.kill(ranks[0].pid, signal.SIGKILL)
    os.kill(ranks[1].pid, signal.SIGTERM)
    wait_until(lambda: all(rank.status() == psutil.STATUS_ZOMBIE for rank in ranks))
    launched.process.send_signal(signal.SIGCONT)
    code, sentence = launched.end()
    assert (code, launched.events("service_restart")) == (1, [])
    assert sentence.startswith("rank_1 died (exited with code 2) and would again; its log is ")


def test_somebody_elses_program_may_mean_anything_by_code_2(launch):
    launched = launch(restart="on_failure", router=SLEEP, valkey=REFUSAL)
    wait_until(lambda: len(launched.events("service_restart")) > 1)
    assert launched.process.poll() is None


def test_valkey_restarts_whatever_the_policy(launch):
    launched = launch(valkey=SLEEP, router=SLEEP)
    launched.wait_ready()
    dead = launched.pid("valkey")
    os.kill(dead, signal.SIGKILL)
    wait_until(lambda: launched.pid("valkey") != dead)
    assert launched.process.poll() is None


def test_two_launchers_side_by_side_do_not_disturb_each_other(launch):
    one, two = launch(decode=SLEEP), launch(decode=SLEEP)
    one.wait_ready()
    two.wait_ready()
    os.kill(one.pid("decode"), signal.SIGKILL)
    assert one.end()[0] == 1
    time.sleep(0.3)
    assert two.process.poll() is None
    assert psutil.pid_exists(two.pid("decode"))
