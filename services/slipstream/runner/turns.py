"""The inference client: the rollouts of a group, turn by turn.

The first turn is one request, whose members share their prompt; each goes on by itself from there. A turn that fails at
a worker is placed again, away from that worker, within the group's deadline: from the tokens that came, and for what is
left of `max_new_tokens`. So is one whose prefill worker stands still, as soon as the router knows. It stays the same
rollout: the salt and the least version are those of its group, and each draw is that of its seed, its index and its
position. Retries live here and nowhere else on this path.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Sequence

import structlog

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common import errors
from slipstream.common.tracing import TraceContext
from slipstream.runner import telemetry
from slipstream.runner.attempt import Inference, TurnAttempt, Wish
from slipstream.runner.peers import Peers
from slipstream.runner.rollout import Rollout
from slipstream.runner.spares import Spares
from slipstream.runner.traces import AttemptTraces
from slipstream.runner.turn_log import TurnLog
from slipstream.runner.watch import WorkerWatch

log = structlog.get_logger()

PLACE_AGAIN = (
    errors.WorkerStale,
    errors.NoWeights,
    errors.Draining,
    errors.RequestAborted,
    errors.KvTransferFailed,
    errors.KvUnknown,
    errors.KvMismatch,
    errors.NoWorker,
    errors.PoolSaturated,
    errors.StateUnavailable,
    errors.EngineFull,
    errors.Unreachable,
    errors.DeadlineExceeded,
)
"""What another placement may heal."""
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0


class TurnClient:
    """Begins conversations. One a runner; safe to use from many tasks."""

    def __init__(self, peers: Peers, watch: WorkerWatch, block_size_tokens: int, prefill_timeout_s: float) -> None:
        self._inference = Inference(peers, watch, block_size_tokens, prefill_timeout_s)

    def begin(
        self,
        assignment: runner_pb2.GroupAssignment,
        prompt_token_ids: Sequence[int],
        turn_log: TurnLog | None = None,
    ) -> Conversation:
        """The rollouts of an attempt at a group, before their first turn. `turn_log`: where turns that end are kept."""
        conversation = self.begin_apart(assignment, turn_log)
        for index in range(assignment.sample_count):
            conversation.add(index, Rollout(prompt_token_ids))
        return conversation

    def begin_apart(
        self, assignment: runner_pb2.GroupAssignment, turn_log: TurnLog | None = None, taken_up: int = 0
    ) -> Conversation:
        """An attempt at a group whose rollouts are yet to be added. `taken_up`: how often it was begun before, where no
        turn log says that."""
        return Conversation(self._inference, assignment, turn_log, taken_up)

    def release_routes(self, rollouts: Iterable[Rollout]) -> None:
        """Nobody will train on these."""
        refs = {(ref.holder, ref.key): ref for rollout in rollouts for ref in rollout.routes}
        self._inference.peers.release_routes(list(refs.values()))


class Conversation:
    """The model's turns in all rollouts of one attempt at a group, and the tokens of each rollout so far.

        await conversation.answer(deadline_s)                      # all of them, from the same prompt
        await conversation.reply(index, token_ids, deadline_s)     # one of them, to what its environment says
        await conversation.sample([index], deadline_s)             # a turn of some that have the same tokens

    Rollouts may be replied to at the same time. Deadlines are in `time.monotonic()` terms. Rows of positions that a
    rollout has from earlier turns move no second time. Whoever gives a conversation up releases its routes.
    """

    def __init__(
        self,
        inference: Inference,
        assignment: runner_pb2.GroupAssignment,
        turn_log: TurnLog | None = None,
        taken_up: int = 0,
    ) -> None:
        self._turn_log = turn_log
        taken_up = turn_log.taken_up if turn_log is not None else taken_up
        self._taken_up = f"r{taken_up}" if taken_up else ""
        self._inference = inference
        self._assignment = assignment
        self._request_count = 0
        self._rollouts: dict[int, Rollout] = {}
        self._wishes: dict[int, Wish] = {}
        self._spares: Spares | None = None
        self._traces = AttemptTraces(assignment)
        self._shared: dict[int, tuple[str, TraceContext]] = {}
        """By index, while a turn is asked for together with others': the rollout, and the turn in its trace."""

    @property
    def indexed(self) -> list[tuple[int, Rollout]]:
        """The same with their indexes."""
        return list(self._rollouts.items())

    @property
    def rollouts(self) -> list[Rollout]:
        """In the order in which they were added."""
        return list(self._rollouts.values())

    def rollout(self, index: int) -> Rollout:
        """One of them."""
        return self._rollouts[index]

    def add(self, index: int, rollout: Rollout) -> None:
        """Another one, before its first turn. Its draws are those of its index."""
        self._rollouts[index] = rollout

    async def answer(self, deadline_s: float, spares: Spares | None = None) -> None:
        """The first turn of all rollouts; with `spares`, of those that end first: the others are dropped.

        Cancelling the task aborts what runs at the workers and returns only when their blocks are free.

        Raises:
            DeadlineExceeded: no placement brought it to an end in time.
            SlipstreamError: what no other placement can heal.
        """
        self._spares = spares
        await self.sample(list(self._rollouts), deadline_s)
        if spares is not None:
            left = [rollout for index, rollout in self._rollouts.items() if spares.gives_up(index)]
            spares.token_count += sum(rollout.sampled_token_count for rollout in left)
            self.release_routes_of(left)

    async def sample(self, indexes: Sequence[int], deadline_s: float, wish: Wish | None = None) -> None:
        """A turn of rollouts that have the same tokens, in one request. Otherwise as `answer`."""
        if wish is not None:
            self._wishes |= dict.fromkeys(indexes, wish)
        turn_log, spares = self._turn_log, self._spares
        asked = [i for i in indexes if turn_log is None or not turn_log.recall(i, self._rollouts[i])]
        if spares is not None:
            for index in indexes:
                if index not in asked:
                    spares.ended(index)
        try:
            if asked and not (spares is not None and spares.enough):
                with self._traces.span("turn", asked, samples=len(asked), first_sample=asked[0]) as turn:
                    self._shared |= self._traces.apart(turn, asked)
                    await self._sample(asked, deadline_s, ())
        finally:
            for index in indexes:
                self._shared.pop(index, None)
                if wish is not None:
                    del self._wishes[index]
        if turn_log is not None:
            for index in asked:
                if spares is None or index in spares.taken:
                    turn_log.keep(index, self._rollouts[index])

    async def reply(self, index: int, token_ids: Sequence[int], deadline_s: float) -> None:
        """The next turn of one rollout, after tokens that nobody sampled. Otherwise as `answer`."""
        self._rollouts[index].hear(token_ids)
        await self.sample([index], deadline_s)

    def release_routes(self) -> None:
        """Nobody will train on these rollouts."""
        self.release_routes_of(self.rollouts)

    def release(self, refs: Sequence[types_pb2.RowsRef]) -> None:
        """Nobody will train on what these are of."""
        self._inference.peers.release_routes(list(refs))

    def release_routes_of(self, rollouts: Sequence[Rollout]) -> None:
        """Nobody will train on some of them; what others refer to as well stays."""
        given_up = {id(rollout) for rollout in rollouts}
        kept = {(ref.holder, ref.key) for each in self.rollouts if id(each) not in given_up for ref in each.routes}
        refs = {(ref.holder, ref.key): ref for rollout in rollouts for ref in rollout.routes}
        self._inference.peers.release_routes([ref for name, ref in refs.items() if name not in kept])
        self._rollouts = {index: each for index, each in self._rollouts.items() if id(each) not in given_up}

    async def _sample(self, indexes: Sequence[int], deadline_s: float, avoid: Sequence[str]) -> None:
        """Bring the turns of rollouts that share their tokens to their ends."""
        backoff_s = FIRST_BACKOFF_S
        failures = 0
        while self._spares is None or not self._spares.enough:
            attempt = self._attempt(indexes)
            try:
                async with asyncio.timeout(max(deadline_s - time.monotonic(), 0)):
                    return await attempt.run(avoid)
            except TimeoutError as error:
                raise errors.DeadlineExceeded("the turn did not end before the group's deadline") from error
            except PLACE_AGAIN as error:
                failures += 1
                log.info("turn_placed_again", request_id=attempt.request_id, reason=error.reason, failures=failures)
                if attempt.placement is not None:
                    avoid = [attempt.failed_replica(error)]
            delivered = attempt.delivered
            if delivered:
                telemetry.kept_tokens.inc(sum(delivered.values()))
                backoff_s = FIRST_BACKOFF_S
            indexes = [index for index in indexes if not self._rollouts[index].finish_reason]
            if not indexes:
                return  # only the news of their end was lost
            pause_s = backoff_s * (0.5 + random.random())
            if time.monotonic() + pause_s >= deadline_s:
                raise errors.DeadlineExceeded(f"{failures} placements failed before the group's deadline")
            await asyncio.sleep(pause_s)
            backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)
            begun = [[index] for index in indexes if index in delivered]
            if begun and len(indexes) > 1:  # they share their tokens no longer
                others = [index for index in indexes if index not in delivered]
                return await self._sample_apart([*begun, *([others] if others else [])], deadline_s, avoid)

    async def _sample_apart(self, parts: Sequence[Sequence[int]], deadline_s: float, avoid: Sequence[str]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for part in parts:
                    group.create_task(self._sample(part, deadline_s, avoid))
        except* errors.SlipstreamError as failed:
            raise failed.exceptions[0] from None  # the first; it ended the others

    def _attempt(self, indexes: Sequence[int]) -> TurnAttempt:
        number, self._request_count = self._request_count, self._request_count + 1
        rollouts = {index: self._rollouts[index] for index in indexes}
        suffix = "~".join(("", *filter(None, (self._taken_up, str(number or "")))))
        wish = self._wishes.get(next(iter(rollouts)))
        shared = {index: self._shared[index] for index in indexes if index in self._shared}
        return TurnAttempt(self._inference, self._assignment, rollouts, suffix, wish, self._spares, shared)
