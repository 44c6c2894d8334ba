"""Conversations in the forms of model families: prompts, calls, and turns that go on from exactly what was sampled."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from slipstream.common.config import ConfigError
from slipstream.common.errors import ContextTooLong
from slipstream.environments.chat_template import Unrenderable
from slipstream.environments.config_renderer import FamilyConfig, TemplateConfig
from slipstream.environments.families import FamilyRenderer
from slipstream.environments.messages import Message, ToolCall, ToolSpec
from slipstream.environments.rendering import load_renderer
from slipstream.environments.transcript import Transcript
from tests.unit.chat.conversations import PLAIN_TEMPLATE, codec, write_tokenizer
from tests.unit.chat.families import FAMILIES, in_bytes, renderer_of, tokenizer_of

LOOK = ToolSpec("look", "Look somewhere.", {"type": "object", "properties": {"at": {"type": "integer"}}})
BEGIN = [Message("system", "Be brief."), Message("user", "look around")]
CALLS = {
    "qwen3": '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"at": 12}}\n</tool_call><|im_end|>',
    "qwen3.5": (
        "hm\n</think>\n\n<tool_call>\n<function=look>\n<parameter=at>\n12\n</parameter>\n</function>\n</tool_call>"
        "<|im_end|>"
    ),
    "glm-4.5": (
        "\n<think>hm</think>\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>12</arg_value>\n</tool_call>"
        "<|observation|>"
    ),
    "deepseek-v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n"
        '```json\n{"at": 12}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
    ),
    "kimi-k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
        '{"at": 12}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
    ),
    "minimax-m2": (
        'hm\n</think>\n\n<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">12</parameter>\n</invoke>\n'
        "</minimax:tool_call>[e~["
    ),
    "llama-3": '{"name": "look", "parameters": {"at": 12}}<|eot_id|>',
}
"""A turn that calls, as a model of each family says it."""


def no_check(text: str) -> None:
    return None


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_with_calls_go_on_from_exactly_what_was_sampled(family):
    renderer = renderer_of(family)
    transcript = Transcript(renderer, 4096)
    first = transcript.ask(BEGIN, [LOOK])
    said = in_bytes(renderer, CALLS[family])
    assert renderer.codec.encode(CALLS[family]) != said, "as its tokenizer would not encode it"
    assert said[-1] in renderer.stop_token_ids
    parsed = transcript.answer(first.sample, said, stopped=True)
    ((call,), refusals) = parsed.message.tool_calls, parsed.refusals
    assert (call.name, call.arguments, refusals, parsed.message.content) == ("look", {"at": 12}, (), "")
    told = [*BEGIN, parsed.message, Message("tool", "a cab", tool_call_id=call.id)]
    # As a client sends it back: without the reasoning, and its calls written anew.
    told[2] = replace(told[2], reasoning="")
    second = transcript.ask(told, [LOOK])
    assert (second.begun, second.base_token_count) == ("", first.token_count + len(said))
    shown = renderer.codec.decode_all(second.new_token_ids)
    assert "a cab" in shown
    assert transcript.shown(0).endswith(shown)
    cut = in_bytes(renderer, "There is")
    parsed = transcript.answer(0, cut, stopped=False)
    third = transcript.ask([*told, parsed.message, Message("tool", "go on", tool_call_id=call.id)], [LOOK])
    assert third.begun == ""
    assert third.base_token_count == second.token_count + len(cut)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_others_say_is_never_a_special_token(family):
    renderer = renderer_of(family)
    plain = renderer.begin([Message("user", "say it")], [], no_check).token_ids
    for token in renderer._special:
        loud = renderer.begin([Message("user", f"say it{token}")], [], no_check).token_ids
        special = {renderer.codec.encode(each)[0] for each in renderer._special}
        assert [each for each in loud if each in special] == [each for each in plain if each in special]


QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments ' }}
    {{- 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Qwen3's form without reasoning, one tool's answer at a time."""


def test_prompts_are_those_of_the_chat_template():
    """By transformers, which tokenizes what the template makes as one text."""
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of("qwen3"), eos_token="<|im_end|>")
    theirs.chat_template = QWEN3
    renderer = renderer_of("qwen3")
    call = Message("assistant", "I look.", tool_calls=(ToolCall("look", {"at": 12}, "a"), ToolCall("look", {}, "b")))
    answered = [*BEGIN, call, Message("tool", "a cab", tool_call_id="a"), Message("user", "and now?")]
    for messages in (BEGIN[1:], BEGIN, answered):
        for tools in ([], [LOOK], [LOOK, ToolSpec("jump")]):
            expected: Any = theirs.apply_chat_template(
                [message.as_json() for message in messages],
                tools=[tool.as_json() for tool in tools] or None,
                add_generation_prompt=True,
                return_dict=False,
            )
            rendered = renderer.begin(messages, tools, no_check)
            assert rendered.token_ids == expected
            assert rendered.text == renderer.codec.decode_all(expected)


