"""Sessions as the orchestrator keeps them: pages that fit a message, places that come free."""

from __future__ import annotations

from slipstream.api.rollout.v1 import rollout_pb2
from slipstream.common.version import PolicyVersion
from slipstream.orchestrator.config import SessionsConfig
from slipstream.orchestrator.external import PAGE_BYTES
from slipstream.orchestrator.sessions import Opening, Sessions

VERSION = PolicyVersion(1, 0)


def opened(sessions: Sessions, name: str, **fields: object) -> Opening:
    return sessions.open(rollout_pb2.OpenSessionRequest(request_id=name, **fields), name.encode())  # pyright: ignore


def test_a_page_of_sessions_fits_a_message_whatever_their_labels() -> None:
    sessions = Sessions(SessionsConfig(max_open=1000), 4, "http://x/v1", lambda session: None)
    labels = {f"{number}{'k' * 60}": "\U0001f600" * 256 for number in range(16)}
    for number in range(300):
        opened(sessions, str(number), labels=labels)
        sessions.take(number, 1, "somewhere", VERSION)
    seen: list[str] = []
    after, more = 0, True
    while more:
        page, more = sessions.page(after, 1000, {})
        assert sum(session.proto.ByteSize() for session in page) <= PAGE_BYTES
        seen += [session.proto.session_id for session in page]
        after = page[-1].number
    assert len(seen) == len(set(seen)) == 300


def test_a_place_that_was_given_up_while_waiting_is_taken_by_the_next_of_its_key() -> None:
    sessions = Sessions(SessionsConfig(), 4, "http://x/v1", lambda session: None)
    first, second = (opened(sessions, name, group_key="k", group_size=2) for name in ("a", "b"))
    sessions.withdraw(second)
    third = opened(sessions, "c", group_key="k", group_size=2)
    group = sessions.take(0, 1, "somewhere", VERSION)
    assert [each.session is not None for each in (first, second, third)] == [True, False, True]
    assert not group.free_places
    assert not sessions.waiting
