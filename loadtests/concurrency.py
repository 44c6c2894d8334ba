"""Does the limit of rollouts in flight find what the engines can hold? On simulated engines, against fixed limits.

    python loadtests/concurrency.py

An engine here decodes all its samples a token a step; a step takes longer with more samples and more KV. A sample
holds KV for its prompt and what it has drawn. When none is left the youngest sample gives its KV up, waits, and later
computes it again, which stops all others meanwhile. Ends with 1 if a case reaches less than 90 % of the best fixed
limit's tokens a second, from the 60th second on.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from slipstream.orchestrator.concurrency import ConcurrencyLimit, Reading
from slipstream.orchestrator.config import ConcurrencyConfig

TICK_S = 0.25
FROM_S, UNTIL_S = 60.0, 240.0
FIXED = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
BLOCK_TOKENS = 16
PROMPT_TOKENS = 256
START = 64
REQUIRED = 0.9

Lengths = Callable[[random.Random], int]

LENGTHS: dict[str, Lengths] = {
    "even": lambda draw: draw.randint(400, 600),
    "long tail": lambda draw: min(6000, int(draw.lognormvariate(6.2, 0.9)) + 1),
    "short and long": lambda draw: 100 if draw.random() < 0.8 else 3000,
}


@dataclass
class Engine:
    """One engine: `capacity` tokens of KV."""

    capacity: int
    step_s: float = 0.012
    sample_s: float = 60e-6
    token_s: float = 25e-9
    prefill_tokens_per_s: float = 8000.0
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    """(tokens drawn, tokens to draw)."""
    # Whole numbers, so that every machine comes to the same.
    drawn: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    wanted: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    preemptions: int = 0
    sampled: int = 0
    _busy_s: float = 0.0
    _steps: float = 0.0
    """Part of the next step that is done."""

    @property
    def kv(self) -> int:
        return int(self.drawn.sum()) + PROMPT_TOKENS * len(self.drawn)

    def tick(self) -> int:
        """Go on for `TICK_S`; returns how many samples ended."""
        self._busy_s -= TICK_S
        while self.waiting and self._busy_s < 0.0:
            drawn, wanted = self.waiting[0]
            if self.kv + PROMPT_TOKENS + drawn > 0.98 * self.capacity:
                break
            self.waiting.popleft()
            self._busy_s += (PROMPT_TOKENS + drawn) / self.prefill_tokens_per_s
            self.drawn, self.wanted = np.append(self.drawn, drawn), np.append(self.wanted, wanted)
        if not len(self.drawn) or self._busy_s >= 0.0:
            return 0
        free_s = min(TICK_S, -self._busy_s)
        self._busy_s = 0.0 if free_s < TICK_S else self._busy_s + TICK_S
        self._busy_s = max(self._busy_s, 0.0)
        before = int(self.drawn.sum())
        step_s = self.step_s + self.sample_s * len(self.drawn) + self.token_s * self.kv
        self._steps += free_s / step_s
        self.drawn = np.minimum(self.drawn + int(self._steps), self.wanted)
        self._steps %= 1.0
        self.sampled += int(self.drawn.sum()) - before
        done = self.drawn >= self.wanted
        self.drawn, self.wanted = self.drawn[~done], self.wanted[~done]
        while self.kv > self.capacity:
            self.waiting.appendleft((int(self.drawn[-1]), int(self.wanted[-1])))
            self.drawn, self.wanted = self.drawn[:-1], self.wanted[:-1]
            self.preemptions += 1
        return int(done.sum())


def tokens_per_s(
    capacity: int, lengths: Lengths, limit: Callable[[float, int, list[Engine]], int], engine_count: int = 2
) -> float:
    """Tokens a second of two engines from the 60th second on, under a limit that is asked at each tick."""
    draw = random.Random(1)
    engines = [Engine(capacity) for _ in range(engine_count)]
    in_flight, sampled_before = 0, 0
    for number in range(int(UNTIL_S / TICK_S)):
        now_s = number * TICK_S
        if number == int(FROM_S / TICK_S):
            sampled_before = sum(engine.sampled for engine in engines)
        while in_flight < limit(now_s, in_flight, engines):
            target = min(engines, key=lambda engine: len(engine.drawn) + len(engine.waiting))
            target.waiting.append((0, lengths(draw)))
            in_flight += 1
        in_flight -= sum(engine.tick() for engine in engines)
    return (sum(engine.sampled for engine in engines) - sampled_before) / (UNTIL_S - FROM_S)


class Adaptive:
    """The real limit, told once a second what the engines report."""

    def __init__(self, start: int = START) -> None:
        self.limit = ConcurrencyLimit(ConcurrencyConfig(min_rollouts=8), start)
        self.history: list[int] = []
        self._due_s = 0.0

    def __call__(self, now_s: float, in_flight: int, engines: list[Engine]) -> int:
        if now_s >= self._due_s:
            self._due_s = now_s + 1.0
            self.limit.observe(reading_of(now_s, in_flight, engines))
            self.history.append(self.limit.rollouts)
        return self.limit.rollouts


def reading_of(now_s: float, in_flight: int, engines: list[Engine]) -> Reading:
    return Reading(
        at_s=now_s,
        in_flight=in_flight,
        running=sum(len(engine.drawn) for engine in engines),
        waiting=sum(len(engine.waiting) for engine in engines),
        blocks_used=sum(engine.kv for engine in engines) // BLOCK_TOKENS,
        blocks_total=sum(engine.capacity for engine in engines) // BLOCK_TOKENS,
        preemptions=sum(engine.preemptions for engine in engines),
    )


def measure(capacity: int, lengths: Lengths, fixed: tuple[int, ...] = FIXED) -> tuple[float, int, float, Adaptive]:
    """Tokens a second of the best fixed limit, that limit, and of the limit that adapts."""
    speeds = {count: tokens_per_s(capacity, lengths, lambda *_, count=count: count) for count in fixed}
    best = max(speeds, key=lambda count: speeds[count])
    adaptive = Adaptive()
    return speeds[best], best, tokens_per_s(capacity, lengths, adaptive), adaptive


def main() -> int:
    missed = 0
    print(f"{'KV tokens':>10} {'answers':<15} {'best fixed':>10} {'tokens/s':>9} {'adapted':>9} {'part':>6}  limits")
    for capacity in (10_000, 40_000, 160_000):
        for name, lengths in LENGTHS.items():
            speed, best, adapted, adaptive = measure(capacity, lengths)
            missed += adapted < REQUIRED * speed
            shown = ", ".join(str(adaptive.history[at]) for at in (5, 15, 30, 60, 120))
            print(
                f"{capacity:>10} {name:<15} {best:>10} {speed:>9.0f} {adapted:>9.0f} {adapted / speed:>6.2f}  {shown}"
            )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
