"""An environment that only fails is backed off, tried now and then, and let through when it heals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from virtual_run import VirtualRun

from slipstream.api.run.v1 import run_pb2
from slipstream.orchestrator.breakers import Breakers
from slipstream.orchestrator.config import BreakerConfig

Make = Callable[..., VirtualRun]


@pytest.fixture
def make(tmp_path) -> Iterator[Make]:
    """A run of two environments of the same weight, 5 s a group; a step of 8 groups trains for 2 s."""
    made: list[VirtualRun] = []

    def run(**fields: Any) -> VirtualRun:
        settings = {"groups_per_step": 8, "max_off_policy_steps": 3, "total_steps": 100, "step_s": 2.0, **fields}
        made.append(VirtualRun(tmp_path, {"sound": 5.0, "frail": 5.0}, max_running=24, **settings))
        return made[-1]

    yield run
    for each in made:
        each.close()


def records(run: VirtualRun, kind: str) -> list[dict[str, Any]]:
    lines = (run.sequencer.config.run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def test_the_pause_doubles_with_each_failed_probe_and_ends_with_a_success() -> None:
    now = [0.0]
    running: set[tuple[str, int]] = set()
    config = BreakerConfig(open_after_failures=3, first_pause_s=1.0, max_pause_s=4.0)
    breakers = Breakers(config, ["a", "b"], lambda: now[0], running.__contains__)
    for number in range(3):
        assert breakers.allows("a")
        assert breakers.failed("a", ("early", number), number + 1) == (number == 2)
    assert breakers.is_open("a")
    assert not breakers.all_open
    waits = []
    for number in range(4):
        since = now[0]
        while not breakers.allows("a"):
            now[0] += 0.5
        waits.append(now[0] - since)
        probe = ("probe", number)
        running.add(probe)
        breakers.handed_out("a", probe)
        assert not breakers.allows("a"), "one at a time"
        breakers.failed("a", ("early", number), 9)
        running.discard(probe)
        breakers.failed("a", probe, 9)
    assert waits == [1.0, 2.0, 4.0, 4.0]
    assert breakers.allows("b")
    now[0] += 4.0
    breakers.handed_out("a", ("lost", 1))
    assert breakers.allows("a"), "a probe whose runner died is followed by another"
    assert breakers.succeeded("a")
    assert breakers.allows("a")


def test_others_keep_their_concurrency_while_a_broken_environment_is_tried_by_single_groups(make: Make) -> None:
    run = make()
    run.run(until_s=60.0)
    steps_before = run.sequencer.machine.trained_step
    run.fails = lambda name: "ENVIRONMENT_ERROR" if name == "frail" else ""
    run.run(until_s=90.0)
    assert run.sequencer.breakers.open == ["frail"]
    assert run.state.state == run_pb2.RUN_STATE_RUNNING
    (warning,) = run.state.to_proto().warnings
    assert "'frail' is backed off and tried now and then: ENVIRONMENT_ERROR: it says why" in warning
    tried, run.most_running = len(run.attempts), type(run.most_running)()
    run.run(until_s=150.0)
    assert run.most_running == {"sound": 24, "frail": 1}
    assert sum(run.environment_of[name] == "frail" for name in list(run.attempts)[tried:]) <= 6
    assert run.sequencer.machine.trained_step - steps_before >= 20, "24 groups of 5 s: more than 4 a second"
    run.fails = lambda name: ""
    parked = [group.position for group in run.sequencer.machine.parked]
    assert len(parked) > 100
    run.run(until_s=190.0)
    assert run.sequencer.breakers.open == []
    assert list(run.state.to_proto().warnings) == []
    assert all(f"train-{position}" in run.attempts for position in parked[:20]), "what was passed by goes first"
    assert [record["state"] for record in records(run, "environment")] == ["backed_off", "healed"]


def test_the_run_pauses_while_all_environments_are_backed_off_and_goes_on_when_one_heals(make: Make) -> None:
    run = make()
    run.fails = lambda name: "ENVIRONMENT_ERROR"
    run.run(until_s=100.0)
    shown = run.state.to_proto()
    assert shown.state == run_pb2.RUN_STATE_PAUSED
    assert shown.reason.startswith("every environment is backed off, the last as environment ")
    count = sum(map(len, run.attempts.values()))
    run.run(until_s=200.0)
    assert 4 <= sum(map(len, run.attempts.values())) - count <= 20, "it does not spin"
    run.fails = lambda name: "ENVIRONMENT_ERROR" if name == "frail" else ""
    run.run(until_s=230.0)
    assert run.state.state == run_pb2.RUN_STATE_RUNNING
    assert run.sequencer.breakers.open == ["frail"]
    run.fails = lambda name: ""
    run.run()
    assert run.trained["frail"] > 100


def test_groups_whose_sandbox_is_away_are_run_again_and_none_is_lost(make: Make) -> None:
    run = make(step_quotas=False)
    run.run(until_s=40.0)
    run.fails = lambda name: "SANDBOX_AWAY" if name == "frail" else ""
    run.run(until_s=160.0)
    assert run.sequencer.breakers.open == ["frail"]
    assert records(run, "group_failed") == []
    run.fails = lambda name: ""
    run.run()
    assert set(run.ends()["frail"]) <= {"dropped", "aged_out"}
    assert run.sequencer.failures.streaks == {}
    assert records(run, "environment")[-1]["state"] == "healed"
