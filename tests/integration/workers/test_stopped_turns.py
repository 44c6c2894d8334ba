"""Turns that whoever listens ends, as a stop text does: which of their expert routes are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from slipstream.runner.attempt import Wish
from slipstream.runner.rollout import STOP
from slipstream.runner.turns import Conversation
from tests.integration.workers.rows import oracle_rows, read
from tests.integration.workers.test_resume import check_rows, decoders, slow

PROMPT = np.random.default_rng(9).integers(0, 23, 30).tolist()
COUNT = 200
"""Of tokens, unless a turn is ended."""


class Listener:
    """Ends each rollout's turn after so many tokens, whatever else has come by then."""

    def __init__(self, ends: Mapping[int, int]) -> None:
        self._ends = ends
        self.heard = dict.fromkeys(ends, 0)

    async def __call__(self, news: Mapping[int, tuple[Sequence[int], Sequence[float]]]) -> Mapping[int, int]:
        ends: dict[int, int] = {}
        for index, (token_ids, _) in news.items():
            if index not in self.heard:
                continue
            if self.heard[index] + len(token_ids) >= self._ends[index]:
                ends[index] = self._ends[index] - self.heard[index]
            self.heard[index] += len(token_ids)
        return ends


async def stopped(turns: Any, ends: Mapping[int, int], **fields: Any) -> Conversation:
    """A first turn of three rollouts, some of which are ended."""
    conversation = turns.begin(PROMPT, samples=3, max_new_tokens=COUNT, temperature=1.0, seed=4, **fields)
    await turns.sample(conversation, 0, 1, 2, wish=Wish(listen=Listener(ends)))
    return conversation


@pytest.mark.parametrize("ends", [{0: 3, 1: 40, 2: 9}, {0: 1, 1: 60}], ids=["all", "not all"])
async def test_a_turn_that_is_ended_early_has_the_rows_of_all_its_tokens(cluster, start_turns, ends):
    turns = await start_turns()
    whole = await turns.ask(PROMPT, "whole", samples=3, max_new_tokens=COUNT, temperature=1.0, seed=4)
    slow(cluster)
    conversation = await stopped(turns, ends)
    rollouts = conversation.rollouts
    lengths = [ends.get(index, COUNT) for index in range(3)]
    assert [len(rollout.answer) for rollout in rollouts] == lengths
    for index, (rollout, other) in enumerate(zip(rollouts, whole.rollouts, strict=True)):
        assert rollout.answer == other.answer[: lengths[index]], "a draw is that of a seed, an index and a position"
    assert all(rollouts[index].finish_reason == STOP for index in ends)
    # The prompt's once, and of each its own but the last token's.
    await check_rows(cluster, rollouts, len(PROMPT) - 1 + sum(lengths))
    await turns.nothing_left()


async def test_the_next_turn_goes_on_where_the_rows_of_the_ended_one_end(cluster, start_turns):
    turns = await start_turns()
    slow(cluster)
    conversation = await stopped(turns, {0: 12, 1: 5, 2: 7})
    await turns.reply(conversation, 0, [7, 8, 9])
    rollout = conversation.rollouts[0]
    assert [end - start for start, end in rollout.sampled] == [12, COUNT]
    await check_rows(cluster, [rollout], len(rollout.token_ids) - 1)


async def test_rows_are_unknown_only_where_the_worker_is_gone_before_it_tells(cluster, start_turns):
    turns = await start_turns()
    slow(cluster)
    (worker,) = decoders(cluster)

    class Kills(Listener):
        async def __call__(self, news: Any) -> Any:
            ends = await super().__call__(news)
            if ends:
                await cluster.kill(worker)
            return ends

    conversation = turns.begin(PROMPT, samples=1, max_new_tokens=COUNT, temperature=1.0, seed=4)
    await turns.sample(conversation, 0, wish=Wish(listen=Kills({0: 6})))
    (rollout,) = conversation.rollouts
    assert (rollout.finish_reason, len(rollout.answer)) == (STOP, 6)
    (sequence,), _ = await read(cluster, [(rollout.token_ids, rollout.routes)])
    known = sequence.routes.known()
    assert known[: len(PROMPT) - 1].all()
    assert not known[len(PROMPT) - 1 :].any()
    rows = np.sort(sequence.routes.rows, -1)
    assert np.array_equal(rows[known], oracle_rows(cluster, sequence.token_ids.tolist())[known])
