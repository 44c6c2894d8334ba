"""Nothing starves: short tasks beside long ones, within the staleness bound and beyond it, under each policy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from virtual_run import TICK_S, TOKENS, VirtualRun

from slipstream.algorithms.staleness import Outcome
from slipstream.orchestrator.journal import read_journal
from slipstream.orchestrator.replay import replay, unpacked

POLICIES = ("regenerate", "hold", "mask")
Make = Callable[..., VirtualRun]
STEP_S = 20.0
BOUND = 4
GROUPS = 16


@pytest.fixture
def make(tmp_path) -> Iterator[Make]:
    """A run with two environments, `short` of 1 s a group and `long`; a trained step takes 20 s, 5 are the bound."""
    made: list[VirtualRun] = []

    def run(
        long_s: float, policy: str, *, long_share: float, steps: int, until_s: float = 1e9, **fields: Any
    ) -> VirtualRun:
        options = {
            "short": {"weight": 1 - long_share, "age_out": policy},
            "long": {"weight": long_share, "age_out": policy, "deadline_s": 10 * max(long_s, 100.0)},
        }
        settings = {"groups_per_step": GROUPS, "max_off_policy_steps": BOUND, "total_steps": steps, **fields}
        made.append(
            VirtualRun(tmp_path, {"short": 1.0, "long": long_s}, environment=options, step_s=STEP_S, **settings)
        )
        made[-1].run(until_s)
        return made[-1]

    yield run
    for each in made:
        each.close()


def warnings(run: VirtualRun) -> list[dict[str, Any]]:
    return records_of(run, "warning")


@pytest.mark.parametrize(("long_share", "quotas"), [(0.5, True), (0.25, False), (0.75, True)])
@pytest.mark.parametrize("policy", POLICIES)
def test_within_the_bound_long_and_short_tasks_keep_their_share(
    make: Make, policy: str, long_share: float, quotas: bool
) -> None:
    run = make(60.0, policy, long_share=long_share, steps=30, step_quotas=quotas)
    total = sum(run.trained.values())
    assert total == 30 * GROUPS
    assert abs(run.trained["long"] / total - long_share) < 0.05 * long_share
    assert run.ends() == {}
    assert warnings(run) == []


def test_beyond_the_bound_regenerate_ends_each_group_after_one_repeat(make: Make) -> None:
    run = make(50_000.0, "regenerate", long_share=0.2, steps=60, until_s=50 * STEP_S)
    assert run.trained == {"short": 49 * GROUPS}, "no step waited"
    ends = run.ends()
    assert ends.keys() == {"long"}
    assert set(ends["long"]) == {"aged_out"}
    assert len(ends["long"]) > 100
    assert {len(run.attempts[f"train-{position}"]) for position in aged_out(run)} == {2}
    assert max(map(len, run.attempts.values())) == 2


def aged_out(run: VirtualRun) -> list[int]:
    lines = run.journal.path.read_text().splitlines()
    records = [json.loads(line.partition(" ")[2]) for line in lines]
    return [r["position"] for r in records if r["kind"] == "ended" and r["outcome"] == Outcome.AGED_OUT]


def test_beyond_the_bound_hold_trains_every_group(make: Make) -> None:
    run = make(300.0, "hold", long_share=0.25, steps=20)
    assert sum(run.trained.values()) == 20 * GROUPS
    assert abs(run.trained["long"] - 0.25 * 20 * GROUPS) <= 1
    assert run.ends() == {}
    assert set(map(len, run.attempts.values())) == {1}


def test_beyond_the_bound_mask_trains_the_young_tokens_of_every_group(make: Make) -> None:
    seen: list[tuple[int, Any]] = []
    run = make(300.0, "mask", long_share=0.1, steps=40)
    assert abs(run.trained["long"] - 0.1 * 40 * GROUPS) <= 1
    assert run.ends() == {}
    for step, plan in every_plan(run):
        seen += [(step, s) for batch in plan.micro_batches for s in batch.sequences if s.environment == "long"]
    masked = 0
    for step, sequence in seen:
        trained = sum(part.end - part.start for part in sequence.loss_ranges)
        young = sum(span.token_count for span in sequence.spans if step - 1 - span.version.step <= BOUND)
        assert trained == young > 0
        masked += young < TOKENS
    assert masked > len(seen) // 2


def every_plan(run: VirtualRun) -> list[tuple[int, Any]]:
    sealed = [record for record in read_journal(run.journal.path).records if record["kind"] == "sealed"]
    return [(record["step"], unpacked(record["plans"][0])) for record in sealed]


@pytest.mark.parametrize(("policy", "known"), [("regenerate", "more than "), ("mask", "300 s")])
def test_an_environment_that_outlives_the_bound_is_named_with_its_p90_and_the_choices(
    make: Make, policy: str, known: str
) -> None:
    run = make(300.0, policy, long_share=0.2, steps=30)
    (warning,) = warnings(run)
    assert warning["environment"] == "long"
    assert warning["sentence"].startswith(f"groups of environment 'long' take {known}")
    assert "(90th percentile) and are too old after 5 steps of 20 s;" in warning["sentence"]
    assert f'now "{policy}"' in warning["sentence"]
    assert all(f'"{choice}"' in warning["sentence"] for choice in POLICIES)
    assert list(run.state.to_proto().warnings) == [warning["sentence"]]


@pytest.mark.parametrize("long_share", [0.5, 0.9])
def test_with_too_many_tasks_that_never_end_regenerate_waits_no_longer_than_a_deadline_for_a_step(
    tmp_path: Path, long_share: float
) -> None:
    """Their two attempts hold more than the slots that the bound leaves: steps wait until some of them fail."""
    deadline_s = 600.0
    options = {
        "short": {"weight": 1 - long_share, "deadline_s": deadline_s},
        "long": {"weight": long_share, "deadline_s": deadline_s},
    }
    run = VirtualRun(
        tmp_path,
        {"short": 1.0, "long": 1e9},
        environment=options,
        step_s=STEP_S,
        groups_per_step=GROUPS,
        max_off_policy_steps=BOUND,
        total_steps=40,
    )
    run.run(40 * (deadline_s + STEP_S))
    assert run.trained == {"short": 40 * GROUPS}
    assert set(run.ends()["long"]) <= {"aged_out", "failed", "dropped"}
    assert max(map(len, run.attempts.values())) <= 2
    times_s = [at_s for at_s, _ in run.served]
    waits_s = [later - earlier for earlier, later in pairwise(times_s)]
    # A runner fails a group at its deadline, and the sequencer's watch gives up what no runner answers for soon after.
    assert max(waits_s) <= deadline_s + STEP_S + 10
    assert 0 < sum(wait_s > 2 * STEP_S for wait_s in waits_s) <= 3, "once it is backed off, nothing waits for it"
    assert "backed_off" in {record["state"] for record in records_of(run, "environment")}, "its positions were parked"
    run.close()


def records_of(run: VirtualRun, kind: str) -> list[dict[str, Any]]:
    lines = (run.sequencer.config.run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


@pytest.mark.parametrize("ends", [True, False], ids=["reported", "too old"])
def test_groups_that_an_earlier_process_handed_out_say_nothing_of_how_long_they_take(
    tmp_path: Path, ends: bool
) -> None:
    """What they waited while the run was down, and while its services came up again, is no time of theirs."""
    runs: list[VirtualRun] = []
    options = {"short": {"weight": 0.8}, "long": {"weight": 0.2, "deadline_s": 1e6}}
    settings = {"groups_per_step": GROUPS, "max_off_policy_steps": BOUND, "total_steps": 30}
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        durations_s = {"short": 1.0, "long": 50_000.0}
        runs.append(VirtualRun(tmp_path / name, durations_s, environment=options, step_s=STEP_S, **settings))
    before, after = runs
    before.run(0.5)
    handed_out = before.running
    left = {key for key, assignment in handed_out.items() if assignment.environment == "long"}
    assert len(left) > 10

    after.sequencer.resume(replay(read_journal(before.journal.path).records, before.sequencer.tasks.environment_of))
    after.running = dict(handed_out)
    for key in handed_out.keys() - left:
        after._finish(key, 0.0)
    after.run(2 * STEP_S)
    if ends:
        for key in left:
            after._finish(key, 0.0)
    while left & after.running.keys():
        after.run(after.now + TICK_S)
    assert after.sequencer.durations.percentiles()["long"] == 0.0
    for each in runs:
        each.close()
