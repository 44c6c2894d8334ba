"""Conversations of several roles: whose a turn is, and what its prompt goes on from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.api.types.v1 import types_pb2
from slipstream.common.config import ConfigError
from slipstream.environments.base import Context, Turn
from slipstream.environments.chat import Chat, plain_template
from slipstream.environments.messages import Message
from slipstream.environments.roles import roles_of
from slipstream.environments.tokenizer import TextCodec, build_tokenizer
from slipstream.runner.envclient import TurnPrompt
from slipstream.runner.episodes import Member
from slipstream.runner.rollout import Segment
from slipstream.runner.seats import Seats

CODEC = TextCodec(build_tokenizer())
CHAT = Chat(CODEC, plain_template(CODEC))
ROLES = ("white", "black")
SAMPLING = types_pb2.Sampling(max_new_tokens=10, temperature=1)


def seats(**fields: Any) -> Seats:
    return Seats(CHAT, 400, ROLES, (), **fields)


def answer(table: Seats, text: str) -> dict[str, Any]:
    prompt, _ = table.ask()
    table.answer([*CODEC.encode(text), CODEC.end_id], stopped=True)
    return prompt


def user(text: str) -> list[Message]:
    return [Message("user", text)]


def test_roles_that_hear_and_say_the_same_have_samples_of_their_own():
    table = seats()
    table.go_on(user("go"))
    first = answer(table, "7")
    table.go_on(Turn("black", user("go")))
    second = answer(table, "7")
    table.go_on(Turn("white", user("on")))
    third = answer(table, "8")
    table.go_on(Turn("black", user("on")))
    fourth = answer(table, "8")
    found = [(each["role"], each["sample"], each["begun"]) for each in (first, second, third, fourth)]
    assert found == [("white", 0, "first"), ("black", 1, "first"), ("white", 0, ""), ("black", 1, "")]
    assert (third["base_sample"], fourth["base_sample"]) == (0, 1)
    assert table.spoken == ["white", "black"]
    assert [[message["content"] for message in each] for each in table.conversations()] == [["go", "7", "on", "8"]] * 2


def test_a_context_of_a_role_begins_a_sample_of_that_role():
    table = seats(first="black")
    table.go_on(user("go"))
    answer(table, "1")
    table.go_on(Turn("white", user("go")))
    answer(table, "2")
    table.go_on(Context(user("anew"), role="black"))
    prompt = answer(table, "3")
    assert (prompt["role"], prompt["sample"], prompt["begun"]) == ("black", 2, "history")
    table.go_on(user("and"))
    assert (answer(table, "4")["sample"], table.role, table.said) == (2, "black", "4")


def test_without_roles_there_is_no_turn_for_one():
    table = Seats(CHAT, 400, (), (), "")
    table.go_on(user("go"))
    assert answer(table, "1")["role"] == ""
    with pytest.raises(ValueError, match="has no role 'white'; its roles: none"):
        table.go_on(Turn("white", user("go")))
    with pytest.raises(ValueError, match="has no role 'red'; its roles: white, black"):
        seats(first="red")


@given(
    st.lists(st.tuples(st.sampled_from(ROLES), st.sampled_from("ab"), st.sampled_from("12")), min_size=1, max_size=12)
)
def test_every_role_hears_what_it_alone_was_told_and_said(script: list[tuple[str, str, str]]):
    """Whatever the order of turns, a role's tokens are its own conversation, whose answers alone train."""
    table, member = seats(), Member(0)
    expected: dict[str, str] = {}
    for role, told, said in script:
        table.go_on(Turn(role, user(told)))
        prompt, room = table.ask()
        rollout = member.take(TurnPrompt(**prompt, max_new_tokens=room))
        token_ids = [*CODEC.encode(said), CODEC.end_id]
        rollout.take(Segment(token_ids, [-1.0] * 2, [], types_pb2.FINISH_REASON_STOP), None, SAMPLING)
        table.answer(token_ids, stopped=True)
        before = expected.get(role, "")
        expected[role] = f"{before}\n" * bool(before) + f"{told}\n{said}<|end|>"
    assert {each.role: CODEC.decode_all(each.token_ids) for each in member.samples} == expected
    for each in member.samples:
        sampled = [CODEC.decode(each.token_ids[start:end]) for start, end in each.sampled]
        assert sampled == [said for role, _, said in script if role == each.role]


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ("white", "no sequence of names"),
        (("white", "white"), "two of its roles have one name"),
        (("the white one",), "no name of a role"),
        ([f"r{number}" for number in range(65)], "of which 64 are taken"),
    ],
)
def test_roles_that_cannot_be_told_apart_are_refused(roles: Any, said: str):
    with pytest.raises(ConfigError, match=said):
        roles_of(SimpleNamespace(name="game", roles=roles))
