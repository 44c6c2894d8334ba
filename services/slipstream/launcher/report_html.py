"""The report as one HTML file: figures, charts as inline SVG, samples. Opens anywhere, loads nothing."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from html import escape
from typing import Any

from slipstream.launcher import charts, report
from slipstream.launcher.charts import BLUE, GREY, ORANGE, PALETTE, PURPLE, RED, TEAL, Series, Track
from slipstream.launcher.intervals import Interval, clip, total_s, union
from slipstream.launcher.records import Record, RunRecords, curve
from slipstream.launcher.report_replay import replay_tables
from slipstream.launcher.report_rollouts import Extremes, extreme_tables
from slipstream.launcher.report_samples import sample_tables
from slipstream.launcher.report_step import STRETCHES, picture_of_a_step
from slipstream.launcher.report_trainer import expert_cards, trainer_cards
from slipstream.launcher.style import STYLE

KIND_COLORS = {"sft": PURPLE, "train_step": BLUE, "prefill": TEAL, "decode": ORANGE, "update": RED}
KIND_NAMES = {"sft": "warm-up", "train_step": "training step", "update": "weight update"}
DETAIL_S = 12.0
ENDS = 2
"""Evaluations of a run that is only asked before and after; a line between them would be invented."""
MISMATCH_FLOOR = 1e-12
"""What rounding leaves of equal float32 log-probabilities, squared, is below this: smaller figures mean nothing."""
FEW_POINTS = 15
"""So few get a dot each: with lag, hardly any token has a pure context."""


def render_html(records: RunRecords, figures: dict[str, Any], extremes: Extremes) -> str:
    """The whole page."""
    tables = extreme_tables(extremes)
    sections = [
        _header(records, figures),
        _tiles(figures),
        _section("Learning", _learning(records, figures)),
        _section("Trainer and workers at the same time", _overlap(records, figures)),
        _section("Staleness", _staleness(records, figures)),
        _section("Trainer against engine", _mismatch(records, figures)),
        _section("Throughput", _throughput(records)),
        _section("Samples before and after", _samples(records)),
        *([_section("Rollouts at the ends", [_card(*table, wide=True) for table in tables])] if tables else []),
    ]
    title = escape(f"{records.name} · slipstream")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def _header(records: RunRecords, figures: dict[str, Any]) -> str:
    begin_s = records.begun_s or min((r["time_s"] for r in records.metrics), default=None)
    when = time.strftime("started %d %B %Y, %H:%M UTC", time.gmtime(begin_s)) if begin_s else "not started"
    facts = [when, f"seed {figures['seed']}", f"{figures['steps']} steps", f"{duration(figures['wall_s'])} in all"]
    state = escape(str(figures["state"]))
    why = f"<p>{escape(figures['reason'])}</p>" if figures["reason"] else ""
    return (
        f'<header><h1>{escape(records.name)}<span class="state {state}">{state}</span></h1>'
        f"<p>{escape(' · '.join(facts))}</p>{why}</header>"
    )


def _tiles(figures: dict[str, Any]) -> str:
    tiles = []
    for name, accuracy in figures["accuracy_by_environment"].items():
        change = f"{percent(accuracy.get('before'))} → {percent(accuracy.get('after'))}"
        tiles.append((change, f"accuracy, {name}", f"{accuracy.get('count', 0)} held-out problems"))
    tiles += [
        (percent(figures["overlap_fraction"]), "overlap", "of training time with a decode running"),
        (f"{figures['lag_max']} of {figures['lag_bound']}", "largest lag", "versions, and its bound"),
        (figure(figures["mismatch_kl"]), "mismatch KL", "mean k3 per trained token"),
        (figure(figures["trained_tokens_per_s"]), "trained tokens/s", "with a gradient, over the training time"),
        (percent(figures["cached_token_fraction"]), "prefix cache", "of prompt tokens found in it"),
        (figure(figures["sandbox_executions"]), "sandbox runs", "executions of code that environments asked for"),
    ]
    cells = [
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span><small>{escape(note)}</small></div>'
        for value, name, note in tiles
    ]
    return f'<div class="tiles">{"".join(cells)}</div>'


def _section(title: str, cards: Sequence[str]) -> str:
    return f'<section><h2>{escape(title)}</h2><div class="cards">{"".join(cards)}</div></section>'


def _card(title: str, body: str, note: str = "", *, wide: bool = False) -> str:
    small = f'<p class="note">{escape(note)}</p>' if note else ""
    return (
        f'<figure class="card{" wide" if wide else ""}"><figcaption>{escape(title)}</figcaption>{body}{small}</figure>'
    )


def _learning(records: RunRecords, figures: dict[str, Any]) -> list[str]:
    steps = records.steps
    window = max(len(steps) // 12, 1)
    names = _environments(records)
    rewards: list[Series] = []
    for name, color in zip(names, PALETTE, strict=False):
        points = [(float(s["step"]), float(s["reward_by_environment"][name])) for s in steps
                  if name in s.get("reward_by_environment", {})]  # fmt: skip
        rewards += [Series(name, points, color, faint=True), Series(name, charts.smooth(points, window), color)]
    reward_chart = charts.line_chart(rewards, x_label="step", y_label="mean reward", y_range=(0, 1))
    dots = _evaluated(records, dict(zip(names, PALETTE, strict=False)))
    accuracy_chart = charts.line_chart(
        dots, x_label="step", y_label="held-out accuracy", y_range=(0, 1), y_format=lambda y: f"{100 * y:.0f} %"
    )
    samples = max((int(each.get("samples", 1)) for each in records.of_kind("evaluation")), default=1)
    asked = f"{_sampled(records, samples)}, through the workers."
    if samples > 1:
        asked += " pass@k: one of k answers is right."
    if all(not one.joined for one in dots):
        asked += " Asked before and after training only: what lies between was not measured, and no line is drawn."
    return [
        _card(
            "Reward of what was sampled",
            reward_chart,
            "Mean over all rollouts that ended since the step before, "
            "those of filtered groups, too. Faint: each step. Strong: running mean.",
        ),
        _card("Accuracy on held-out problems", accuracy_chart, asked),
        *_roles(steps),
        *_curriculum(steps),
        *_optimisation(steps, window),
    ]


def _roles(steps: list[Record]) -> list[str]:
    """Rewards of environments with several roles, by role."""
    points: dict[str, list[charts.Point]] = {}
    for step in steps:
        for name, reward in step.get("reward_by_role", {}).items():
            points.setdefault(name, []).append((float(step["step"]), float(reward)))
    if not points:
        return []
    lines = [Series(name, each, color) for (name, each), color in zip(sorted(points.items()), itertools.cycle(PALETTE))]
    chart = charts.line_chart(lines, x_label="step", y_label="mean reward")
    return [_card("Reward by role", chart, "Each role is compared with itself alone, over the rollouts of a group.")]


def _curriculum(steps: list[Record]) -> list[str]:
    """Success rates that choose tasks: of the parts of an environment's tasks, else its mean over all of them."""
    points: dict[str, list[charts.Point]] = {}
    for step in steps:
        rates = step.get("success_rate_by_part") or step.get("success_rate_by_environment") or {}
        for name, rate in rates.items():
            points.setdefault(name, []).append((float(step["step"]), float(rate)))
    if not points:
        return []
    colors = itertools.cycle(PALETTE)
    lines = [Series(name, each, color) for (name, each), color in zip(sorted(points.items()), colors, strict=False)]
    chart = charts.line_chart(lines, x_label="step", y_label="right of late", y_range=(0, 1))
    return [_card("Success rates that choose tasks", chart, "Tasks near one half are drawn most.")]


