"""The samples being decoded, as arrays with one row each, so that a step costs no Python per sample.

Rows 0 to `count - 1` are in use; a removed row is replaced by the last one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from slipstream.common.version import UNSET, PolicyVersion
from slipstream.engine.base import DecodeRequest, FinishReason, SampleChunk
from slipstream.engine.embedded.sampler import sample_key

MAX_STOP_TOKENS = 64


@dataclass(eq=False)
class ActiveDecode:
    """A decode request whose prompt has its KV."""

    request: DecodeRequest
    flush_s: float
    prompt_blocks: list[int] = field(default_factory=list)
    """Held until the last sample is admitted."""
    cached_tokens: int = 0
    oldest: PolicyVersion = UNSET
    """Oldest weights behind the prompt's KV; unset if the prompt has no position with KV."""
    pending: deque[int] = field(default_factory=deque)
    """Indices of samples not admitted yet."""
    running: set[int] = field(default_factory=set)
    """Indices of samples in the batch."""
    flush_at: float = 0.0


@dataclass(eq=False)
class RunningSample:
    """One row's bookkeeping."""

    owner: ActiveDecode
    index: int
    table: list[int]
    oldest: PolicyVersion
    spans: list[tuple[int, PolicyVersion]]
    """(tokens sampled before, weights from then on)."""
    flushed: int = 0

    @property
    def sample_id(self) -> str:
        return self.owner.request.sample_ids[self.index]


class RunningBatch:
    """Arrays by row. `position` is where the row's newest token goes; its KV is computed by the next step."""

    def __init__(self, capacity: int, max_context: int, blocks_a_table: int, padding_block: int) -> None:
        self.capacity = capacity
        self.count = 0
        self.samples: list[RunningSample] = []
        self.table = np.full((capacity, blocks_a_table), padding_block, np.int64)
        self.tables = torch.from_numpy(self.table)  # the same memory
        self._padding_block = padding_block
        self.token = np.zeros(capacity, np.int64)
        self.position = np.zeros(capacity, np.int64)
        self.first_position = np.zeros(capacity, np.int64)
        self.last_position = np.zeros(capacity, np.int64)
        self.key = np.zeros(capacity, np.uint64)
        self.temperature = np.ones(capacity, np.float32)
        self.top_p = np.ones(capacity, np.float32)
        self.top_k = np.zeros(capacity, np.int64)
        self.min_p = np.zeros(capacity, np.float32)
        self.stop = np.full((capacity, MAX_STOP_TOKENS), -1, np.int64)
        self.out_token = np.zeros((capacity, max_context), np.int32)
        self.out_logprob = np.zeros((capacity, max_context), np.float32)

    @property
    def full(self) -> bool:
        return self.count == self.capacity

    @property
    def token_count(self) -> int:
        """Tokens of all rows, prompts included."""
        return int(self.position[: self.count].sum()) + self.count

    def add(self, sample: RunningSample) -> None:
        """Put a sample into the next row. Its first step computes the last prompt token."""
        row, request = self.count, sample.owner.request
        sampling = request.sampling
        self.count += 1
        self.samples.append(sample)
        self.table[row, : len(sample.table)] = sample.table
        self.table[row, len(sample.table) :] = self._padding_block
        self.token[row] = request.token_ids[-1]
        self.position[row] = self.first_position[row] = len(request.token_ids) - 1
        self.last_position[row] = self.first_position[row] + sampling.max_new_tokens - 1
        self.key[row] = sample_key(sampling.seed, request.draw_index(sample.index))
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k
        self.min_p[row] = sampling.min_p
        self.stop[row] = -1
        self.stop[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids

    def remove(self, row: int) -> None:
        """Free a row."""
        last = self.count - 1
        if row != last:
            for array in (
                self.table,
                self.token,
                self.position,
                self.first_position,
                self.last_position,
                self.key,
                self.temperature,
                self.top_p,
                self.top_k,
                self.min_p,
                self.stop,
                self.out_token,
                self.out_logprob,
            ):
                array[row] = array[last]
            self.samples[row] = self.samples[last]
        self.samples.pop()
        self.count = last

    def accept(self, tokens: np.ndarray, logprobs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Record one sampled token a row; masks of rows that ended: by a stop token, and in all."""
        n = self.count
        rows = np.arange(n)
        offset = self.position[:n] - self.first_position[:n]
        self.out_token[rows, offset] = tokens
        self.out_logprob[rows, offset] = logprobs
        stopped = (self.stop[:n] == tokens[:, None]).any(1)
        ended = stopped | (self.position[:n] >= self.last_position[:n])
        self.token[:n] = tokens
        self.position[:n] += 1
        return stopped, ended

    def sampled_count(self, row: int) -> int:
        """Tokens this row has sampled."""
        return int(self.position[row] - self.first_position[row])

    def take_chunk(self, row: int, finish_reason: FinishReason = "") -> SampleChunk:
        """What was sampled since the last chunk of this row."""
        sample, end = self.samples[row], self.sampled_count(row)
        start, sample.flushed = sample.flushed, end
        bounds = [before for before, _ in sample.spans[1:]] + [end]
        versions = []
        for (before, version), after in zip(sample.spans, bounds, strict=True):
            if (count := after - max(before, start)) > 0:
                versions.append((count, version))
        return SampleChunk(
            sample_index=sample.index,
            token_ids=self.out_token[row, start:end].tolist(),
            logprobs=self.out_logprob[row, start:end].tolist(),
            versions=versions,
            kv_oldest_version=sample.oldest,
            finish_reason=finish_reason,
            cached_token_count=sample.owner.cached_tokens,
        )
