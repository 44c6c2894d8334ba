"""Sessions of the fake server, through the real client: what code that opens them can be tested with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slipstream_client import Client, InvalidRequest, RunEnded, SessionState, SessionUnknown
from slipstream_client.fake import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(gateway_url="http://here/v1") as server:
        yield server


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    with Client.connect(server.address) as client:
        yield client


def test_a_group_whose_members_are_all_closed_is_trained_on(client: Client) -> None:
    opened = [client.open_session(group_key="task", group_size=3, labels={"n": str(n)}) for n in range(3)]
    assert [session.session_id for session in opened] == ["session-0-0", "session-0-1", "session-0-2"]
    assert {session.base_url for session in opened} == {"http://here/v1"}
    assert len({session.key for session in opened}) == 3
    assert client.open_session(group_key="task", group_size=3).position == 1, "the group was full"
    assert client.close_session(opened[0].session_id, 1.0).state is SessionState.CLOSED
    assert client.close_session(opened[1].session_id, discard=True).reason == "DISCARDED"
    assert client.close_session(opened[2].session_id, 0.0).step == 1
    trained = client.get_session(opened[0].session_id)
    assert (trained.state, trained.step, trained.reward) == (SessionState.TRAINED, 1, 1.0)
    assert client.close_session(opened[0].session_id, 5.0).reward == 1.0, "it has ended"


def test_sessions_are_listed_in_pages_without_their_keys(client: Client) -> None:
    for number in range(5):
        client.open_session(labels={"odd": str(number % 2)})
    listed = list(client.list_sessions(page_size=2))
    assert [session.position for session in listed] == [0, 1, 2, 3, 4]
    assert {session.key for session in listed} == {""}
    assert [session.position for session in client.list_sessions(labels={"odd": "1"}, page_size=1)] == [1, 3]


def test_what_the_orchestrator_refuses_is_refused(client: Client) -> None:
    alone = client.open_session(request_id="once")
    assert client.open_session(request_id="once") == alone
    with pytest.raises(InvalidRequest) as refused:
        client.close_session(alone.session_id, 1.0)
    assert refused.value.metadata["field"] == "advantage"
    assert client.close_session(alone.session_id, 1.0, advantage=0.5).state is SessionState.TRAINED
    with pytest.raises(SessionUnknown):
        client.get_session("nobody")
    first = client.open_session(group_key="task", group_size=3)
    with pytest.raises(InvalidRequest) as refused:
        client.open_session(group_key="task", group_size=2)
    assert refused.value.metadata == {"field": "group_size", "limit": "3"}
    assert client.open_session(group_key="task").position == first.position


def test_sessions_end_by_their_timeouts_and_with_the_run(server: FakeServer, client: Client) -> None:
    idle, other = client.open_session(), client.open_session()
    server.end_session(idle.session_id)
    assert client.close_session(idle.session_id, 1.0, advantage=1.0).reason == "IDLE_TIMEOUT"
    server.end_run()
    assert client.get_session(other.session_id).state is SessionState.ENDED
    with pytest.raises(RunEnded):
        client.open_session()
