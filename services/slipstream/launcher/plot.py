"""`slipstream plot [RUN] [--metric NAME]... [--follow]`: a run's figures in the terminal, while it goes on or after it.

Reads `metrics.jsonl` alone, so it works on any machine that has the file. In a pipe there are no colours; series are
told apart by their marks in any case.
"""

from __future__ import annotations

import difflib
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from slipstream.common.config import ConfigError
from slipstream.launcher.metrics_records import Record, read_metrics
from slipstream.launcher.rundir import RunDir, find_services_run

USAGE = "usage: slipstream plot [RUN] [--metric NAME]... [--follow]"
LIST = "list"
"""In place of a metric's name: says which there are."""
MARKS = "•x+o*#@%"
COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red", "white", "bright_black")
ROWS = 9
WIDTH = 80
LABEL_WIDTH = 9
FOLLOW_S = 2.0

Points = list[tuple[float, float]]


@dataclass
class Chart:
    """Lines over the steps of a run that share an axis."""

    title: str
    series: dict[str, Points] = field(default_factory=lambda: defaultdict(list))


OVERVIEW: dict[str, tuple[str, ...]] = {
    "reward": ("reward_by_environment",),
    "roles": ("reward_by_role",),
    "accuracy": ("accuracy",),
    "curriculum": ("success_rate_by_part",),
    "teacher": ("teacher_kl",),
    "lag": ("lag_mean", "lag_max"),
    "tokens_per_s": ("tokens_per_s",),
    "mismatch": ("mismatch_kl", "mismatch_policy_lag", "mismatch_stale_kv", "mismatch_numeric"),
    "phases": ("wait_s", "fetch_s", "train_s", "publish_s"),
}
"""Charts shown unless told, and what is on each."""

TITLES = {
    "reward": "reward by environment: mean over all rollouts that ended since the step before",
    "roles": "reward by role: mean over all rollouts that ended since the step before",
    "accuracy": "accuracy on held-out problems",
    "curriculum": "success rates that choose tasks",
    "teacher": "KL to the teacher, nats a token",
    "lag": "lag of trained groups, versions",
    "tokens_per_s": "tokens sampled a second",
    "mismatch": "mismatch of trainer and engine, nats",
    "phases": "a step's phases, seconds",
}


def plot(arguments: Sequence[str]) -> int:
    """Run the command. Raises `ConfigError` or `RunDirError` for what it cannot make sense of."""
    reference, names, follow = parse(arguments)
    run, console = find_services_run(reference), Console(highlight=False, soft_wrap=True)
    if LIST in names:
        console.print("\n".join(known_metrics(collect(read_metrics(run.path / "metrics.jsonl")))))
        return 0
    if not follow:
        console.print(page(run, names))
        return 0
    shown_bytes = -1
    while True:
        size_bytes = _size_bytes(run.path / "metrics.jsonl")
        if size_bytes != shown_bytes:
            shown_bytes = size_bytes
            text = page(run, names)
            if console.is_terminal:
                console.clear()
            console.print(text)
        if _ended(read_metrics(run.path / "metrics.jsonl")):
            return 0
        time.sleep(FOLLOW_S)


def parse(arguments: Sequence[str]) -> tuple[str | None, list[str], bool]:
    """The run, the metrics and whether to follow."""
    names: list[str] = []
    runs: list[str] = []
    follow = False
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "--follow":
            follow = True
        elif word == "--metric" and rest:
            names.append(rest.pop(0))
        elif word.startswith("--metric="):
            names.append(word.partition("=")[2])
        elif word.startswith("-") or runs:
            raise ConfigError(f"{word!r} is not understood; {USAGE}")
        else:
            runs.append(word)
    return runs[0] if runs else None, names, follow


def page(run: RunDir, names: Sequence[str]) -> Text:
    """All charts of a run, below each other."""
    records = read_metrics(run.path / "metrics.jsonl")
    steps = [record for record in records if record.get("kind") == "step"]
    title = f"{run.name}: {steps[-1]['step'] if steps else 0} steps"
    charts = [draw(chart) for chart in choose(records, names)]
    if not charts and _ended(records):
        return Text(f"{title}, nothing to draw: the run recorded no {' and no '.join(names) or 'figures'}")
    if not charts:
        return Text(f"{title}, nothing to draw yet")
    return Text("\n\n").join([Text(title, style="bold"), *charts])