def test_a_new_question_shows_no_earlier_reasoning_unless_it_is_kept():
    answers = {}
    for options in ({}, {"thinking_retention": "all"}):
        transcript = Transcript(renderer_of("qwen3", **options), 4096)
        asked = transcript.ask(BEGIN)
        said = transcript._renderer.codec.encode("<think>\nhm\n</think>\n\nIt is a cab.<|im_end|>")
        message = transcript.answer(asked.sample, said, stopped=True).message
        assert (message.reasoning, message.content) == ("hm", "It is a cab.")
        answers[bool(options)] = transcript.ask([*BEGIN, message, Message("user", "and now?")]).begun
    assert answers == {False: "template", True: ""}


def test_calls_that_are_none_are_told_to_the_model_and_stay_in_its_text():
    renderer = renderer_of("qwen3")
    text = (
        '<tool_call>\n{"name": "jump", "arguments": {}}\n</tool_call><tool_call>\nlook!\n</tool_call>'
        '<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>'
    )
    asked = {"stopped": True, "prompt": "", "prompt_token_ids": [], "call_id": "c"}
    parsed = renderer.parse(text, tools=[LOOK], **asked)
    assert [call.arguments for call in parsed.message.tool_calls] == [{"at": 3}]
    assert ["no tool 'jump'" in each.content for each in parsed.refusals] == [True, False]
    assert "malformed" in parsed.refusals[1].content
    assert "look!" in parsed.message.content
    assert renderer.parse(text, tools=[], **asked).message.tool_calls == ()


@pytest.mark.parametrize("arguments", [r'{"at": "\ud800"}', '{"at": NaN}', '{"at": ' + "[" * 70 + "]" * 70 + "}"])
@pytest.mark.parametrize("quoted", [False, True])
def test_arguments_that_no_tokenizer_takes_again_are_none(arguments: str, quoted: bool):
    said = json.dumps(arguments) if quoted else arguments
    text = f'<tool_call>\n{{"name": "look", "arguments": {said}}}\n</tool_call>'
    parsed = renderer_of("qwen3").parse(text, tools=[LOOK], stopped=True, prompt="", prompt_token_ids=[], call_id="c")
    assert parsed.message.tool_calls == ()
    assert "malformed" in parsed.refusals[0].content


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_whose_arguments_are_nested_without_end_is_a_message_all_the_same(family):
    renderer = renderer_of(family)
    said = renderer.codec.encode(CALLS[family].replace("12", "[" * 20_000))
    asked = {"stopped": True, "prompt": "", "prompt_token_ids": [], "call_id": "c"}
    message = renderer.read(said, tools=[LOOK], **asked).message
    assert message.role == "assistant"
    assert all(isinstance(call.arguments.get("at"), str) for call in message.tool_calls)


def test_text_is_shown_at_the_end_of_an_answer_and_a_text_may_stop_it():
    renderer = renderer_of("qwen3")
    draft = renderer.draft("", tools=False, stops=["cab"])
    assert draft.hear(renderer.codec.encode("There is ")) == ("", None)
    text, at = draft.hear(renderer.codec.encode("a cab here"))
    assert (text, draft.text) == ("", "There is a ")
    assert at == len(renderer.codec.encode("a cab"))
    assert draft.rest("There is a") == "There is a"


def test_a_long_message_is_refused_before_it_is_rendered():
    with pytest.raises(ContextTooLong):
        Transcript(renderer_of("qwen3"), 64).ask([Message("user", "a" * 100_000)])


@pytest.mark.parametrize(
    ("family", "options", "sentence"),
    [
        ("gwen", {}, "runner.renderer: "),
        ("qwen3", {"thinking": True}, "thinking"),
        ("glm-4.5", {}, "the model's tokenizer is not that of glm-4.5"),
        ("default", {}, 'take type = "template"'),
    ],
)
def test_a_family_that_cannot_be_is_refused_with_a_sentence(family, options, sentence):
    tokenizer = tokenizer_of("qwen3")
    with pytest.raises(ConfigError, match=sentence):
        FamilyRenderer(renderer_of("qwen3").codec, tokenizer, FamilyConfig(family=family, options=options))


def test_messages_without_a_form_are_refused():
    with pytest.raises(Unrenderable):
        renderer_of("qwen3").begin([], [], no_check)


def test_a_section_chooses_the_renderer(tmp_path):
    write_tokenizer(tmp_path / "model", PLAIN_TEMPLATE)
    template = load_renderer(tmp_path / "model", codec(), TemplateConfig())
    assert template.show(BEGIN[1:], []) == "<|im_start|>user\nlook around<|im_end|>\n<|im_start|>assistant\n"
    tokenizer_of("kimi-k2").save(str(tmp_path / "model" / "tokenizer.json"))
    kimi = load_renderer(tmp_path / "model", renderer_of("kimi-k2").codec, FamilyConfig(family="kimi-k2"))
    assert "<|im_user|>" in kimi.show(BEGIN, [])
