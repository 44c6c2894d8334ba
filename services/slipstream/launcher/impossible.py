"""Values that their types allow and with which no run could go on. Pure: reads nothing but the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slipstream.launcher.config import RunConfig

LEAST_S = {
    "launcher.start_timeout_s": 1.0,
    "evaluation.timeout_s": 1.0,
    "orchestrator.start_timeout_s": 1.0,
    "orchestrator.pool_timeout_s": 1.0,
    "orchestrator.stall_timeout_s": 1.0,
    "orchestrator.failing_environment_timeout_s": 1.0,
    "router.lease_ttl_s": 1.0,
    "runner.environment_timeout_s": 1.0,
    "runner.environment_blocked_timeout_s": 0.5,
    "trainer.rows_timeout_s": 1.0,
    "weights.lease_s": 1.0,
}
"""Below these, one slow moment of a machine ends what is waited for: runners report each second."""
LEAST_DEADLINE_S = 1.0
LEAST_ENVIRONMENT_BYTES = 128 * 2**20
"""A process that has read the tokenizer holds about half of this."""


def problems(config: RunConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """As `combinations.py` has them."""
    for key, least_s in LEAST_S.items():
        value = _value(config, key)
        if value is not None and value < least_s:
            yield (key,), f"is {value:g}, in which nothing can answer; set at least {least_s:g}"
    for index, environment in enumerate(config.environments):
        where = f"environments.{index}"
        if environment.deadline_s < LEAST_DEADLINE_S:
            yield (
                (f"{where}.deadline_s",),
                f"is {environment.deadline_s:g}, in which no group can end; set at least {LEAST_DEADLINE_S:g}",
            )
        parts, tasks = environment.curriculum.parts, environment.train_task_count
        if parts is not None and parts > tasks:
            yield (
                (f"{where}.curriculum.parts", f"{where}.train_task_count"),
                f"is {parts}, above {where}.train_task_count = {tasks}: a part has a task at least",
            )
        limit = environment.memory_limit_bytes
        if 0 < limit < LEAST_ENVIRONMENT_BYTES:
            yield (
                (f"{where}.memory_limit_bytes",),
                f"is {limit}; its process takes more before it does anything: set at least {LEAST_ENVIRONMENT_BYTES}, "
                "or 0 for no limit",
            )


def _value(config: RunConfig, key: str) -> Any:
    found: Any = config
    for name in key.split("."):
        found = getattr(found, name)
    return found
