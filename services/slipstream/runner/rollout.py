"""One member of a group as it grows: its tokens, and what is known of each, stitched out of what streams delivered.

A turn may take several streams: one that breaks off leaves the tokens that came, and the next one has them at the end
of its prompt. The rows of their experts stayed with the worker that broke off. The next one computes those positions
again; its rows are taken where the same weights did it on KV of the same weights, as then they are the same, and are
unknown elsewhere. A row that was referred to is never asked for again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.api.inference.v1 import decode_pb2
from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.version import PolicyVersion
from slipstream.runner.rollout_record import Timings

UNFINISHED = types_pb2.FINISH_REASON_UNSPECIFIED
STOP = types_pb2.FINISH_REASON_STOP
LENGTH = types_pb2.FINISH_REASON_LENGTH
MAX_ROUTE_REFS = 256
"""Of a rollout, as in `RolloutRecord.routes`; what is beyond routes live."""


@dataclass
class Segment:
    """What one stream delivers of one sample."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    spans: list[types_pb2.VersionSpan] = field(default_factory=list[types_pb2.VersionSpan])
    finish_reason: types_pb2.FinishReason = UNFINISHED
    routes: types_pb2.RowsRef | None = None
    """Rows from the last prompt token to the last but one of the tokens here, and of such as were dropped."""
    ended_s: float | None = None
    """When its end came, in `time.monotonic()` terms."""

    def extend(self, chunk: decode_pb2.SampleChunk) -> None:
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        add_spans(self.spans, chunk.spans)
        if chunk.finish_reason:
            self.finish_reason, self.ended_s = chunk.finish_reason, time.monotonic()
            if chunk.HasField("routes"):
                self.routes = chunk.routes

    def trusted_count(self, dispatched_at: PolicyVersion) -> int:
        """How many first tokens belong into a rollout dispatched at a version."""
        trusted = 0
        for span in self.spans:
            oldest = PolicyVersion.from_proto(span.kv_oldest_version)
            if PolicyVersion.from_proto(span.version) < dispatched_at or (oldest and oldest < dispatched_at):
                break
            trusted += span.token_count
        return min(trusted, len(self.token_ids), len(self.logprobs))

    def stop_at(self, count: int) -> None:
        """End after so many tokens, which whoever listens says."""
        del self.token_ids[count:], self.logprobs[count:]
        self.spans = _first(self.spans, count)
        self.finish_reason = STOP

    def cut_untrusted(self, dispatched_at: PolicyVersion) -> int:
        """Drop what does not belong into a rollout dispatched at a version; returns how many tokens that were.

        That is a token without its log-probability or version, one that older weights sampled or one that rests on KV
        of older ones, and all after it. Weights that failed their checks never sampled any: engines judge in a pause.
        """
        trusted = self.trusted_count(dispatched_at)
        cut = len(self.token_ids) - trusted
        if cut or len(self.logprobs) > trusted or _count(self.spans) > trusted:
            del self.token_ids[trusted:], self.logprobs[trusted:]
            self.spans = _first(self.spans, trusted)
            self.finish_reason = UNFINISHED
        return cut


