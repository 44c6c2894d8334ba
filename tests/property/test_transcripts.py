"""Whatever a rollout's conversations do, tokens stay as they were sampled and train once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from slipstream.api.types.v1 import types_pb2
from slipstream.environments.chat import Chat
from slipstream.environments.chat_template import ChatTemplate
from slipstream.environments.messages import Message
from slipstream.environments.tokenizer import TextCodec
from slipstream.environments.transcript import Transcript
from slipstream.runner.envclient import TurnPrompt
from slipstream.runner.episodes import Member
from slipstream.runner.rollout import Segment

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    # As many do: what the model thought is shown of its last turn alone, and only until a user says more.
    "{%- if message.reasoning_content and not messages[loop.index0 + 1:] | selectattr('role', 'eq', 'user') | list %}"
    "{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}"
    "{{- message.content + '<|im_end|>\\n' }}{%- endfor %}{{- '<|im_start|>assistant\\n' }}"
)
WORDS = ["a", "b", "ab", "ba", "aba", " ", "\n", "<think>", "</think>"]
SPELLED = [("a", "b"), ("b", "a"), ("ab", "a")]


def make_chat() -> Chat:
    """Its tokenizer merges what it can: of most token sequences, encoding what they decode to gives others."""
    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {left + right: len(vocabulary) + index for index, (left, right) in enumerate(SPELLED)}
    tokenizer = Tokenizer(models.BPE(vocabulary, SPELLED))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    tokenizer.add_special_tokens([AddedToken(START, special=True), AddedToken(END, special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    return Chat(TextCodec(tokenizer, tokenizer.token_to_id(END)), ChatTemplate(TEMPLATE, [START, END], {}))


CHAT = make_chat()
VOCABULARY = [CHAT.codec.encode(word)[0] for word in WORDS]
texts = st.lists(st.sampled_from(WORDS[:7]), max_size=4).map("".join)
turns = st.tuples(st.lists(st.sampled_from(VOCABULARY), max_size=6), st.booleans())
moves = st.one_of(
    st.tuples(st.just("go on"), texts, st.sampled_from(["user", "tool"])),
    st.tuples(st.just("back to"), st.integers(0, 20), texts),
    st.tuples(st.just("edit"), st.integers(0, 20), texts),
    st.tuples(st.just("anew"), texts, st.just("")),
)


@dataclass
class Played:
    """A rollout as the runner has it, beside what was sampled, turn by turn."""

    transcript: Transcript = field(default_factory=lambda: Transcript(CHAT, 100_000))
    member: Member = field(default_factory=lambda: Member(0))
    drawn: list[list[int]] = field(default_factory=list[list[int]])
    begun: list[str] = field(default_factory=list[str])

    def turn(self, messages: list[Message], token_ids: list[int], *, stopped: bool) -> Message:
        prompt = self.transcript.ask(messages)
        before = list(self.member.samples[prompt.base_sample].token_ids) if self.member.samples else []
        asked = TurnPrompt(
            prompt.sample, prompt.base_sample, prompt.base_token_count, prompt.new_token_ids, prompt.begun, 100
        )
        rollout = self.member.take(asked)
        assert self.member.samples[prompt.sample] is rollout
        assert rollout.token_ids[: prompt.base_token_count] == before[: prompt.base_token_count]
        if not prompt.begun:
            assert prompt.base_token_count == len(before)
        self.begun.append(prompt.begun)
        token_ids = [*token_ids, CHAT.codec.end_id] if stopped else token_ids or [VOCABULARY[0]]
        span = types_pb2.VersionSpan(token_count=len(token_ids), version=types_pb2.PolicyVersion(incarnation=1))
        reason = types_pb2.FINISH_REASON_STOP if stopped else types_pb2.FINISH_REASON_LENGTH
        segment = Segment(token_ids, [-1.0] * len(token_ids), [span], reason)
        rollout.take(segment, None, types_pb2.Sampling(max_new_tokens=100))
        self.drawn.append(token_ids)
        return self.transcript.answer(prompt.sample, token_ids, stopped=stopped).message


@settings(max_examples=100, deadline=None)
@given(turns, st.lists(st.tuples(moves, turns), max_size=8))
def test_tokens_stay_as_they_were_sampled_and_train_once(first, steps):
    played = Played()
    history = [Message("user", "a")]
    history.append(played.turn(history, first[0], stopped=first[1]))
    for (kind, one, other), (token_ids, stopped) in steps:
        match kind:
            case "go on":
                history = [*history, Message(other, one)]
            case "back to":  # the end of an earlier turn of the assistant's
                ends = [index for index, message in enumerate(history) if message.role == "assistant"]
                history = [*history[: ends[one % len(ends)] + 1], Message("user", other)] if ends else history
            case "edit":
                at = one % len(history)
                edited = Message(history[at].role, history[at].content + other + "!")
                history = [*history[:at], edited, *history[at + 1 :], Message("user", "b")]
            case _:
                history = [Message("user", one)]
        history = [*history, played.turn(history, token_ids, stopped=stopped)]
    samples = played.member.samples
    trained = [sample.token_ids[start:end] for sample in samples for start, end in sample.sampled]
    assert Counter(map(tuple, trained)) == Counter(map(tuple, played.drawn))
    for sample in samples:
        assert sum(span.token_count for span in sample.spans) == sum(end - start for start, end in sample.sampled)
        positions = {position for start, end in sample.sampled for position in range(start, end)}
        assert all((logprob == -1.0) == (at in positions) for at, logprob in enumerate(sample.logprobs))
    assert len(samples) == sum(map(bool, played.begun))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.lists(st.sampled_from(VOCABULARY[:7]), max_size=6), texts), min_size=1, max_size=6))
def test_a_conversation_that_only_goes_on_is_one_sample(exchanges):
    played, history = Played(), [Message("user", "a")]
    for token_ids, said in exchanges:
        history.append(played.turn(history, token_ids, stopped=True))
        history.append(Message("user", said))
    assert played.begun == ["first"] + [""] * (len(exchanges) - 1)
    (sample,) = played.member.samples
    shown = CHAT.codec.decode_all(sample.token_ids)
    assert shown.count(END) == 2 * len(exchanges)


def test_what_was_sampled_is_not_encoded_anew():
    played, history = Played(), [Message("user", "a")]
    spelled = [VOCABULARY[0], VOCABULARY[1], VOCABULARY[0]]
    assert CHAT.codec.encode("aba") != spelled
    history.append(played.turn(history, spelled, stopped=True))
    assert history[-1].content == "aba"
    played.turn([*history, Message("user", "b")], [], stopped=True)
    (sample,) = played.member.samples
    start = sample.sampled[0][0]
    assert sample.token_ids[start : start + 3] == spelled
    assert CHAT.encode(CHAT.codec.decode_all(sample.token_ids)) != sample.token_ids
