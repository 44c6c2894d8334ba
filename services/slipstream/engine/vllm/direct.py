"""Tokens of samples that go on, taken as they come: of what vLLM does with the outputs of a step, they need nothing.

vLLM makes an object of the request's answer from each token, keeps its log-probability in three lists, counts what its
own metrics show, and wakes whoever waits for the answer. At 64 samples on a GPU a step waits for that. A sample's first
token, its last one, and all that is said of it beside tokens go that way; what lies between is put down here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.engine.vllm.samples import Sample


class Direct:
    """One sample that has begun, and vLLM's own state of it. Its waiter has taken all that came before."""

    __slots__ = ("collector", "kind", "rows", "sample", "state")

    def __init__(self, sample: Sample, state: Any, collector: Any) -> None:
        self.sample = sample
        self.state = state
        self.collector = collector
        self.rows: list[bytes] = []
        """Expert routes that `state` does not have yet, a token's each."""
        self.kind: tuple[str, Sequence[int]] = ("", ())
        """Dtype and shape of one."""

    def give_way(self) -> None:
        """Let vLLM's state have the rows, before what comes next."""
        if self.rows:
            dtype, shape = self.kind
            rows = np.frombuffer(b"".join(self.rows), dtype).reshape(-1, *shape)
            self.state.routed_experts_chunks.append(rows)
            self.rows = []


class DirectSamples:
    """Of one engine, by the ids that vLLM has given them."""

    def __init__(self) -> None:
        self._samples: dict[str, Direct] = {}
        self._token_count = 0

    def add(self, vllm_id: str, direct: Direct) -> None:
        self._samples[vllm_id] = direct

    def settle(self, vllm_id: str) -> None:
        """Before vLLM is asked to end it; from then on all goes vLLM's way."""
        direct = self._samples.pop(vllm_id, None)
        if direct is not None:
            direct.give_way()

    def give_way(self, outputs: Sequence[Any]) -> None:
        """Before vLLM looks at these, whose rows come after those that were taken."""
        for output in outputs:
            if (direct := self._samples.get(output.request_id)) is not None:
                direct.give_way()

    def take_count(self) -> int:
        """Tokens taken since the last call."""
        count, self._token_count = self._token_count, 0
        return count

    def take(
        self, output: Any, logprobs: Sequence[float], rows: Sequence[bytes], kind: tuple[str, Sequence[int]]
    ) -> bool:
        """Take a request's part of a step, if it is tokens alone; else vLLM has to look at it.

        `rows`: of expert routes, one for each token, or none; their dtype and shape.
        """
        direct = self._samples.get(output.request_id)
        if direct is None or direct.collector.output is not None or not _is_tokens_alone(output):
            return False
        direct.sample.add(output.new_token_ids, logprobs)
        direct.rows += rows
        direct.kind = kind
        self._token_count += len(logprobs)
        return True


def _is_tokens_alone(output: Any) -> bool:
    return (
        output.finish_reason is None
        and output.events is None
        and output.routed_experts is None
        and output.prefill_stats is None
        and output.kv_transfer_params is None
        and output.ec_transfer_params is None
        and output.new_sampling_mask is None
        and output.new_prompt_logprobs_tensors is None
    )
