"""What a body asks for that a session does not have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipstream.gateway.refusals import Refusal
from slipstream.gateway.requests import ChatRequest, parse

SAID = {"role": "user", "content": "move"}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"role": "player-0"}, "role", "unknown_parameter"),
        ({"roles": ["player-0", "player-1"]}, "roles", "unknown_parameter"),
        ({"messages": [SAID, {**SAID, "role": "player-1"}]}, "messages.1.role", "invalid_value"),
    ],
)
def test_roles_of_several_agents_are_refused_by_the_field_that_asks_for_them(
    fields: dict[str, Any], param: str, code: str
) -> None:
    body = {"model": "policy", "messages": [SAID], **fields}
    with pytest.raises(Refusal) as refused:
        parse(ChatRequest, json.dumps(body).encode())
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, param, code)
    assert refused.value.message.startswith(f"{param}: ")
