"""Sessions as the orchestrator keeps them: pages that fit a message, places that come free."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from slipstream.api.rollout.v1 import rollout_pb2
from slipstream.common.config import ConfigError
from slipstream.common.errors import InvalidRequest, RequestIdReused
from slipstream.common.version import PolicyVersion
from slipstream.orchestrator.config import SessionsConfig
from slipstream.orchestrator.ledger import PAGE_BYTES, asked_by
from slipstream.orchestrator.line import Line
from slipstream.orchestrator.session_keys import SECRET_BYTES, SessionKeys
from slipstream.orchestrator.sessions import Opening, SessionGroup, Sessions

VERSION = PolicyVersion(1, 0)


def opened(sessions: Sessions, name: str, **fields: object) -> Opening:
    request = rollout_pb2.OpenSessionRequest(request_id=name, **fields)  # pyright: ignore
    return sessions.open(request, name.encode(), b"nonce")


def made(config: SessionsConfig | None = None) -> tuple[Sessions, Line]:
    line = Line(("session",))
    return Sessions(config or SessionsConfig(), 4, "http://x/v1", line, lambda session: None), line


def take(sessions: Sessions, line: Line, position: int = 0) -> SessionGroup:
    first = line.first(lambda group: True)
    assert isinstance(first, SessionGroup)
    return sessions.take(first, position, 1, "somewhere", VERSION)


def test_a_page_of_sessions_fits_a_message_whatever_their_labels() -> None:
    sessions, line = made(SessionsConfig(max_open=1000))
    labels = {f"{number}{'k' * 60}": "\U0001f600" * 256 for number in range(16)}
    for number in range(300):
        opened(sessions, str(number), labels=labels)
        take(sessions, line, number)
    seen: list[str] = []
    after, more = 0, True
    while more:
        page, more = sessions.ledger.page(after, 1000, {})
        assert sum(session.proto.ByteSize() for session in page) <= PAGE_BYTES
        seen += [session.proto.session_id for session in page]
        after = page[-1].number
    assert len(seen) == len(set(seen)) == 300


def test_a_place_that_was_given_up_while_waiting_is_taken_by_the_next_of_its_key() -> None:
    sessions, line = made()
    first, second = (opened(sessions, name, group_key="k", group_size=2) for name in ("a", "b"))
    sessions.withdraw(second)
    third = opened(sessions, "c", group_key="k", group_size=2)
    group = take(sessions, line)
    assert [each.session is not None for each in (first, second, third)] == [True, False, True]
    assert not group.free_places
    assert not line.counts["session"]


@pytest.mark.parametrize("taken", [False, True])
def test_members_of_a_group_ask_for_its_size_or_for_none(taken: bool) -> None:
    sessions, line = made()
    opened(sessions, "a", group_key="k", group_size=3)
    if taken:
        take(sessions, line)
    with pytest.raises(InvalidRequest) as refused:
        opened(sessions, "b", group_key="k", group_size=2)
    assert refused.value.metadata == {"field": "group_size", "limit": "3"}
    for name, size in (("c", 3), ("d", 0)):
        opened(sessions, name, group_key="k", group_size=size)
    opened(sessions, "e", group_key="k", group_size=2)
    sizes = [group.rollout_count for group in line]
    assert sizes == ([2] if taken else [3, 2]), "the group of three is full: another size begins another group"


def test_a_request_is_known_by_its_id_and_its_body_however_long_it_waits() -> None:
    sessions, line = made()
    opening = opened(sessions, "a", wait_ms=7)
    take(sessions, line)
    assert sessions.ledger.asked(asked_by(rollout_pb2.OpenSessionRequest(request_id="a", wait_ms=9))) is opening.session
    assert sessions.ledger.asked(asked_by(rollout_pb2.OpenSessionRequest(request_id="b"))) is None
    with pytest.raises(RequestIdReused):
        sessions.ledger.asked(asked_by(rollout_pb2.OpenSessionRequest(request_id="a", group_key="k")))


def test_a_key_is_the_same_after_a_restart_and_its_secret_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "run" / "session-secret"
    keys = SessionKeys(path)
    nonce, other = keys.nonce(), keys.nonce()
    assert len(path.read_bytes()) == SECRET_BYTES
    assert path.stat().st_mode & 0o777 == 0o600
    assert SessionKeys(path).key(nonce) == keys.key(nonce) != keys.key(other)
    path.write_bytes(b"cut short")
    assert SessionKeys(path).key(nonce) != keys.key(nonce)


def test_a_secret_that_is_no_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "session-secret").mkdir()
    with pytest.raises(
        ConfigError, match=r"session-secret, the secret of sessions' keys, cannot be read or made: is a"
    ):
        SessionKeys(tmp_path / "session-secret")


def test_a_secret_that_all_can_read_and_one_cut_short_are_told_in_the_log(tmp_path: Path) -> None:
    path = tmp_path / "session-secret"
    SessionKeys(path)
    path.chmod(0o644)
    with capture_logs() as lines:
        SessionKeys(path)
    assert [(line["event"], line["remedy"]) for line in lines] == [("secret_readable_by_all", f"chmod 600 {path}")]
    path.write_bytes(b"cut short")
    with capture_logs() as lines:
        SessionKeys(path)
    assert [(line["event"], line["size_bytes"]) for line in lines] == [("session_secret_replaced", 9)]
