"""Requests that ask vLLM of a prompt alone: for its KV and routes, or how likely it finds each of its tokens."""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.common.errors import RequestAborted


def prompt_parameters(extra_args: Mapping[str, Any] | None, *, logprobs: bool) -> Any:
    """vLLM's `SamplingParams`. It computes nothing without sampling: one token, which nobody gets to see.

    `logprobs`: those of the prompt's tokens come with the answer, for `prompt_logprobs`.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=0 if logprobs else None,
        flat_logprobs=logprobs,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=None if extra_args is None else dict(extra_args),
    )


def prompt_logprobs(output: Any, token_count: int) -> list[float]:
    """Of a prompt's tokens but the first, each after all before it. Raises `RequestAborted` where some are missing."""
    said = list(output.prompt_logprobs.logprobs)
    if len(said) != token_count - 1:
        raise RequestAborted(f"vLLM spoke of {len(said)} of {token_count - 1} tokens")
    return said