def _sampled(records: RunRecords, samples: int) -> str:
    """How held-out problems were asked: what is asked otherwise, as `slipstream eval` may, is no match for it."""
    temperature = records.config.get("evaluation", {}).get("temperature")
    if (temperature is None and samples == 1) or temperature == 0:
        how = "Greedy"
    else:
        how = "At each environment's own temperature" if temperature is None else f"At temperature {temperature:g}"
    return f"{how}, {'one answer' if samples == 1 else f'{samples} answers'} a problem"


def _evaluated(records: RunRecords, colors: dict[str, str]) -> list[Series]:
    """Accuracy of each environment, and pass@k of the largest k where problems were asked more than once."""
    accuracies: dict[str, list[charts.Point]] = {}
    passes: dict[str, list[charts.Point]] = {}
    for evaluation in records.of_kind("evaluation"):
        name, step = str(evaluation["environment"]), float(evaluation["step"])
        accuracies.setdefault(name, []).append((step, float(evaluation["accuracy"])))
        largest = max(map(int, evaluation.get("pass_at_k", {})), default=1)
        if largest > 1:
            found = float(evaluation["pass_at_k"][str(largest)])
            passes.setdefault(f"{name}, pass@{largest}", []).append((step, found))
    spare = [color for color in PALETTE if color not in colors.values()] or [GREY]
    colors = colors | {name: spare[index % len(spare)] for index, name in enumerate(passes)}
    return [
        Series(name, sorted(points), colors.get(name, GREY), marked=True, joined=len(points) > ENDS)
        for name, points in (accuracies | passes).items()
    ]


