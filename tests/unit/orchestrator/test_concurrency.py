"""The limit of rollouts in flight finds what engines hold, falls with them, and comes back."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import concurrency as simulator
import pytest
from virtual_run import VirtualRun

from slipstream.api.inference.v1 import worker_pb2
from slipstream.api.rollout.v1 import rollout_pb2
from slipstream.orchestrator.concurrency import ConcurrencyLimit, Reading
from slipstream.orchestrator.config import ConcurrencyConfig, SessionsConfig
from slipstream.orchestrator.keeper import Worker

FIXED = (24, 64, 192, 512, 1024)
CALM = Reading(at_s=0.0, in_flight=100, running=100, waiting=0, blocks_used=300, blocks_total=1000)


@pytest.mark.parametrize("lengths", simulator.LENGTHS)
@pytest.mark.parametrize("capacity", [10_000, 40_000, 160_000])
def test_after_a_minute_it_is_as_good_as_nine_tenths_of_the_best_fixed_limit(capacity: int, lengths: str) -> None:
    best, _, adapted, _ = simulator.measure(capacity, simulator.LENGTHS[lengths], FIXED)
    assert adapted >= simulator.REQUIRED * best


SECONDS = itertools.count(1)


def limit(start: int = 100, max_rollouts: int = 16384) -> ConcurrencyLimit:
    return ConcurrencyLimit(ConcurrencyConfig(min_rollouts=10, max_rollouts=max_rollouts), start)


def feed(what: ConcurrencyLimit, seconds: int, like: Reading, *, use: bool = True) -> None:
    """The same reading each second, with as many in flight as the limit allows."""
    for _ in range(seconds):
        in_flight = what.rollouts if use else like.in_flight
        what.observe(replace(like, at_s=float(next(SECONDS)), in_flight=in_flight))


def test_it_rises_while_it_is_used_and_stays_while_it_is_not() -> None:
    unused, used = limit(), limit()
    feed(unused, 30, replace(CALM, in_flight=50), use=False)
    feed(used, 10, CALM)
    assert unused.rollouts == 100
    assert used.rollouts > 500


def test_it_stays_within_its_bounds() -> None:
    bounded = limit(max_rollouts=120)
    feed(bounded, 30, CALM)
    assert bounded.rollouts == 120
    feed(bounded, 300, replace(CALM, overloads=1))
    assert bounded.rollouts == 10
    assert bounded.why == "failures"


def test_it_falls_when_samples_wait_or_lose_their_kv() -> None:
    crowded, preempted = limit(), limit()
    feed(crowded, 20, replace(CALM, running=60, waiting=40))
    assert crowded.rollouts <= 70
    assert crowded.moves["waiting"] >= 1
    for count in range(40):
        feed(preempted, 1, replace(CALM, preemptions=count))
    assert preempted.rollouts < 90
    assert preempted.moves["preemptions"] > 5


def test_groups_that_have_just_come_may_wait_for_a_moment() -> None:
    bursts = limit()
    for number in range(30):
        feed(bursts, 1, replace(CALM, running=0 if number % 2 else 100, waiting=100 if number % 2 else 0))
    assert bursts.rollouts >= 100
    assert not bursts.moves


def test_it_falls_with_the_engines_that_go_away_and_is_back_soon_after_them() -> None:
    half = replace(CALM, blocks_total=500, blocks_used=490)
    gone = replace(CALM, blocks_total=0, blocks_used=0, running=0)
    full = replace(CALM, blocks_used=965)  # no room: it neither rises nor falls
    some = limit(400)
    feed(some, 5, full)
    assert some.rollouts == 400
    feed(some, 1, half)
    assert (some.rollouts, some.why) == (200, "engines_away")
    feed(some, 1, gone)
    assert some.rollouts == 10
    feed(some, 25, CALM)
    assert some.rollouts >= 400
    assert some.moves["engines_away"] == 2


def test_sessions_that_are_more_than_a_group_of_the_run_find_a_place_beside_those(tmp_path, monkeypatch) -> None:
    run = VirtualRun(
        tmp_path, {"a": 5.0}, step_s=0.1, groups_per_step=8, max_off_policy_steps=7, total_steps=200,
        concurrency=ConcurrencyConfig(min_rollouts=8), sessions=SessionsConfig(),
    )  # fmt: skip
    run.duration_s["session"] = 5.0
    worker = Worker("decode-1", "decode", None, slot_count=8)  # type: ignore[arg-type]
    worker.seen_at = 0.0
    worker.load = worker_pb2.Load(running_sample_count=8, blocks_used=965, blocks_total=1000)
    run.sequencer.look_at_load([worker])
    run.run(until_s=1)
    assert run.sequencer.rollouts_in_flight == run.sequencer.concurrency.rollouts == 8
    run.leases.renew("runner-1", "1").address = "somewhere:1"
    request = rollout_pb2.OpenSessionRequest(request_id="a", group_key="k", group_size=6)
    opening = run.sequencer.sessions.open(request, b"key", b"nonce")
    run.run(until_s=4)
    assert opening.session is None, "there is no room"
    alone = rollout_pb2.OpenSessionRequest(request_id="b", group_size=6)
    others = [run.sequencer.sessions.open(alone, b"%d" % number, b"nonce") for number in range(200)]
    looks: list[int] = []
    room = run.sequencer.concurrency.room
    with monkeypatch.context() as patch:
        patch.setattr(run.sequencer.concurrency, "room", lambda count: looks.append(count) or room(count))
        assert not run.sequencer.available
    assert len(looks) <= 2, "not once for each that waits"
    for each in others:
        run.sequencer.sessions.withdraw(each)
    run.run(until_s=60)
    assert opening.session is not None
    assert opening.session.proto.state == rollout_pb2.SESSION_STATE_TRAINED
    run.close()


def test_a_run_hands_out_no_more_than_the_limit_and_less_while_an_environment_is_backed_off(tmp_path) -> None:
    run = VirtualRun(
        tmp_path, {"a": 5.0, "b": 5.0}, step_s=2.0, max_running=64, groups_per_step=8, max_off_policy_steps=7,
        total_steps=200, concurrency=ConcurrencyConfig(min_rollouts=8),
    )  # fmt: skip
    worker = Worker("decode-1", "decode", None, slot_count=48)  # type: ignore[arg-type]

    def see() -> None:
        worker.seen_at = run.now
        running = run.sequencer.rollouts_in_flight
        worker.load = worker_pb2.Load(running_sample_count=running, blocks_used=965, blocks_total=1000)
        run.sequencer.look_at_load([worker])

    see()
    for until_s in range(1, 30):
        run.run(until_s=until_s)
        see()
    assert run.sequencer.concurrency.rollouts == 48
    assert max(run.most_running.values()) <= 24
    assert run.sequencer.rollouts_in_flight in range(40, 49), "groups of two"
    run.fails = lambda name: "SANDBOX_AWAY" if name == "b" else ""
    for until_s in range(30, 60):
        run.run(until_s=until_s)
        see()
    assert run.sequencer.concurrency.rollouts == 24
    assert run.sequencer.rollouts_in_flight <= 24
    run.fails = lambda name: ""
    for until_s in range(60, 90):
        run.run(until_s=until_s)
        see()
    assert run.sequencer.concurrency.rollouts == 48
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    told = [record for record in map(json.loads, lines) if record["kind"] == "concurrency"]
    assert [(record["rollouts"], record["why"]) for record in told] == [(48, "start")]
    run.close()