def choose(records: Sequence[Record], names: Sequence[str]) -> list[Chart]:
    """The charts that were asked for, or those of the overview that have something to show."""
    metrics = collect(records)
    if not names:
        charts = [_chart(name, metrics) for name in OVERVIEW]
        return [chart for chart in charts if chart.series]
    known = known_metrics(metrics)
    for name in names:
        if name not in known and records:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
            raise ConfigError(f"no metric called {name!r}{meant}")
    return [chart for chart in (_chart(name, metrics) for name in names) if chart.series]


def known_metrics(metrics: Iterable[str]) -> list[str]:
    """What can be drawn: charts of the overview, and every figure."""
    return sorted({*OVERVIEW, *metrics})


def collect(records: Iterable[Record]) -> dict[str, dict[str, Points]]:
    """Every figure over the steps: metric to series to points. A step that was trained again counts once."""
    found: dict[str, dict[str, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        step = record.get("step")
        if not isinstance(step, int):
            continue
        if record.get("kind") == "evaluation":
            name = str(record.get("environment", ""))
            found["accuracy"][name][step] = float(record["accuracy"])
            for k, value in record.get("pass_at_k", {}).items():
                found["pass_at_k"][f"{name} @{k}"][step] = float(value)
        elif record.get("kind") == "step":
            for name, value in record.items():
                if name in ("kind", "step", "time_s"):
                    continue
                for series, number in value.items() if isinstance(value, dict) else ((name, value),):
                    if isinstance(number, int | float) and math.isfinite(number):
                        found[name][series][step] = float(number)
    return {name: {s: sorted(points.items()) for s, points in series.items()} for name, series in found.items()}


def _chart(name: str, metrics: dict[str, dict[str, Points]]) -> Chart:
    chart = Chart(TITLES.get(name, name))
    for metric in OVERVIEW.get(name, (name,)):
        chart.series.update(metrics.get(metric, {}))
    return chart


def draw(chart: Chart, axis: str = "step") -> Text:
    """Title with legend, the lines, and an axis; `WIDTH` columns at most."""
    values = [value for points in chart.series.values() for _, value in points]
    steps = [step for points in chart.series.values() for step, _ in points]
    low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    first, last = min(steps), max(steps)
    columns = WIDTH - LABEL_WIDTH - 2
    cells: list[list[int]] = [[-1] * columns for _ in range(ROWS)]
    for index, points in enumerate(chart.series.values()):
        for column, value in _by_column(points, first, last, columns).items():
            cells[round((high - value) / (high - low) * (ROWS - 1))][column] = index
    lines = [_legend(chart)]
    for row, line in enumerate(cells):
        label = {0: high, ROWS // 2: (low + high) / 2, ROWS - 1: low}.get(row)
        text = Text(f"{'' if label is None else _number(label):>{LABEL_WIDTH}} │")
        for index in line:
            text.append(" " if index < 0 else MARKS[index % len(MARKS)], style=_colour(index) if index >= 0 else "")
        text.rstrip()
        lines.append(text)
    ends = f"{first:g}", f"{axis} {last:g}"
    lines.append(Text(" " * LABEL_WIDTH + " └" + "─" * columns))
    lines.append(Text(" " * (LABEL_WIDTH + 2) + ends[0] + ends[1].rjust(columns - len(ends[0]))))
    return Text("\n").join(lines)


def _by_column(points: Points, first: float, last: float, columns: int) -> dict[int, float]:
    """The mean of what falls into each column."""
    sums: dict[int, list[float]] = defaultdict(list)
    for step, value in points:
        sums[round((step - first) / max(last - first, 1) * (columns - 1))].append(value)
    return {column: sum(found) / len(found) for column, found in sums.items()}


def _legend(chart: Chart) -> Text:
    text = Text(chart.title, style="bold")
    width = len(chart.title)
    for index, (name, points) in enumerate(chart.series.items()):
        entry = f"  {MARKS[index % len(MARKS)]} {name} {_number(points[-1][1])}"
        if width + len(entry) > WIDTH:
            text.append("\n")
            width = 0
        text.append(entry, style=f"not bold {_colour(index)}")
        width += len(entry)
    return text


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _size_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _ended(records: Iterable[Record]) -> bool:
    """Whether the run is over, by its own records."""
    kinds = {record.get("state") for record in records if record.get("kind") == "run"}
    return bool(kinds & {"finished", "failed", "stopped"})