def _environments(records: RunRecords) -> list[str]:
    """Environments in the order of the configuration, then what else was seen."""
    configured = [str(environment.get("name")) for environment in records.config.get("environments", [])]
    seen = {name for step in records.steps for name in step.get("reward_by_environment", {})}
    seen |= {str(evaluation["environment"]) for evaluation in records.of_kind("evaluation")}
    return configured + sorted(seen - set(configured))


def _optimisation(steps: list[Record], window: int) -> list[str]:
    entropy = curve(steps, "entropy")
    norm = curve(steps, "grad_norm")
    teacher = curve(steps, "teacher_kl")
    cards = []
    if teacher:
        lines = [Series("KL", teacher, BLUE, faint=True), Series("KL", charts.smooth(teacher, window), BLUE)]
        cards.append(_card("KL to the teacher", charts.line_chart(lines, x_label="step", y_label="nats a token")))
    if entropy:
        lines = [Series("entropy", entropy, TEAL, faint=True), Series("entropy", charts.smooth(entropy, window), TEAL)]
        cards.append(_card("Entropy of the policy", charts.line_chart(lines, x_label="step", y_label="nats a token")))
    if norm:
        lines = [Series("norm", norm, PURPLE, faint=True), Series("norm", charts.smooth(norm, window), PURPLE)]
        cards.append(_card("Gradient norm", charts.line_chart(lines, x_label="step", y_label="before clipping")))
    return cards


def _overlap(records: RunRecords, figures: dict[str, Any]) -> list[str]:
    kinds = tuple(KIND_COLORS)
    busy = records.intervals(*kinds)
    if not busy:
        return [_card("Busy times", charts.empty_chart(), wide=True)]
    order = {"trainer": 0, "prefill": 1, "decode": 2}
    replicas = sorted(records.timeline, key=lambda name: (order.get(name.split("-")[0], 3), name))
    begin_s = records.begun_s or min(start for start, _ in busy)
    end_s = max(end for _, end in busy)
    training = records.intervals("train_step")
    middle_s = (min(a for a, _ in training) + max(b for _, b in training)) / 2 if training else (begin_s + end_s) / 2
    keys = charts.legend([(KIND_NAMES.get(kind, kind), color) for kind, color in KIND_COLORS.items()])
    whole = charts.timeline(_tracks(records, replicas, begin_s, end_s), begin_s, end_s)
    first_s, last_s = max(middle_s - DETAIL_S / 2, begin_s), min(middle_s + DETAIL_S / 2, end_s)
    detail = charts.timeline(_tracks(records, replicas, first_s, last_s), first_s, last_s)
    share = percent(figures["overlap_fraction"])
    step = picture_of_a_step(records)
    around = (
        []
        if step is None
        else [
            _card(
                f"Step {step.number} and what was sampled meanwhile",
                charts.timeline(
                    [*step.tracks, *_tracks(records, replicas, step.begin_s, step.end_s)], step.begin_s, step.end_s
                )
                + (charts.legend(STRETCHES) if step.tracks else ""),
                step.sentence,
                wide=True,
            )
        ]
    )
    return [
        _card("The whole run", whole + keys, f"A decode ran during {share} of the time in training steps.", wide=True),
        _card(f"{last_s - first_s:.0f} seconds in the middle of training", detail, wide=True),
        *around,
    ]


def _tracks(records: RunRecords, replicas: Sequence[str], begin_s: float, end_s: float) -> list[Track]:
    """Rows of the timeline; gaps too narrow to see are closed, which keeps the file small."""
    gap_s = (end_s - begin_s) / 2000
    tracks = []
    for replica in replicas:
        shapes: list[tuple[Interval, str]] = []
        for kind, color in KIND_COLORS.items():
            near = clip(records.intervals(kind, replica=replica), begin_s, end_s)
            shapes += [(interval, color) for interval in union(near, gap_s)]
        if shapes:
            tracks.append(Track(replica, shapes))
    return tracks


def _staleness(records: RunRecords, figures: dict[str, Any]) -> list[str]:
    lags = [(str(lag), float(count)) for lag, count in report.lag_histogram(records).items()]
    cancelled = figures["groups_cancelled_by_reason"]
    by_environment = figures["groups_trained_by_environment"]
    trained = [(f"trained: {name}", float(count), BLUE) for name, count in by_environment.items()]
    if len(trained) < 2:
        trained = [("trained", float(figures["groups_trained"]), BLUE)]
    ends = [
        *trained,
        ("filtered", float(figures["groups_filtered"]), GREY),
        *((f"cancelled: {name.lower().replace('_', ' ')}", float(n), ORANGE) for name, n in cancelled.items()),
        *((f"failed: {name}", float(n), RED) for name, n in figures["groups_failed_by_environment"].items()),
    ]
    return [
        _card("Lag of trained groups", charts.bar_chart(lags, x_label="versions behind", y_label="groups"),
              f"Bound: {figures['lag_bound']}."),
        _card("How groups ended", charts.level_chart(ends),
              f"In groups; {figures['rollouts_cancelled']} rollouts were cancelled. Aged out may have started again. "
              "Filtered: all rollouts of the group earned the same, so there is nothing to learn from them. Failed: "
              "the environment raised; the runner's log has the traceback."),
    ]  # fmt: skip


