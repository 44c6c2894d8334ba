"""What runs in the worker processes of a vLLM that judges tokens: prompt log-probabilities at a request's temperature.

vLLM takes those of prompts from the logits as they are, whatever `temperature` and `logprobs_mode` say: sampling's
processors are for what is sampled. The policy's tokens were drawn at a temperature, so the teacher's are read at it.
"""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch

if torch.version.cuda is None:
    from slipstream.engine.vllm.cpu_ranks import mend_cpu_ranks

    mend_cpu_ranks()

TEMPERATURE = "slipstream_temperature"
"""Among a request's extra arguments."""


class JudgeExtension:
    """Mixed into vLLM's worker class."""

    model_runner: Any

    def slipstream_judge(self) -> None:
        """Get ready, before the first request."""
        read_at_temperature(self.model_runner)


def read_at_temperature(runner: Any) -> None:
    """Have vLLM's (first) model runner divide the logits of each request's prompt by what the request names."""
    of_prompts, of_logits = runner._get_prompt_logprobs_dict, runner.sampler.compute_logprobs
    temperature = 1.0

    def logprobs(logits: torch.Tensor) -> torch.Tensor:
        return of_logits(logits if temperature == 1.0 else logits.float() / temperature)

    def one_by_one(hidden_states: torch.Tensor, scheduled: dict[str, int]) -> dict[str, Any]:
        nonlocal temperature
        waiting: dict[str, int] = runner.num_prompt_logprobs
        found: dict[str, Any] = {}
        try:
            for key, count in list(waiting.items()):
                temperature = (runner.requests[key].sampling_params.extra_args or {}).get(TEMPERATURE, 1.0)
                runner.num_prompt_logprobs = {key: count}
                found |= of_prompts(hidden_states, scheduled)
                if not runner.num_prompt_logprobs:  # its prompt is done
                    del waiting[key]
        finally:
            temperature = 1.0
            runner.num_prompt_logprobs = waiting
        return found

    runner.sampler.compute_logprobs = logprobs
    runner._get_prompt_logprobs_dict = one_by_one
