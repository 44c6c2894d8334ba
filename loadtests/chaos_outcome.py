"""What a run that was killed came to, beside one that was not, and how it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from statistics import mean, median

REQUIRED_RATIO = 0.8
KILL_PERIOD_S = 60.0


@dataclass
class Kill:
    """One service, killed at a moment of the run."""

    replica: str
    ended_positions: int
    time_s: float
    """Unix."""
    kv_hit_tokens: int = 0
    """Found in tiers of KV until then."""


@dataclass
class Outcome:
    """What a run came to."""

    wall_s: float
    """From its first position to its end."""
    trained: dict[int, int]
    """Step by position."""
    figures: dict[str, object]
    """What `journal_check` counted."""
    kills: list[Kill] = field(default_factory=list[Kill])
    kv_hit_tokens: dict[str, int] = field(default_factory=dict[str, int])
    """Prompt tokens whose KV was found in host memory or on disk, by the worker that found them."""
    prefill_tokens: int = 0
    """Of prompts whose KV a prefill worker made, or found, for a decode worker."""
    step_times_s: Sequence[float] = ()
    """When steps were trained, not those that were taken again; Unix."""
    pure_tokens: int = 0
    """That the engine sampled, on whole contexts of the weights that were trained on them."""
    pure_max_abs_diff: float = 0.0
    """Of their log-probabilities, between engine and trainer."""
    load: float = 0.0
    """Of the machine while it ran, on average."""

    @property
    def step_s(self) -> float:
        """Between two steps, once it was under way: its first ones wait for processes that are still starting."""
        later_s = self.step_times_s[len(self.step_times_s) // 2 :]
        return (later_s[-1] - later_s[0]) / (len(later_s) - 1)

    @property
    def ratio_within(self) -> float:
        """Steps between the first kill and the last, over those that the pace before each kill would have brought.

        That pace is of the second half since the kill before. It asks nothing of another run, to which others may have
        left more of the machine, or less. 0 where nothing is known.
        """
        times_s = [kill.time_s for kill in self.kills]
        brought = sum(times_s[0] < time_s <= times_s[-1] for time_s in self.step_times_s) if times_s else 0
        halves = [((before + after) / 2, after) for before, after in pairwise(times_s)]
        expected = 2 * sum(begun < time_s <= after for begun, after in halves for time_s in self.step_times_s)
        return brought / expected if expected else 0.0

    def standstill_s(self, kill: Kill) -> float:
        """From a kill to the next step that was trained; 0 where none came after it."""
        return min((time_s for time_s in self.step_times_s if time_s > kill.time_s), default=kill.time_s) - kill.time_s


def tell(calm: Outcome, killed: Outcome, every_s: float) -> float:
    """Print what the run came to; the effective training time ratio.

    It is the time that the positions take without kills by the time with them. Where kills come by progress, closer
    together than one a minute, it is worked out: a kill costs c = (with - without) / kills seconds on average, so
    that of each minute with one kill 60 - c seconds get on, and the ratio is 1 - c / 60.
    """
    print("\n".join(kill_table(killed)))
    print("journal: " + ", ".join(f"{name} {value}" for name, value in killed.figures.items()))
    if killed.kv_hit_tokens:
        print(f"KV: {kv_sentence(killed)}")
    print(
        f"engine and trainer: {killed.pure_tokens} tokens sampled by the weights that were trained on them differ by "
        f"{killed.pure_max_abs_diff:.1g} at most ({calm.pure_max_abs_diff:.1g} without kills)"
    )
    cost_s = max(0.0, killed.wall_s - calm.wall_s) / max(1, len(killed.kills))
    ratio = calm.wall_s / killed.wall_s if every_s else 1 - cost_s / KILL_PERIOD_S
    how = "measured" if every_s else "worked out"
    if every_s:
        print(
            f"within the run, by its pace in the second half of the time between two kills: {killed.ratio_within:.3f}"
        )
    print(
        f"chaos: {len(killed.kills)} kills, {len(killed.trained)} positions trained once each, as without kills; "
        f"{calm.wall_s:.1f} s without (load {calm.load:.1f}), {killed.wall_s:.1f} s with them (load {killed.load:.1f}),"
        f" {cost_s:.1f} s a kill; effective training time "
        f"ratio {ratio:.3f}, {how}, at a kill every {every_s or KILL_PERIOD_S:g} s (at least {REQUIRED_RATIO} required)"
    )
    return ratio


def kill_table(killed: Outcome) -> list[str]:
    """Its lines: how often each process was killed, and how long it was until the next step had been trained."""
    lines = [f"{'killed':<14}{'times':>6}   until the next step: median, longest (s)"]
    by_replica = sorted(killed.kills, key=lambda kill: kill.replica)
    for replica, kills in groupby(by_replica, key=lambda kill: kill.replica):
        lines.append(_row(replica, [killed.standstill_s(kill) for kill in kills]))
    return [*lines, _row("all", [killed.standstill_s(kill) for kill in by_replica])]


def _row(name: str, standstills_s: Sequence[float]) -> str:
    if not standstills_s:
        return f"{name:<14}{0:>6}"
    return f"{name:<14}{len(standstills_s):>6}   {median(standstills_s):6.1f} {max(standstills_s):6.1f}"


def kv_sentence(killed: Outcome) -> str:
    """Where prompts were found, and how many of them after the weights had gone back."""
    total = sum(killed.kv_hit_tokens.values())
    restored = [kill for kill in killed.kills if kill.replica.startswith("trainer")]
    after = total - restored[0].kv_hit_tokens if restored else 0
    by_worker = ", ".join(f"{count} by {name}" for name, count in sorted(killed.kv_hit_tokens.items()))
    return (
        f"{total} prompt tokens found in host memory or on disk ({by_worker}), {after} of them after a trainer was "
        f"restored, none of older weights than their group was dispatched at; the prefill worker was asked for "
        f"{killed.prefill_tokens} prompt tokens"
    )


def average(values: Sequence[float]) -> float:
    """0 of none."""
    return mean(values) if values else 0.0