class Rollout:
    """The tokens of one member from the first of its prompt on. The current turn's answer is their end."""

    def __init__(self, prompt_token_ids: Sequence[int], role: str = "") -> None:
        """`role`: whose turns these are, where the environment has roles."""
        self.role = role
        self.prompt_token_count = len(prompt_token_ids)
        self.token_ids = list(prompt_token_ids)
        self.logprobs = [0.0] * len(prompt_token_ids)
        self.teacher_logprobs: list[float] = []
        """Of all positions, once a teacher was asked."""
        self.sampled: list[tuple[int, int]] = []
        """Ranges of positions, ascending, one for each turn."""
        self.spans: list[types_pb2.VersionSpan] = []
        """Of all sampled tokens."""
        self.routes: list[types_pb2.RowsRef] = []
        self.finish_reason: types_pb2.FinishReason = UNFINISHED
        """Of the current turn, once it has ended."""
        self.timings = Timings()
        self.cached_token_count = 0
        self.prefix_query_token_count = 0
        self.first_route_position = 0
        """The next request records rows from here on: those before are referred to, or given up."""
        self.turn_limit_tokens: int | None = None
        """What the current turn may sample at most, where that is less than the group's `max_new_tokens`."""
        self.turn_start = len(prompt_token_ids)
        """Position of the current turn's first sampled token."""
        self._turn_routes = 0
        self._unrouted: list[types_pb2.VersionSpan] = []
        """Of tokens from `first_route_position` on whose rows nobody has: they stayed with a stream that broke off."""
        self._route_counts: dict[int, int] = {}
        """How many of `routes` there were at the end of each turn: they cover all positions before its last."""

    def branch(self, token_count: int, token_ids: Sequence[int]) -> Rollout:
        """Another one that goes on from the end of an earlier turn, after so many of these tokens.

        What was sampled for this one is a prompt there, which trains here alone. Its rows are referred to, not moved
        or computed again.
        """
        other = Rollout([*self.token_ids[:token_count], *token_ids], self.role)
        if token_count in self._route_counts:
            other.routes = self.routes[: self._route_counts[token_count]]
            other.first_route_position = token_count - 1
            other._turn_routes = len(other.routes)
        return other

    @property
    def answer(self) -> list[int]:
        """Tokens of the current turn so far."""
        return self.token_ids[self.turn_start :]

    @property
    def sampled_token_count(self) -> int:
        """Tokens that the model drew."""
        return sum(end - start for start, end in self.sampled)

    def tokens_left(self, max_new_tokens: int) -> int:
        """How many the current turn may still sample."""
        limit = max_new_tokens if self.turn_limit_tokens is None else min(max_new_tokens, self.turn_limit_tokens)
        return limit - (len(self.token_ids) - self.turn_start)

    def hear(self, token_ids: Sequence[int]) -> None:
        """Begin the next turn: tokens that the environment says, which nobody sampled."""
        if not self.finish_reason:
            raise ValueError("the turn before has not ended")
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.turn_start, self.finish_reason = len(self.token_ids), UNFINISHED
        self._turn_routes = len(self.routes)

    def ended_turn(self) -> runner_pb2.RolloutRecord:
        """What `recall` brings the current turn, which has ended, to its end with."""
        return runner_pb2.RolloutRecord(
            answer=runner_pb2.Answer(token_ids=self.answer, logprobs=self.logprobs[self.turn_start :]),
            spans=_last(self.spans, len(self.answer)),
            routes=self.routes[self._turn_routes :],
            finish_reason=self.finish_reason,
            cached_token_count=self.cached_token_count,
            prefix_query_token_count=self.prefix_query_token_count,
        )

    def recall(self, turn: runner_pb2.RolloutRecord) -> None:
        """Bring the current turn, of which nothing is sampled, to the end that it had in an earlier process."""
        self._append(Segment(list(turn.answer.token_ids), list(turn.answer.logprobs), list(turn.spans)))
        for ref in turn.routes:
            self._refer(ref)
        self.finish_reason = turn.finish_reason
        self.cached_token_count = turn.cached_token_count
        self.prefix_query_token_count = turn.prefix_query_token_count
        self.first_route_position, self._unrouted = len(self.token_ids) - 1, []
        self._route_counts[len(self.token_ids)] = len(self.routes)

    def forget_turn(self) -> None:
        """Drop the current turn, and what was heard before it: it came to no end that anybody was shown."""
        end = self.sampled[-1][1] if self.sampled else self.prompt_token_count
        if self.sampled and end > self.turn_start:
            dropped = end - self.turn_start
            self.spans = _first(self.spans, _count(self.spans) - dropped)
            self.sampled.pop()
            end = self.sampled[-1][1] if self.sampled else self.prompt_token_count
        del self.token_ids[end:], self.logprobs[end:]
        self.turn_start = self.sampled[-1][0] if self.sampled else end
        self.finish_reason = STOP if self.sampled else UNFINISHED
        self.first_route_position, self._unrouted = len(self.token_ids) - 1, []

    def take(self, segment: Segment, prompt_routes: types_pb2.RowsRef | None, sampling: types_pb2.Sampling) -> None:
        """Append what a stream delivered. `prompt_routes`: rows of its prompt, from `first_route_position` on."""
        last = len(self.token_ids) - 1
        if prompt_routes is not None:
            if not self._unrouted or _same_weights([*self._unrouted, *segment.spans[:1]]):
                self._refer(prompt_routes)
            self.first_route_position, self._unrouted = last, []
        self._append(segment)
        # The last token has no row until the next turn.
        routes = segment.routes and _before(segment.routes, len(self.token_ids) - 1)
        if routes is not None:
            self._refer(routes)
        if self._ended(segment, sampling) or routes is not None:
            self.first_route_position, self._unrouted = len(self.token_ids) - 1, []
        else:
            add_spans(self._unrouted, segment.spans)
        if self.finish_reason:
            self._route_counts[len(self.token_ids)] = len(self.routes)

    def _append(self, segment: Segment) -> None:
        start, end = len(self.token_ids), len(self.token_ids) + len(segment.token_ids)
        if start == end:
            return
        self.token_ids += segment.token_ids
        self.logprobs += segment.logprobs
        if self.sampled and self.sampled[-1][1] == start:
            start = self.sampled.pop()[0]
        self.sampled.append((start, end))
        add_spans(self.spans, segment.spans)

    def _ended(self, segment: Segment, sampling: types_pb2.Sampling) -> bool:
        """Whether the turn is over, be it that only the news of that was lost."""
        if segment.finish_reason in (STOP, LENGTH):
            self.finish_reason = segment.finish_reason
        elif len(self.token_ids) > self.turn_start and self.token_ids[-1] in sampling.stop_token_ids:
            self.finish_reason = STOP
        elif self.tokens_left(sampling.max_new_tokens) <= 0:
            self.finish_reason = LENGTH
        return bool(self.finish_reason)

    def _refer(self, ref: types_pb2.RowsRef) -> None:
        if len(self.routes) < MAX_ROUTE_REFS:
            self.routes.append(ref)


