"""`slipstream plot [RUN]...`: figures of a run, or of several beside each other, while they go on or after it.

Reads `metrics.jsonl` alone, so it works on any machine that has the file; with `--evaluations` each `evaluation.json`.
In a pipe there are no colours; series are told apart by their marks in any case.
"""

from __future__ import annotations

import difflib
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from slipstream.common.config import ConfigError
from slipstream.launcher.metrics_records import Record, read_metrics
from slipstream.launcher.options import take
from slipstream.launcher.rollout_view import printable
from slipstream.launcher.rundir import RunDir, find_services_run, shown

USAGE = """\
usage: slipstream plot [RUN]... [OPTION]...

Draw rewards, lag, speed, mismatch and phases of a run in the terminal, while it goes on or after it.
RUN is a name in runs/ or a path; without it, the newest run is meant. Of several runs each figure has a chart, with a
line for each run.

  --metric NAME          this chart, such as curriculum, or any figure of a step in metrics.jsonl; may be repeated
  --metric list          name them
  --follow               draw again as the runs go on, until they have ended
  --evaluations          what slipstream eval found instead: the figures of all evaluations of the runs, and pass@k.
                         RUN may also be one evaluation, such as runs/demo/evaluations/2
"""
PROGRAM = "slipstream plot"
LIST = "list"
"""In place of a metric's name: says which there are."""
MARKS = "•x+o*#@%"
COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red", "white", "bright_black")
ROWS = 9
WIDTH = 80
LABEL_WIDTH = 9
FOLLOW_S = 2.0
MOST_RUNS = len(MARKS)
"""In one chart: each has a mark of its own."""

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

COMPARED = ("reward", "roles", "accuracy", "teacher", "tokens_per_s")
"""Those that are shown of several runs unless told."""

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


@dataclass
class Options:
    """The command line."""

    runs: list[str] = field(default_factory=list[str])
    names: list[str] = field(default_factory=list[str])
    follow: bool = False
    evaluations: bool = False


def plot(arguments: Sequence[str]) -> int:
    """Run the command. Raises `ConfigError` or `RunDirError` for what it cannot make sense of."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE, end="")
        return 0
    options = parse(arguments)
    if options.evaluations:
        from slipstream.launcher.evaluate_compare import compare

        return compare(options.runs)
    console = Console(highlight=False, soft_wrap=True)
    runs = labelled([find_services_run(reference) for reference in options.runs or [None]])
    if LIST in options.names:
        found = (name for run in runs.values() for name in collect(read_metrics(run.path / "metrics.jsonl")))
        console.print("\n".join(map(printable, known_metrics(found))), markup=False)
        return 0
    if not options.follow:
        console.print(page(runs, options.names))
        return 0
    shown_bytes: list[int] = []
    while True:
        sizes_bytes = [_size_bytes(run.path / "metrics.jsonl") for run in runs.values()]
        if sizes_bytes != shown_bytes:
            shown_bytes = sizes_bytes
            text = page(runs, options.names)
            if console.is_terminal:
                console.clear()
            console.print(text)
        if all(_ended(read_metrics(run.path / "metrics.jsonl")) for run in runs.values()):
            return 0
        time.sleep(FOLLOW_S)


def parse(arguments: Sequence[str]) -> Options:
    """Take the command line apart. Raises `ConfigError`."""
    options = Options()

    def follow() -> None:
        options.follow = True

    def evaluations() -> None:
        options.evaluations = True

    def name_run(word: str) -> bool:
        options.runs.append(word)
        return True

    flags = {"--follow": follow, "--evaluations": evaluations}
    take(arguments, PROGRAM, {"--metric": options.names.append}, flags, name_run)
    if options.evaluations and (options.names or options.follow):
        raise ConfigError(f"--evaluations takes no --metric and no --follow; see {PROGRAM} --help")
    if len(options.runs) > MOST_RUNS:
        raise ConfigError(f"{len(options.runs)} runs: one chart takes {MOST_RUNS} at most")
    return options


def labelled(runs: Sequence[RunDir]) -> dict[str, RunDir]:
    """Runs by name, or by path where two have the same."""
    names = Counter(run.name for run in runs)
    return {run.name if names[run.name] == 1 else shown(run.path): run for run in runs}


def page(runs: Mapping[str, RunDir], names: Sequence[str]) -> Text:
    """All charts of a run, or of several, below each other."""
    records = {label: read_metrics(run.path / "metrics.jsonl") for label, run in runs.items()}
    title = "\n".join(f"{label}: {_steps(each)} steps" for label, each in records.items())
    charts = [draw(chart) for chart in choose(records, names)]
    if not charts and all(_ended(each) for each in records.values()):
        recorded = "the run" if len(runs) == 1 else "the runs"
        return Text(f"{title}, nothing to draw: {recorded} recorded no {' and no '.join(names) or 'figures'}")
    if not charts:
        return Text(f"{title}, nothing to draw yet")
    return Text("\n\n").join([Text(title, style="bold"), *charts])


def _steps(records: Sequence[Record]) -> int:
    steps = [record for record in records if record.get("kind") == "step"]
    return int(steps[-1]["step"]) if steps else 0


def choose(records: Mapping[str, Sequence[Record]], names: Sequence[str]) -> list[Chart]:
    """The charts that were asked for, or those of the overview, that have something to show. `records` are by run."""
    metrics = {label: collect(each) for label, each in records.items()}
    known = known_metrics(name for each in metrics.values() for name in each)
    for name in names:
        if name not in known and any(records.values()):
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
            raise ConfigError(f"no metric called {name!r}{meant}")
    if len(metrics) > 1:
        charts = [chart for name in names or COMPARED for chart in _charts_of_several(name, metrics)]
    else:
        charts = [_chart(name, each) for name in names or OVERVIEW for each in metrics.values()]
    return [chart for chart in charts if chart.series]


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


def _charts_of_several(name: str, metrics: Mapping[str, dict[str, dict[str, Points]]]) -> list[Chart]:
    """A chart for each line that the runs would have, on which each run has one."""
    charts: dict[str, Chart] = {}
    title, _, _ = TITLES.get(name, name).partition(":")  # what explains it has no room beside a line's name
    on_it = OVERVIEW.get(name, (name,))
    for label, found in metrics.items():
        for metric in on_it:
            for series, points in found.get(metric, {}).items():
                alone = on_it == (series,)
                charts.setdefault(series, Chart(title if alone else f"{series}: {title}")).series[label] = points
    return list(charts.values())


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
    title = printable(chart.title)
    text = Text(title, style="bold")
    width = len(title)
    for index, (name, points) in enumerate(chart.series.items()):
        entry = f"  {MARKS[index % len(MARKS)]} {printable(name)} {_number(points[-1][1])}"
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
