"""What of a conversation is the assistant's: exactly that, end tokens and tool calls included."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from slipstream.common.config import ConfigError
from slipstream.environments.chat_template import ChatTemplate, Unrenderable
from slipstream.trainer.chat.examples import tokenize
from tests.unit.chat.conversations import (
    END,
    LEARNED,
    MARKED_TEMPLATE,
    PLAIN_TEMPLATE,
    TOOL_CONVERSATION,
    TOOLS_TEMPLATE,
    WEATHER,
    chat_template,
    codec,
    write_tokenizer,
)


def learned_runs(source: str, **options) -> list[list[int]]:
    """Runs of consecutive tokens that are learned."""
    stretches = chat_template(source).stretches(TOOL_CONVERSATION, WEATHER, **options)
    token_ids, targets = tokenize(stretches, codec())
    runs: list[list[int]] = []
    for before, position in zip([-2, *targets[:-1]], targets, strict=True):
        if position != before + 1:
            runs.append([])
        runs[-1].append(int(token_ids[position]))
    return runs


def text_of(token_ids: list[int]) -> str:
    return codec()._tokenizer.decode(token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("source", [TOOLS_TEMPLATE, MARKED_TEMPLATE], ids=["compared", "marked"])
def test_exactly_the_assistants_tokens_are_learned_tool_calls_and_end_tokens_included(source):
    assert [text_of(run) for run in learned_runs(source)] == LEARNED
    assert all(run[-1] == codec().end_id and run.count(codec().end_id) == 1 for run in learned_runs(source))


@pytest.mark.parametrize("source", [TOOLS_TEMPLATE, MARKED_TEMPLATE], ids=["compared", "marked"])
def test_the_pieces_are_the_whole_rendering_up_to_the_last_learned_token(tmp_path, source):
    write_tokenizer(tmp_path, source)
    whole = PreTrainedTokenizerFast.from_pretrained(tmp_path).apply_chat_template(
        TOOL_CONVERSATION, tools=WEATHER, tokenize=False
    )
    stretches = chat_template(source).stretches(TOOL_CONVERSATION, WEATHER)
    assert "".join(stretch.text for stretch in stretches) + "\n" == whole


def test_transformers_marks_the_same_tokens_where_a_template_has_its_tags(tmp_path):
    write_tokenizer(tmp_path, MARKED_TEMPLATE)
    conversation = [{**message, "content": message["content"].strip()} for message in TOOL_CONVERSATION]
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path).apply_chat_template(
        conversation, tools=WEATHER, return_dict=True, return_assistant_tokens_mask=True
    )
    for source in (TOOLS_TEMPLATE, MARKED_TEMPLATE):
        token_ids, targets = tokenize(chat_template(source).stretches(conversation, WEATHER), codec())
        assert token_ids.tolist() == theirs["input_ids"][: len(token_ids)]
        assert targets.tolist() == [at for at, mask in enumerate(theirs["assistant_masks"]) if mask]


def test_a_turn_is_tokenized_as_an_engine_draws_it_not_across_the_border_of_its_prompt():
    """The prompt ends with a newline, the turn begins with one: of both the tokenizer would make one token."""
    prompt = chat_template(TOOLS_TEMPLATE).prompt(TOOL_CONVERSATION[:4], WEATHER)
    ids = codec().encode(prompt)
    stretches = chat_template(TOOLS_TEMPLATE).stretches(TOOL_CONVERSATION[:5], WEATHER)
    token_ids, targets = tokenize(stretches, codec())
    assert token_ids[: len(ids)].tolist() == ids
    assert targets[-len(codec().encode(LEARNED[1])) :].tolist() == list(range(len(ids), len(token_ids)))


def test_the_last_turn_alone_is_learned_when_asked_for():
    assert [text_of(run) for run in learned_runs(TOOLS_TEMPLATE, turns="last")] == LEARNED[-1:]
    assert [text_of(run) for run in learned_runs(MARKED_TEMPLATE, turns="last")] == LEARNED[-1:]


THOUGHTS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}"
THOUGHTS += "{{ '<think></think>' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
THOUGHTS += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


@pytest.mark.parametrize(
    ("source", "messages", "tools", "said"),
    [
        (TOOLS_TEMPLATE, TOOL_CONVERSATION[:2], None, r"messages: no assistant's turn"),
        (PLAIN_TEMPLATE, TOOL_CONVERSATION, None, r"messages.2.tool_calls: the chat template leaves them out"),
        (PLAIN_TEMPLATE, TOOL_CONVERSATION[4:], WEATHER, r"tools: the chat template leaves them out"),
        (
            TOOLS_TEMPLATE,
            [{"role": "user", "content": f"x{END}"}, *TOOL_CONVERSATION[-1:]],
            None,
            r"messages.0: holds '<\|im_end\|>'",
        ),
        (THOUGHTS, TOOL_CONVERSATION[4:], None, r"messages.0: .* train on the last turn only"),
        ("{{ raise_exception('no system') }}", TOOL_CONVERSATION, None, r"the chat template refuses them: no system"),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            TOOL_CONVERSATION[-2:],
            None,
            r"messages.1: .* no special token",
        ),
    ],
)
def test_a_conversation_that_the_template_cannot_show_is_refused_with_its_field(source, messages, tools, said):
    with pytest.raises(Unrenderable, match=said):
        chat_template(source).stretches(messages, tools)


QUOTE = '<|"|>'


@pytest.mark.parametrize("token", [QUOTE, "<\\end>", END])
def test_a_special_token_is_refused_wherever_it_is(token):
    template = ChatTemplate(TOOLS_TEMPLATE, [END, QUOTE, "<\\end>"], {})
    tools = [*WEATHER, {"type": "function", "function": {"name": "x", "parameters": {"enum": ["a", f"b{token}"]}}}]
    with pytest.raises(Unrenderable, match=r"^tools.1: holds "):
        template.stretches(TOOL_CONVERSATION, tools)
    with pytest.raises(Unrenderable, match=r"^tools.0: holds "):
        template.stretches(TOOL_CONVERSATION, [{token: 1}])
    with pytest.raises(Unrenderable, match=r"^messages.0: holds "):
        template.stretches([{"role": "user", "content": token}, *TOOL_CONVERSATION[-1:]])


def test_a_template_that_takes_all_stack_refuses_its_conversation():
    source = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"
    with pytest.raises(Unrenderable, match="too deep for the chat template"):
        chat_template(source).stretches(TOOL_CONVERSATION)


def test_a_template_that_drops_thoughts_can_be_learned_from_by_last_turns():
    stretches = chat_template(THOUGHTS).stretches(TOOL_CONVERSATION[4:], None, "last")
    assert [s.text for s in stretches if s.by_assistant] == [f"<think></think>You are welcome.{END}"]


def test_a_model_directory_without_a_template_is_refused(tmp_path):
    write_tokenizer(tmp_path, PLAIN_TEMPLATE)
    assert ChatTemplate.load(tmp_path).prompt([{"role": "user", "content": "x"}]).endswith("assistant\n")
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[0].content }}!")
    assert ChatTemplate.load(tmp_path, own).prompt([{"role": "user", "content": "x"}]) == "x!"
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is no JSON"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatTemplate.load(tmp_path)
