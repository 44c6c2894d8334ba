"""Bad rows are told by line and field, and are fatal or left out as configured."""

from __future__ import annotations

import json

import pytest

from slipstream.common.config import ConfigError
from slipstream.trainer.chat.config import DataConfig
from slipstream.trainer.chat.examples import BadRows, Dataset, load_dataset
from slipstream.trainer.chat.rows import BadRow, Row, read_rows
from tests.unit.chat.conversations import (
    CALL,
    PLAIN_TEMPLATE,
    TOOL_CONVERSATION,
    TOOLS_TEMPLATE,
    WEATHER,
    chat_template,
    codec,
    sums,
    write_rows,
)

USER, ANSWER = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}
TEXT_CALL = {"function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}


def row(*messages, **other) -> str:
    return json.dumps({"messages": list(messages), **other})


def called(arguments: object) -> dict[str, object]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}]}


ARGUMENTS = "messages.1.tool_calls.0.function.arguments"
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
LESS_DEEP = '{"a":' * 300 + "1" + "}" * 300
"""What the JSON parser takes."""

BAD = [
    ("{not json", "no JSON: "),
    ("[1]", "a list, no object with messages"),
    ("{}", "messages: Field required"),
    ('{"messages": []}', "messages: List should have at least 1 item"),
    (row({"role": "robot", "content": "x"}), "messages.0.role: Input should be 'system'"),
    (row(USER, {"role": "assistant"}), "messages.1: neither content nor tool_calls"),
    (row(USER, {"role": "assistant", "content": 2}), "messages.1.content: Input should be a valid string"),
    (row({**USER, "tool_calls": [CALL]}), "messages.0: a 'user' has tool_calls"),
    (
        row(USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}),
        "messages.1.tool_calls.0.function.arguments: no JSON: ",
    ),
    (row(USER, {**ANSWER, "content": "\ud83d"}), "messages.1.content: holds half of a surrogate pair"),
    (row(USER, called('{"city": "\\ud83d"}')), f"{ARGUMENTS}: city: holds half of a surrogate pair"),
    (row(USER, called({"city": ["\ud83d"]})), f"{ARGUMENTS}.city.0: holds half of a surrogate pair"),
    (row(USER, ANSWER, tools=[{"\ud83d": 1}]), "tools.0.\\ud83d: holds half of a surrogate pair"),
    (f'{{"messages": [], "other": {DEEP}}}', "lists and objects in one another are too deep"),
    (row(USER, called(DEEP)), f"{ARGUMENTS}: lists and objects in one another are too deep"),
    (row(USER, called(LESS_DEEP)), f"{ARGUMENTS}: a.a.a.a.a.a.a.a.a.a: lists and objects in one another"),
    (row(USER, ANSWER, tools=[json.loads(LESS_DEEP)]), "tools.0.a.a.a.a.a.a.a.a: lists and objects in one another"),
    (row(USER, ANSWER, tools="weather"), "tools: Input should be a valid list"),
]


@pytest.mark.parametrize(("line", "why"), BAD, ids=range(len(BAD)))
def test_a_bad_row_is_told_by_its_field(tmp_path, line, why):
    (found,) = read_rows(write_rows(tmp_path / "rows.jsonl", [line]))
    assert isinstance(found, BadRow)
    assert found.why.startswith(why)


def test_rows_are_read_as_templates_take_them(tmp_path):
    parts = {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "+1"}]}
    lines = ["", row(parts, ANSWER, source="made up"), row(USER, {"role": "assistant", "tool_calls": [TEXT_CALL]})]
    first, second = read_rows(write_rows(tmp_path / "rows.jsonl", lines))
    assert isinstance(first, Row)
    assert isinstance(second, Row)
    assert (first.line, first.messages, first.tools) == (2, [USER, ANSWER], None)
    assert (second.line, second.messages[1]["tool_calls"], second.messages[1]["content"]) == (3, [CALL], "")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        list(read_rows(tmp_path / "rows.jsonl"))


def test_bytes_that_are_no_text_are_a_bad_row_and_the_next_one_counts(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"messages": "\xff"}\n' + row(USER, ANSWER).encode())
    bad, good = read_rows(file)
    assert isinstance(bad, BadRow)
    assert isinstance(good, Row)
    assert (bad.line, good.line) == (1, 2)


def load(tmp_path, rows, source=PLAIN_TEMPLATE, **options) -> Dataset:
    file = write_rows(tmp_path / "rows.jsonl", rows)
    config = DataConfig(train=file, **{"validation_rows": 0, "max_tokens": 64, **options})
    return load_dataset(config, codec(), chat_template(source), 0)


TOO_LONG = {"messages": [{"role": "user", "content": "x" * 99}, ANSWER]}
WITH_TOOLS = {"messages": TOOL_CONVERSATION, "tools": WEATHER}


def test_bad_rows_end_the_run_with_each_line_and_field(tmp_path):
    with pytest.raises(BadRows, match=r'^3 bad rows; data\.bad_rows = "skip" leaves them out$') as refused:
        load(tmp_path, [*sums(2), "{}", TOO_LONG, WITH_TOOLS])
    third, fourth, fifth = refused.value.rows
    assert third.endswith("line 3: messages: Field required")
    assert fourth.endswith("line 4: messages: 119 tokens, above data.max_tokens = 64")
    assert "line 5: tools: the chat template leaves them out" in fifth


def test_bad_rows_are_left_out_and_counted_when_told_to(tmp_path):
    data = load(tmp_path, ["{}", *sums(2), TOO_LONG], bad_rows="skip")
    assert (data.bad_rows, [example.line for example in data.training]) == (2, [2, 3])
    assert load(tmp_path, [WITH_TOOLS], TOOLS_TEMPLATE, max_tokens=500).bad_rows == 0


def test_a_file_without_a_good_row_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no row to learn from"):
        load(tmp_path, ["{}"], bad_rows="skip")


def test_rows_that_are_all_taken_for_validation_leave_none_to_learn_from_and_say_so(tmp_path):
    with pytest.raises(ConfigError, match=r"data.validation_rows is 50, which takes all 10 good rows of .*rows.jsonl"):
        load(tmp_path, sums(10), validation_rows=50)


def test_rows_that_validate_are_chosen_by_seed_and_not_learned_from(tmp_path):
    data = load(tmp_path, sums(20), validation_rows=5)
    lines = [[example.line for example in part] for part in (data.training, data.validation)]
    assert [len(part) for part in lines] == [15, 5]
    assert sorted(lines[0] + lines[1]) == list(range(1, 21))
    again = load(tmp_path, sums(20), validation_rows=5)
    assert [example.line for example in again.validation] == lines[1]


def test_a_validation_file_gives_its_first_rows(tmp_path):
    file = write_rows(tmp_path / "validation.jsonl", sums(9))
    data = load(tmp_path, sums(20), validation=file, validation_rows=5)
    assert (len(data.training), [example.line for example in data.validation]) == (20, [1, 2, 3, 4, 5])
