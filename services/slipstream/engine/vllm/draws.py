"""Draws of a sample that depend on its seed and the position alone, in vLLM's first model runner.

vLLM gives each request a generator, which goes on from step to step; the draw of a chunk of a prompt but the last is
taken back by an offset that generators on the CPU do not have, which ends vLLM's process. Seeded anew for each position
there is nothing to take back.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch


class PositionGenerator(torch.Generator):
    """A generator that is seeded before each draw."""

    base: int

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """Nothing to take back: the next draw seeds anew."""


def seed_draws_by_position(runner: Any) -> None:
    """Let a model runner of vLLM seed its requests' generators before each draw."""
    original = runner._sample

    def sample(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        for row, generator in list(batch.generators.items()):
            state = runner.requests[batch.req_ids[row]]
            if not isinstance(generator, PositionGenerator):
                base = generator.initial_seed()
                generator = batch.generators[row] = state.generator = PositionGenerator(generator.device)
                generator.base = base
            position = state.num_prompt_tokens + len(state.output_token_ids)  # the same when a sample is resumed
            generator.manual_seed(position_seed(generator.base, position))
        return original(*args, **kwargs)

    runner._sample = sample


def position_seed(seed: int, position: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
