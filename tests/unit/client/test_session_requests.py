"""Requests about sessions, made of plain arguments."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream_client.session_requests import close_request


@pytest.mark.parametrize("name", ["reward", "advantage"])
def test_a_session_is_one_agent_and_takes_nothing_by_role(name: str) -> None:
    fields: dict[str, Any] = {"reward": 1.0, "advantage": None} | {name: {"white": 1.0, "black": -1.0}}
    with pytest.raises(
        TypeError, match=rf"^{name}: a session is one agent, with one of it; .* open a session for each"
    ):
        close_request("session-1", **fields, discard=False)


def test_a_session_is_closed_with_a_reward_or_discarded() -> None:
    with pytest.raises(ValueError, match="discard=True"):
        close_request("session-1", None, None, discard=False)
    closing = close_request("session-1", 0.5, -1.0, discard=False)
    assert (closing.reward, closing.advantage, closing.discard) == (0.5, -1.0, False)
