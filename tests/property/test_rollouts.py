"""A rollout stitched out of streams that broke off at any point is the one that no break would have given."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from slipstream.api.inference.v1 import decode_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.version import PolicyVersion
from slipstream.runner.rollout import LENGTH, STOP, Rollout, Segment

STOP_TOKEN = 9
PROMPT = [1, 2, 3]
ABORTED = types_pb2.FINISH_REASON_ABORTED
EARLY = {"told": ABORTED, "silent": types_pb2.FINISH_REASON_UNSPECIFIED}


@dataclass
class Stream:
    """What one request brings: tokens as (token, step that sampled it), in chunks of some size."""

    tokens: list[tuple[int, int]]
    end: str
    """How it ends early: "told", with the rows of its tokens, or "silent", without."""
    prompt_rows: bool
    chunk: int
    kv_step: int


tokens = st.tuples(st.integers(0, 8), st.integers(1, 3))
streams = st.builds(
    Stream,
    st.lists(tokens, max_size=6),
    st.sampled_from(sorted(EARLY)),
    st.booleans(),
    st.integers(1, 3),
    st.integers(1, 3),
)
turns = st.lists(
    st.tuples(st.lists(streams, max_size=4), st.lists(st.integers(0, 8), min_size=1, max_size=3)),
    min_size=1,
    max_size=3,
)


def version(step: int) -> types_pb2.PolicyVersion:
    return PolicyVersion(1, step).to_proto()


def rows(start: int, end: int) -> types_pb2.RowsRef | None:
    ranges = [types_pb2.RowRange(start=start, end=end)]
    return types_pb2.RowsRef(holder="h", key=f"{start}-{end}", dtype="uint8", ranges=ranges) if start < end else None


def segment(stream: Stream, first: int, finish: types_pb2.FinishReason) -> Segment:
    """As it comes over the wire. Log-probabilities name the position they belong to."""
    whole = Segment()
    for start in range(0, len(stream.tokens), stream.chunk):
        part = stream.tokens[start : start + stream.chunk]
        spans = [
            types_pb2.VersionSpan(
                token_count=1, version=version(step), kv_oldest_version=version(min(step, stream.kv_step))
            )
            for _, step in part
        ]
        logprobs = [-float(first + start + offset + 1) for offset in range(len(part))]
        whole.extend(decode_pb2.SampleChunk(token_ids=[t for t, _ in part], logprobs=logprobs, spans=spans))
    routes = None if finish == EARLY["silent"] else rows(first, first + len(stream.tokens))
    whole.extend(decode_pb2.SampleChunk(finish_reason=finish, routes=routes))
    return whole


def covered(rollout: Rollout) -> list[int]:
    return [p for ref in rollout.routes for each in ref.ranges for p in range(each.start, each.end)]


def weights(rollout: Rollout) -> dict[int, tuple[int, int]]:
    """Steps of weights and of KV by position of the token."""
    expanded = [(s.version.step, s.kv_oldest_version.step) for s in rollout.spans for _ in range(s.token_count)]
    positions = [p for start, end in rollout.sampled for p in range(start, end)]
    return dict(zip(positions, expanded, strict=True))


@given(turns, st.integers(4, 20))
def test_tokens_versions_and_rows_of_every_stream_are_where_they_belong(turns, max_new_tokens):
    sampling = types_pb2.Sampling(max_new_tokens=max_new_tokens, stop_token_ids=[STOP_TOKEN])
    rollout = Rollout(PROMPT)
    expected = [(token, 0.0) for token in PROMPT]
    sampled: dict[int, int] = {}
    computed: dict[int, set[tuple[int, int]]] = {}
    """Weights and KV that every computation of a position used."""
    for number, (broken, said) in enumerate(turns):
        if number:
            rollout.hear(said)
            expected += [(token, 0.0) for token in said]
        begun = len(expected)
        for stream in [*broken, Stream([(STOP_TOKEN, 2)], "told", True, 1, 2)]:
            last = stream.tokens == [(STOP_TOKEN, 2)]
            left = rollout.tokens_left(max_new_tokens)
            assert left == max_new_tokens - (len(expected) - begun) > 0
            stream.tokens = stream.tokens[:left]
            finish = STOP if last else EARLY[stream.end]
            first = len(rollout.token_ids) - 1
            asked_from = rollout.first_route_position
            assert asked_from <= first
            before = set(covered(rollout))
            assert not before & set(range(asked_from, first))  # what is referred to is not asked for again
            news = segment(stream, first, finish)
            if not news.token_ids:
                continue  # such a request is as though it had not been
            step = stream.tokens[0][1]
            own = (step, min(step, stream.kv_step))
            for position in range(asked_from, first):
                computed.setdefault(position, set()).add(own)
            rollout.take(news, rows(asked_from, first) if stream.prompt_rows else None, sampling)
            for offset, (token, sampled_at) in enumerate(stream.tokens):
                position = first + 1 + offset
                expected.append((token, -float(position)))
                sampled[position] = sampled_at
                computed.setdefault(position - 1, set()).add((sampled_at, min(sampled_at, stream.kv_step)))
            if rollout.finish_reason:
                break
        assert rollout.finish_reason == (LENGTH if expected[-1][0] != STOP_TOKEN else STOP)
        assert rollout.first_route_position == len(expected) - 1
        assert rollout.answer == [token for token, _ in expected[begun:]]
    assert list(zip(rollout.token_ids, rollout.logprobs, strict=True)) == expected
    assert {position: step for position, (step, _) in weights(rollout).items()} == sampled
    assert all(a[1] < b[0] for a, b in zip(rollout.sampled, rollout.sampled[1:], strict=False))
    known = covered(rollout)
    assert len(known) == len(set(known))
    assert all(position < len(expected) - 1 for position in known)
    assert all(len(computed[position]) == 1 for position in known)  # else its row is one of several


def spans(*steps: int) -> list[types_pb2.VersionSpan]:
    return [types_pb2.VersionSpan(token_count=1, version=version(s), kv_oldest_version=version(s)) for s in steps]


def resumed(first_steps: tuple[int, ...], next_step: int) -> Rollout:
    """A prompt of three, tokens whose rows were lost, and a stream that computed them again and ends."""
    sampling = types_pb2.Sampling(max_new_tokens=8)
    rollout = Rollout(PROMPT)
    count = len(first_steps)
    rollout.take(Segment([4] * count, [-1.0] * count, spans(*first_steps)), rows(0, 2), sampling)
    assert rollout.first_route_position == 2
    again = Segment([5], [-1.0], spans(next_step), STOP, rows(2 + count, 3 + count))
    rollout.take(again, rows(2, 2 + count), sampling)
    return rollout


def test_rows_that_were_lost_come_with_the_next_stream_where_the_same_weights_computed_them():
    assert covered(resumed((1, 1), 1)) == [0, 1, 2, 3, 4]


def test_rows_that_were_lost_are_unknown_where_other_weights_would_compute_them():
    assert covered(resumed((1, 1), 2)) == [0, 1, 4]
    assert covered(resumed((1, 2), 2)) == [0, 1, 4]


@given(st.integers(0, 6), st.integers(0, 6), st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), max_size=6))
def test_nothing_of_older_weights_or_without_its_figures_gets_into_a_rollout(token_count, logprob_count, steps):
    """Dispatched at step 2."""
    whole = Segment(list(range(token_count)), [-1.0] * logprob_count, [], STOP, rows(2, 3))
    for sampled, oldest in steps:
        whole.spans.append(
            types_pb2.VersionSpan(token_count=1, version=version(sampled), kv_oldest_version=version(oldest))
        )
    good = 0
    while good < len(steps) and min(steps[good]) >= 2:
        good += 1
    trusted = min(good, token_count, logprob_count)
    assert whole.cut_untrusted(PolicyVersion(1, 2)) == token_count - trusted
    assert (whole.token_ids, len(whole.logprobs)) == (list(range(trusted)), trusted)
    assert sum(span.token_count for span in whole.spans) == trusted
    untouched = trusted == token_count == logprob_count == len(steps)
    # Whoever takes the segment refers to the rows of the tokens that are left.
    assert (whole.finish_reason, whole.routes) == (STOP if untouched else 0, rows(2, 3))
