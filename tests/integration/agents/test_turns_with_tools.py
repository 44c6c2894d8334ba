"""Agents with tools over several turns through orchestrator, runner, router and vLLM, while weights change."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest

from slipstream.common.version import PolicyVersion
from slipstream.environments.tokenizer import TextCodec
from slipstream.trainer.sequence import version_number
from tests.integration.agents.calling import BLOCK_TOKENS, SIZES, build_tokenizer
from tests.integration.agents.history import Turn, recomputed, turns

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]

COMPARED = 4
"""Sequences of each kind that are computed once more."""


def crossed_within(sequence: list[Turn]) -> bool:
    return any(len(set(turn.versions)) > 1 for turn in sequence)


def crossed_between(sequence: list[Turn]) -> bool:
    return any(one.versions[-1] != other.versions[0] for one, other in itertools.pairwise(sequence))


def told_apart(sequence: list[Turn], dispatched_at: PolicyVersion) -> bool:
    """Whether it is known which weights computed each part of its KV."""
    first, *later = sequence
    # A decode engine that was ahead may have had a part of the prompt from a group of the same version.
    begun_at = {first.versions[0], first.prefilled_at or dispatched_at}
    return begun_at == {dispatched_at} and all(turn.prefilled_at is None for turn in later)


async def test_turns_with_tools_train_on_what_vllm_sampled_across_updates(start_stack):
    stack = await start_stack(max_off_policy_steps=6)
    codec = TextCodec(build_tokenizer(), SIZES.eos_token_id)
    trained, within, between = [], [], []
    async with asyncio.timeout(150):
        while len(trained) < 12 or len(within) < COMPARED or len(between) < COMPARED:
            for each in await stack.train():
                sequence = turns(stack, each.tokens, each.planned.loss_ranges)
                trained.append((each, sequence))
                if told_apart(sequence, PolicyVersion.from_proto(each.planned.dispatch_version)):
                    within += [(each, sequence)] * crossed_within(sequence)
                    between += [(each, sequence)] * crossed_between(sequence)
    calls = 0
    for each, sequence in trained:
        # What was trained is what vLLM sampled, and each prompt goes on from exactly that.
        assert len(sequence) == len(each.said) == 4
        for one, other in itertools.pairwise(sequence):
            assert other.prompt[: len(one.prompt) + len(one.said)] == one.prompt + one.said
            heard = codec.decode_all(other.prompt[len(one.prompt) + len(one.said) :])
            assert heard.startswith(("" if one.said[-1] == codec.end_id else "<|im_end|>") + "\n<|im_start|>")
            assert heard.endswith("<|im_end|>\n<|im_start|>assistant\n")
            calls += "there is a cab" in heard
            # What is known of the conversation is not computed again.
            assert other.cached_count >= (len(sequence[0].prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        # Only that trains, with what vLLM said of it.
        places = [place for span in each.planned.loss_ranges for place in range(span.start, span.end)]
        assert each.made.target_positions.tolist() == places
        assert [each.tokens[place] for place in places] == [token for turn in sequence for token in turn.said]
        logprobs = [logprob for turn in sequence for logprob in turn.logprobs]
        assert np.array_equal(each.made.engine_logps, np.array(logprobs, np.float32))
        versions = [version for turn in sequence for version in turn.versions]
        assert each.made.sampled_at.tolist() == [version_number(version) for version in versions]
        assert each.made.known_N.all()
        assert codec.encode(codec.decode_all(each.tokens)) != each.tokens
    assert calls > len(trained)
    # All of it is what the weights that are named say, though they changed between turns and within.
    for each, sequence in [*between[:COMPARED], *within[:COMPARED]]:
        logprobs, rows = recomputed(stack.cluster, sequence, PolicyVersion.from_proto(each.planned.dispatch_version))
        assert np.abs(each.made.engine_logps - np.array(logprobs)).max() < 1e-4
        differing = (np.sort(each.made.routes.rows, -1) != rows).any((1, 2)).sum()
        assert differing <= 1, "experts of a position: float32 may round a tie otherwise, once"