def _mismatch(records: RunRecords, figures: dict[str, Any]) -> list[str]:
    parts = [("mismatch_kl", "all tokens", GREY), ("mismatch_numeric", "numeric (pure context)", BLUE),
             ("mismatch_policy_lag", "policy lag", ORANGE), ("mismatch_stale_kv", "stale KV", PURPLE)]  # fmt: skip
    curves = [
        (name, [(x, max(y, MISMATCH_FLOOR)) for x, y in curve(records.steps, key)], color) for key, name, color in parts
    ]
    lines = [Series(name, points, color, marked=len(points) < FEW_POINTS) for name, points, color in curves]
    ratio = curve(records.steps, "ratio_p999")
    ratios = [Series("p99.9", ratio, RED)] if ratio else []
    return [
        _card("Mismatch KL in its parts", charts.line_chart(lines, x_label="step", y_label="mean k3", log=True),
              "Trainer and engine on the same tokens. Numeric should stay at rounding: the floor, 1e-12."),
        _card("Probability ratio, 99.9th percentile",
              charts.line_chart(ratios, x_label="step", y_label="trainer / engine")),
        *(_card(*each) for each in replay_tables(figures)),
        *(_card(*each) for each in expert_cards(records.steps)),
    ]  # fmt: skip


def _throughput(records: RunRecords) -> list[str]:
    steps = records.steps
    window = max(len(steps) // 12, 1)
    tokens = curve(steps, "tokens_per_s")
    lines = [Series("tokens", tokens, BLUE, faint=True), Series("tokens", charts.smooth(tokens, window), BLUE)]
    times = [
        Series("training step", charts.smooth(capped(curve(steps, "step_s")), window), BLUE),
        Series("waiting for a batch", charts.smooth(capped(curve(steps, "wait_s")), window), ORANGE),
    ]
    busy = [(f"{name}, {KIND_NAMES.get(kind, kind)}", total_s(union(found)), color)
            for name in records.timeline for kind, color in KIND_COLORS.items()
            if (found := records.intervals(kind, replica=name))]  # fmt: skip
    updates = records.of_kind("update")
    pauses = [float(update["pause_s"]) * 1000 for update in updates if update.get("pause_s") is not None]
    flights = report.mean(update.get("in_flight_samples") for update in updates)
    in_flight = f" On average {flights:.1f} samples were in flight and went on." if flights is not None else ""
    return [
        _card(
            "Tokens sampled per second",
            charts.line_chart(lines, x_label="step", y_label="sampled tokens/s"),
            "All that the decode workers drew, trained or not; the figure at the top counts trained tokens only.",
        ),
        _card("Where a step's time goes", charts.line_chart(times, x_label="step", y_label="seconds")),
        *(_card(*each) for each in trainer_cards(steps, window)),
        _card("Busy seconds", charts.level_chart(sorted(busy, key=lambda bar: bar[0]))),
        _card(
            "Pause of a worker for new weights",
            charts.bar_chart(_histogram(pauses), x_label="ms", y_label="updates", color=RED),
            f"{len(updates)} updates, between two decode steps.{in_flight}",
        ),
    ]


def _samples(records: RunRecords) -> list[str]:
    cards = [_card(*table) for table in sample_tables(records, _environments(records))]
    return cards or [_card("Samples", charts.empty_chart())]


def _histogram(values: Sequence[float], bins: int = 10) -> list[tuple[str, float]]:
    if not values:
        return []
    ticks = charts.nice_ticks(0, sorted(values)[int(len(values) * 0.98)], bins)
    counts = [0] * (len(ticks) - 1)
    for value in values:
        counts[min(int(value / ticks[1]), len(counts) - 1)] += 1
    return [(charts.number(low), float(count)) for low, count in zip(ticks, counts, strict=False)]


def capped(points: list[charts.Point]) -> list[charts.Point]:
    """Values far above the rest, such as the first step's wait for the first batch, would flatten a curve."""
    ordered = sorted(y for _, y in points)
    limit = 3 * ordered[int(len(ordered) * 0.9)] if ordered else 0.0
    return [(x, min(y, limit)) for x, y in points]


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def figure(value: float | None) -> str:
    return "–" if value is None else charts.number(value)


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
