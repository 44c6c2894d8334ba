"""Learning rates by step."""

from __future__ import annotations


def warmup_then_linear(step: int, *, warmup_steps: int, total_steps: int, final_fraction: float) -> float:
    """Factor of the learning rate at `step` (from 1): linear rise to 1, then linear fall to `final_fraction`.

    Steps after `total_steps` stay at `final_fraction`.
    """
    if step <= warmup_steps:
        return step / (warmup_steps + 1)
    done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return 1.0 - (1.0 - final_fraction) * done