def add_spans(spans: list[types_pb2.VersionSpan], news: Sequence[types_pb2.VersionSpan]) -> None:
    """Append spans. Chunks are cut by time; a span that only goes on is the same span."""
    for span in news:
        last = spans[-1] if spans else None
        if last is not None and (last.version, last.kv_oldest_version) == (span.version, span.kv_oldest_version):
            last.token_count += span.token_count
        else:
            spans.append(_span(span, span.token_count))


def _span(span: types_pb2.VersionSpan, token_count: int) -> types_pb2.VersionSpan:
    """A span of its own: others grow."""
    copy = types_pb2.VersionSpan()
    copy.CopyFrom(span)
    copy.token_count = token_count
    return copy


def _before(ref: types_pb2.RowsRef, end: int) -> types_pb2.RowsRef | None:
    """Those of a reference's rows that are of positions below `end`; None where none is."""
    ranges = [types_pb2.RowRange(start=each.start, end=min(each.end, end)) for each in ref.ranges if each.start < end]
    if ranges == list(ref.ranges):  # also where it says no ranges, and is of all
        return ref
    if not ranges:
        return None
    part = types_pb2.RowsRef()
    part.CopyFrom(ref)
    del part.ranges[:]
    part.ranges.extend(ranges)
    part.size_bytes = ref.size_bytes // _row_count(ref) * _row_count(part)
    return part


def _row_count(ref: types_pb2.RowsRef) -> int:
    return sum(each.end - each.start for each in ref.ranges)


def _count(spans: Sequence[types_pb2.VersionSpan]) -> int:
    return sum(span.token_count for span in spans)


def _first(spans: Sequence[types_pb2.VersionSpan], token_count: int) -> list[types_pb2.VersionSpan]:
    """The spans of the first tokens."""
    kept: list[types_pb2.VersionSpan] = []
    for span in spans:
        if (count := min(span.token_count, token_count)) > 0:
            kept.append(_span(span, count))
            token_count -= count
    return kept


def _last(spans: Sequence[types_pb2.VersionSpan], token_count: int) -> list[types_pb2.VersionSpan]:
    """The spans of the last tokens."""
    kept = _first(list(reversed(spans)), token_count)
    return kept[::-1]


def _same_weights(spans: Sequence[types_pb2.VersionSpan]) -> bool:
    """Whether one version sampled all of it, on KV of its own."""
    versions = {(v.incarnation, v.step) for span in spans for v in (span.version, span.kv_oldest_version)}
    return len(versions) == 1
