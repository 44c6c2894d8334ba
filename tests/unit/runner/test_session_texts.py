"""What a turn asks for that no tokenizer takes, before the process of texts."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.common.errors import InvalidRequest
from slipstream.environments.chat import Chat, plain_template
from slipstream.environments.tokenizer import TextCodec, build_tokenizer
from slipstream.runner.session_texts import SessionTexts

CODEC = TextCodec(build_tokenizer())
CHAT = Chat(CODEC, plain_template(CODEC))
CONTEXT_TOKENS = 400
VALUES = [r'"\ud800"', r'{"\udfff": 1}', "NaN", "1e999", '{"a":' * 300 + "1" + "}" * 300, '{"a":' * 5000]


def ask(arguments: str = "{}", tools: str = "") -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    request = {"messages": messages, "prompt": None, "tools_json": tools, "stop": [], "count": 1, "turn_count": 0}
    limits = {"max_samples": 4, "max_text_bytes": 65536}
    return SessionTexts().answer({"session": "s", "call": "ask", "limits": limits, **request}, CHAT, CONTEXT_TOKENS)


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_arguments_that_no_tokenizer_takes_are_refused_by_their_field(value: str) -> None:
    refused = ask(arguments=f'{{"a": {value}}}')["refused"]
    assert refused["reason"] == InvalidRequest.reason
    assert refused["metadata"]["field"] == "messages.1.tool_calls.0.function.arguments"


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_tools_that_no_tokenizer_takes_are_refused_by_their_field(value: str) -> None:
    refused = ask(tools=f'[{{"type": "function", "function": {{"name": "f", "parameters": {{"a": {value}}}}}}}]')[
        "refused"
    ]
    assert refused["reason"] == InvalidRequest.reason
    assert refused["metadata"]["field"] == "tools"


def test_what_others_take_is_taken() -> None:
    nested = '{"a":' * 60 + r'"\ud83d\ude00"' + "}" * 60
    tools = f'[{{"type": "function", "function": {{"name": "f", "parameters": {nested}}}}}]'
    assert len(ask(tools=tools)["prompts"]) == 1
    assert "nested" not in ask(arguments=nested)["refused"]["message"]  # the plain template shows no calls
