"""What came from outside: known by its request, told in pages, forgotten when it is old."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from slipstream.api.rollout.v1 import rollout_pb2
from slipstream.common.errors import RequestIdReused, RolloutQueueFull
from slipstream.common.version import PolicyVersion
from slipstream.orchestrator.external import ExternalGroup, ExternalGroups
from slipstream.orchestrator.ledger import PAGE_BYTES, Asked, Ledger
from slipstream.orchestrator.line import Line

FINISHED = rollout_pb2.ROLLOUT_STATE_FINISHED


@dataclass
class Entry:
    number: int
    size_bytes: int = 1
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.number)

    @property
    def asked(self) -> Asked:
        return Asked(f"ask-{self.number}", b"body")


def test_pages_hold_what_fits_a_message_and_every_entry_comes_once() -> None:
    ledger = Ledger[Entry](kept_ended=100)
    for number in range(1, 41):
        ledger.enter(Entry(number, PAGE_BYTES // 3, {"odd": str(number % 2)}))
    seen: list[int] = []
    more = True
    while more:
        page, more = ledger.page(seen[-1] if seen else 0, 1000, {})
        assert len(page) <= 3
        seen += [entry.number for entry in page]
    assert seen == list(range(1, 41))
    assert [entry.number for entry in ledger.page(35, 2, {"odd": "1"})[0]] == [37, 39]


def test_of_what_has_ended_the_oldest_is_forgotten_by_number_and_by_size() -> None:
    ledger = Ledger[Entry](kept_ended=2, kept_bytes=10)
    entries = [Entry(number) for number in range(1, 6)]
    for entry in entries:
        ledger.enter(entry)
    gone = [forgotten for entry in entries[:3] for forgotten in ledger.ended(entry)]
    assert gone == [entries[0]]
    assert ledger.asked(Asked("ask-1", b"another")) is None, "its request is forgotten with it"
    with pytest.raises(RequestIdReused):
        ledger.asked(Asked("ask-2", b"another"))
    assert ledger.open_count == 2
    large = Entry(6, size_bytes=100)
    ledger.enter(large)
    assert ledger.ended(large) == entries[1:3]
    assert ledger.get("6") is large, "the newest is kept whatever its size"


def test_a_request_makes_one_group_and_more_than_may_be_open_are_refused() -> None:
    groups = ExternalGroups(Line(("external",)), limit=2)
    requests = [rollout_pb2.CreateRolloutRequest(request_id=str(n), prompt="p", sample_count=1) for n in range(3)]
    first, second = (groups.create(request) for request in requests[:2])
    assert groups.create(requests[0]) is first
    with pytest.raises(RolloutQueueFull):
        groups.create(requests[2])
    groups.end(second.name, FINISHED)
    assert groups.create(requests[1]) is second, "its prompt is let go, its request is not"
    groups.create(requests[2])
    with pytest.raises(RequestIdReused):
        groups.create(rollout_pb2.CreateRolloutRequest(request_id="1", prompt="another", sample_count=1))


def test_a_group_that_lost_its_runner_waits_behind_those_that_came_meanwhile() -> None:
    line = Line(("external",))
    groups = ExternalGroups(line, limit=9)
    first, second = (
        groups.create(rollout_pb2.CreateRolloutRequest(request_id=name, prompt="p", sample_count=1)) for name in "ab"
    )
    groups.take(first, PolicyVersion(1, 0))
    groups.again(first.name, "RUNNER_LOST", "")
    assert list(line) == [second, first]
    assert line.first(lambda group: isinstance(group, ExternalGroup) and group.attempts > 0) is first
