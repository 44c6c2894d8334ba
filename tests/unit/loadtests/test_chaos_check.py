"""What the chaos run's check says of journals that break a promise."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chaos
import chaos_kv
import chaos_outcome
import chaos_shape
import pytest

from slipstream.api.training.v1 import batch_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.orchestrator.journal import Journal
from slipstream.orchestrator.packed import packed

V12, V15, V23 = ((1, 2), (1, 5), (2, 3))
POSITIONS = 4


def plan(dispatched: tuple[int, int], kv_oldest: tuple[int, int]) -> str:
    version = types_pb2.PolicyVersion(incarnation=dispatched[0], step=dispatched[1])
    oldest = types_pb2.PolicyVersion(incarnation=kv_oldest[0], step=kv_oldest[1])
    span = types_pb2.VersionSpan(token_count=1, version=version, kv_oldest_version=oldest)
    sequence = batch_pb2.PlannedSequence(rollout_id="train-0.1.0", dispatch_version=version, spans=[span])
    return packed(batch_pb2.Plan(micro_batches=[batch_pb2.MicroBatch(sequences=[sequence])]))


def sealed(step: int, *positions: int, plans: tuple[str, ...] = ()) -> dict[str, Any]:
    attempts = [1] * len(positions)
    return {"kind": "sealed", "step": step, "positions": positions, "attempts": attempts, "plans": plans}


def good() -> list[dict[str, Any]]:
    return [
        {"kind": "run", "max_off_policy_steps": 2},
        {"kind": "serving", "version": "1.0"},
        *({"kind": "acquired", "position": p, "attempt": 1, "step": 0, "version": "1.0"} for p in range(POSITIONS)),
        sealed(1, 0, 1, plans=(plan(V12, V12), plan(V23, V23))),
        {"kind": "trained", "step": 1},
        sealed(2, 2, 3),
        {"kind": "trained", "step": 2},
    ]


def checked(path: Path, records: list[dict[str, Any]], **step: float) -> chaos.Outcome:
    journal = Journal(path / "journal" / "journal.jsonl")
    for record in records:
        journal.append(record["kind"], **{key: value for key, value in record.items() if key != "kind"})
    journal.close()
    (path / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 1, **step}) + "\n")
    return chaos.check(path, POSITIONS)


def test_a_journal_that_keeps_its_promises_is_told_position_by_position(tmp_path: Path) -> None:
    assert checked(tmp_path, good()).trained == {0: 1, 1: 1, 2: 2, 3: 2}


@pytest.mark.parametrize(
    ("index", "record", "sentence"),
    [
        (8, sealed(2, 1, 2, 3), "position 1 is sealed in step 1 as well"),
        (8, sealed(2, 2), "not trained: positions [3]"),
        (6, sealed(1, 0, 1, plans=(plan(V23, V15),)), "train-0.1.0, dispatched at 2.3, rests on 1.5"),
    ],
)
def test_a_journal_that_breaks_one_is_told_by_it(
    tmp_path: Path, index: int, record: dict[str, Any], sentence: str
) -> None:
    records = good()
    records[index] = record
    with pytest.raises(chaos.Lost, match=re.escape(sentence)):
        checked(tmp_path, records)


def test_rows_that_were_lost_are_told_of(tmp_path: Path) -> None:
    with pytest.raises(chaos.Lost, match="step 1 was trained without 2 of its sequences"):
        checked(tmp_path, good(), sequences_lost=2.0)


def test_an_engine_that_had_other_weights_or_kv_than_it_says_is_told_of(tmp_path: Path) -> None:
    for difference in (0.01, math.nan):
        with pytest.raises(chaos.Lost, match=f"engine and trainer differ by {difference} in step 1, with the same"):
            checked(tmp_path / str(difference), good(), pure_max_abs_diff=difference)


def test_a_run_that_ends_before_anything_is_killed_shows_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal" / "journal.jsonl")
    journal.append("ended", position=0)
    journal.close()
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(30)
    run: Any = SimpleNamespace(path=tmp_path, process=process, output="")
    killing = chaos.Chaos(run, ("router",), POSITIONS, tmp_path / "gate", 0, print)
    with pytest.raises(chaos.Lost, match="the run ended before anything was killed"):
        killing.kill_by_clock(60.0)


def test_the_ratio_is_that_of_the_minutes_in_which_something_is_killed(capsys: pytest.CaptureFixture[str]) -> None:
    kills = [chaos.Kill("router", 1, 0.0), chaos.Kill("runner-1", 2, 1.0)]
    calm, killed = chaos.Outcome(10.0, {0: 1}, {}), chaos.Outcome(22.0, {0: 1}, {"attempts": 3}, kills)
    assert chaos.tell(calm, killed, 0.0) == pytest.approx(0.9)
    assert chaos.tell(calm, killed, 60.0) == pytest.approx(10 / 22)
    said = capsys.readouterr().out
    assert "ratio 0.900, worked out, at a kill every 60 s" in said
    assert "ratio 0.455, measured, at a kill every 60 s" in said


def test_the_table_tells_for_each_process_how_long_the_run_stood_still() -> None:
    kills = [chaos.Kill("router", 1, 1.0), chaos.Kill("trainer", 2, 3.0), chaos.Kill("router", 3, 8.5)]
    killed = chaos.Outcome(10.0, {0: 1}, {}, kills, step_times_s=[2.0, 7.5, 9.0])  # the last kill but one took 4.5 s
    rows = [line.split() for line in chaos_outcome.kill_table(killed)[1:]]
    assert rows == [["router", "2", "0.8", "1.0"], ["trainer", "1", "4.5", "4.5"], ["all", "3", "1.0", "4.5"]]


def test_the_pace_of_a_run_is_that_of_its_second_half() -> None:
    assert chaos.Outcome(60.0, {}, {}, step_times_s=[20.0, 40.0, 50.0, 51.0, 53.0, 54.0]).step_s == 1.5


def test_the_ratio_within_a_run_is_that_to_its_pace_before_each_kill() -> None:
    kills = [chaos.Kill("router", 1, 0.0), chaos.Kill("trainer", 2, 60.0), chaos.Kill("router", 3, 120.0)]
    steps_s = [-5.0, 25.0, *range(31, 61, 3), *range(62, 121, 3)]  # 1 + 10 of 20 in the first minute, 20 of 20
    killed = chaos.Outcome(10.0, {0: 1}, {}, kills, step_times_s=steps_s)
    assert killed.ratio_within == pytest.approx(31 / 40)
    assert chaos.Outcome(10.0, {0: 1}, {}).ratio_within == 0.0


def test_every_process_of_a_shape_is_killed_in_its_turn() -> None:
    several = {"runner-1", "runner-2", "trainer", "trainer-1", "prefill-1", "decode-1", "decode-2"}
    assert set(chaos.Shape(runners=2, ranks=2).targets) == several | set(chaos_shape.SINGLE)
    offload = chaos.Shape(runners=2, ranks=2, offload=True)
    for shape in (offload, chaos.Shape()):
        assert shape.arguments["prefill.replicas"] == "1"  # runs of tests have none by themselves
    assert set(offload.targets) == (several | set(chaos_shape.SINGLE)) - {"decode-2"}


def test_what_workers_found_in_their_tiers_is_counted_over_their_restarts(tmp_path: Path) -> None:
    hits = chaos_kv.KvHits(tmp_path)
    for found in (0, 96, 192, 32, 64):  # it was killed after 192
        hits.count("decode-1", {chaos_kv.HITS: found, chaos_kv.ASKED: 2 * found})
    hits.count("decode-1", {})  # away
    hits.count("prefill-1", {chaos_kv.HITS: 32, chaos_kv.ASKED: 64})
    assert hits.found == {"decode-1": 192 + 64, "prefill-1": 32}
    assert hits.tokens == 192 + 64 + 32
    assert hits.asked == {"decode-1": 2 * (192 + 64), "prefill-1": 64}


@pytest.mark.parametrize(
    ("hits", "steps_again", "sentence"),
    [
        (0, 2, "no prompt was ever found in host memory or on disk"),
        (96, 2, "no prompt was found in host memory or on disk after a trainer was restored"),
        (192, 0, "no trainer was killed between two checkpoints"),
    ],
)
def test_a_run_that_put_no_tier_to_the_test_shows_nothing(hits: int, steps_again: int, sentence: str) -> None:
    kills = [chaos.Kill("trainer", 4, 0.0, kv_hit_tokens=96)]
    figures: dict[str, object] = {"steps taken again": steps_again}
    outcome = chaos.Outcome(9.0, {0: 1}, figures, kills, {"decode-1": hits} if hits else {})
    with pytest.raises(chaos.Lost, match=sentence):
        chaos.check_kv(outcome, chaos.Shape(offload=True))
    chaos.check_kv(outcome, chaos.Shape())


def test_a_trainer_is_killed_where_it_has_steps_to_take_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal" / "journal.jsonl")
    growing, between = chaos.Growing(tmp_path), []
    for step in range(1, 9):
        journal.append("trained", step=step)
        growing.read()
        between.append(growing.between_checkpoints)
    journal.close()
    assert between == [True, True, False, False, True, True, False, False]
