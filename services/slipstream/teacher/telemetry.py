"""Metrics of a teacher worker."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import Counter, Histogram

from slipstream.common.metrics import Reading

tokens = Counter("slipstream_teacher_tokens", "Tokens that went through the teacher, prompts included.")
pass_seconds = Histogram("slipstream_teacher_pass_seconds", "Time of one pass through the teacher.")
failed_passes = Counter("slipstream_teacher_failed_passes", "Passes that failed; each sequence is then tried alone.")
waiting_tokens = Reading("gauge", "slipstream_teacher_waiting_tokens", "Tokens that wait, or are worked on.")


def observe(count: Callable[[], int]) -> None:
    """Read this worker from now on."""
    waiting_tokens.read_from(count)
