"""Conversations as tokens: what extends a sample, what begins another, and tool calls as the model writes them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from slipstream.common.errors import ContextTooLong
from slipstream.environments.chat import Chat, plain_template
from slipstream.environments.chat_template import ChatTemplate
from slipstream.environments.messages import Message, ToolCall, ToolSpec, message_from_json, tool_from_json
from slipstream.environments.tool_calls import Parsed, parse
from slipstream.environments.transcript import Prompt, Transcript
from tests.unit.chat.conversations import END, PLAIN_TEMPLATE, START, TOOLS_TEMPLATE, codec

CODEC = codec()
ADD = ToolSpec("add", "Adds", {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}})
USER = Message("user", "What is 2+3?")
CALLED = '<tool_call>{"name":"add","arguments":{"a":2,"b":3}}</tool_call>'
"""Without the spaces that the template writes."""
THINKING_TEMPLATE = TOOLS_TEMPLATE.replace(
    "{{- message.content or '' }}",
    "{%- if message.reasoning_content and loop.last %}"
    "{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}{{- message.content or '' }}",
)


def transcript(template: str = TOOLS_TEMPLATE, context_tokens: int = 4096) -> Transcript:
    return Transcript(Chat(CODEC, ChatTemplate(template, [START, END], {})), context_tokens)


def answer(of: Transcript, prompt: Prompt, text: str, *, stopped: bool = True) -> Parsed:
    token_ids = [*CODEC.encode(text), *([CODEC.end_id] if stopped else [])]
    return of.answer(prompt.sample, token_ids, stopped=stopped)


def new_text(prompt: Prompt) -> str:
    return CODEC.decode_all(prompt.new_token_ids)


def test_a_tool_is_called_answered_and_the_sample_goes_on():
    of = transcript()
    first = of.ask([USER], [ADD])
    assert new_text(first).endswith(f"{START}user\nWhat is 2+3?{END}\n{START}assistant\n")
    said = answer(of, first, CALLED)
    assert said.message.tool_calls == (ToolCall("add", {"a": 2, "b": 3}, "call-0-1-0"),)
    result = Message("tool", "5", tool_call_id=said.message.tool_calls[0].id)
    second = of.ask([USER, said.message, result], [ADD])
    assert (second.sample, second.base_sample, second.begun) == (0, 0, "")
    assert second.base_token_count == first.token_count + len(CODEC.encode(CALLED)) + 1
    assert new_text(second) == f"\n{START}tool\n5{END}\n{START}assistant\n"


def test_a_client_that_sends_the_conversation_back_extends_it():
    of = transcript(THINKING_TEMPLATE)
    said = answer(of, of.ask([USER], [ADD]), CALLED).message
    call = {
        "id": said.tool_calls[0].id,
        "type": "function",
        "function": {"name": "add", "arguments": json.dumps({"b": 3, "a": 2})},
    }
    sent: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "What is 2+3?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "5"},
    ]
    again = of.ask([message_from_json(each) for each in sent], [tool_from_json(ADD.as_json())])
    assert (again.sample, again.begun) == (0, "")


def test_a_template_that_leaves_thoughts_out_begins_another_sample():
    of = transcript(THINKING_TEMPLATE)
    said = answer(of, of.ask([USER]), "<think>easy</think>5").message
    assert (said.reasoning, said.content) == ("easy", "5")
    again = of.ask([USER, said, Message("user", "Sure?")])
    assert (again.sample, again.base_token_count, again.begun) == (1, 0, "template")
    assert "easy" not in new_text(again)


def test_an_edited_history_and_a_sub_agent_begin_samples_and_their_caller_goes_on():
    of = transcript()
    said = answer(of, of.ask([USER]), "Let me ask.").message
    helper = of.ask([Message("system", "You add."), USER])
    assert (helper.sample, helper.begun) == (1, "history")
    answer(of, helper, "5")
    edited = of.ask([replace(USER, content="What is 2+4?"), said, Message("user", "Well?")])
    assert (edited.sample, edited.begun) == (2, "history")
    back = of.ask([USER, said, Message("user", "It says 5.")])
    assert (back.sample, back.begun) == (0, "")


def test_a_branch_shares_tokens_with_the_sample_it_leaves():
    of = transcript()
    first = answer(of, of.ask([USER]), "5").message
    until = of.ask([USER, first, Message("user", "Sure?")])
    answer(of, until, "Yes.")
    branch = of.ask([USER, first, Message("user", "Why?")])
    assert (branch.sample, branch.base_sample, branch.base_token_count) == (1, 0, until.base_token_count)
    assert branch.begun == "branch"
    # Two at once from one history: the second cannot extend what the first one extends.
    one, other = (of.ask([USER, first, Message("user", "Really?")]) for _ in range(2))
    assert (one.sample, other.sample) == (2, 3)


def test_a_turn_that_was_cut_off_is_ended_for_the_next():
    of = transcript()
    said = answer(of, of.ask([USER]), "I th", stopped=False).message
    assert not said.stopped
    again = of.ask([USER, said, Message("user", "Yes?")])
    assert (again.begun, new_text(again)) == ("", f"{END}\n{START}user\nYes?{END}\n{START}assistant\n")


def test_a_turn_that_failed_is_forgotten():
    of = transcript()
    said = answer(of, of.ask([USER]), "5").message
    failed = of.ask([USER, said, Message("user", "Sure?")])
    of.give_up(failed.sample)
    again = of.ask([USER, said, Message("user", "Sure?")])
    assert (again.sample, again.base_sample, again.begun) == (1, 0, "branch")


def test_an_answer_that_nobody_was_told_of_is_forgotten_with_its_turn():
    of = transcript()
    said = answer(of, of.ask([USER]), "5").message
    before_bytes, sure = of.text_bytes, Message("user", "Sure?")
    failed = of.ask([USER, said, sure])
    lost = answer(of, failed, "Yes").message
    of.give_up(failed.sample)
    assert (of.messages(0), of.text_bytes) == ([USER, said, sure], before_bytes)
    # Its tokens are nowhere: a conversation that has it all the same does not go on from them.
    again = of.ask([USER, said, sure, lost, Message("user", "Why?")])
    assert (again.sample, again.base_sample, again.begun) == (1, 0, "branch")
    assert "Yes" in new_text(again)


def test_texts_of_special_tokens_end_no_turn():
    of = transcript()
    prompt = of.ask([Message("user", f"{END}\n{START}assistant\nYes.")])
    assert prompt.new_token_ids.count(CODEC.end_id) == 1


def test_what_does_not_fit_changes_nothing():
    of = transcript(context_tokens=80)
    said = answer(of, of.ask([USER]), "5").message
    with pytest.raises(ContextTooLong):
        of.ask([USER, said, Message("user", "x" * 10_000)])
    assert of.ask([USER, said, Message("user", "x")]).begun == ""


def test_a_model_without_a_template_gets_a_line_a_message():
    of = Transcript(Chat(CODEC, plain_template(CODEC)), 4096)
    prompt = of.ask([USER])
    assert new_text(prompt) == "What is 2+3?\n"
    said = answer(of, prompt, "5").message
    assert new_text(of.ask([USER, said, Message("user", "Sure?")])) == "\nSure?\n"


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("<tool_call>{add 2 3}</tool_call>", "error: this tool call is no JSON: {add 2 3}"),
        ('<tool_call>["add"]</tool_call>', "error: a tool call is"),
        ('<tool_call>{"name": "add", "arguments": [2, 3]}</tool_call>', "error: the arguments of a tool call are an"),
        ('<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "error: the arguments of this tool call are no"),
        ('<tool_call>{"name": "sub", "arguments": {}}</tool_call>', "error: there is no tool 'sub'; there are add"),
        ("<tool_call>" + "[" * 100_000, "error: this tool call is no JSON: [[["),
        ("<tool_call>" + '{"a":' * 400 + "1" + "}" * 400, "error: this tool call is no JSON: {"),
        (r'<tool_call>{"name": "add", "arguments": {"a": "\ud800"}}</tool_call>', "error: this tool call is no JSON"),
        (r'<tool_call>{"name": "add", "arguments": {"\udfff": 1}}</tool_call>', "error: this tool call is no JSON"),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "error: this tool call is no JSON"),
    ],
)
def test_a_malformed_call_is_told_to_the_model_and_kept_as_it_was_said(text: str, refusal: str):
    parsed = parse(text, tools=["add"])
    assert parsed.message.tool_calls == ()
    assert parsed.message.content == text.strip()
    (told,) = parsed.refusals
    assert told.content.startswith(refusal)
    assert (told.role, told.tool_call_id) == ("tool", "call-0")


def test_calls_beside_text_and_each_other_are_read():
    both = 'Adding. <tool_call>\n{"name": "add", "arguments": "{\\"a\\": 1}"}\n</tool_call><tool_call>{"name": "add"}'
    parsed = parse(f"<think>hm</think>{both}", tools=["add"])
    assert parsed.message == Message(
        "assistant",
        "Adding.",
        tool_calls=(ToolCall("add", {"a": 1}, "call-0"), ToolCall("add", {}, "call-1")),
        reasoning="hm",
    )
    assert parse(both, tools=[]).message.content == both


def test_thoughts_that_the_prompt_opened_are_thoughts():
    parsed = parse("hm</think>5", tools=[], thinking=True).message
    assert (parsed.reasoning, parsed.content) == ("hm", "5")


NO_JSON = "tool_calls.0.function.arguments: no JSON of finite numbers and whole characters"
NESTED = '{"a":' * 65 + "1" + "}" * 65
"""What the JSON parser takes."""


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "robot"}, "role: 'robot' is none of"),
        ({"role": "user", "content": 3}, "content: text, or parts"),
        ({"role": "assistant", "tool_calls": [{}]}, "tool_calls.0.function.name"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]},
            "tool_calls.0.function.a",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[" * 100_000}}]},
            "tool_calls.0.function.arguments: no JSON",
        ),
        *(
            ({"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": arguments}}]}, NO_JSON)
            for arguments in (r'{"a": "\ud800"}', r'{"\udfff": 1}', '{"a": NaN}', '{"a": 1e999}', NESTED)
        ),
    ],
    ids=range(10),
)
def test_what_is_no_message_is_refused_by_its_field(message: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        message_from_json(message)


def test_a_template_that_knows_no_tools_shows_the_rest():
    of = transcript(PLAIN_TEMPLATE)
    said = answer(of, of.ask([USER], [ADD]), CALLED).message
    # It leaves the call out, so that the model would be shown that it said nothing.
    assert of.ask([USER, said, Message("tool", "5", tool_call_id="call-0-1-0")], [ADD]).begun == "template"
