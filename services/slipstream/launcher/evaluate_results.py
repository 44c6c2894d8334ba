"""What an evaluation found: a table for the terminal, `evaluation.json` for programs, `evaluation.html` with plots."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape as escape_markup
from rich.table import Table

from slipstream.algorithms.evaluation import Answer, bootstrap, pass_at_k, reward_means, shown_ks, summarize
from slipstream.launcher import charts
from slipstream.launcher.charts import PALETTE, Series
from slipstream.launcher.plot import Chart, draw
from slipstream.launcher.style import STYLE

WIDTH = 100
"""Columns of the table, at most; of a narrower terminal, its own."""
FILE = "evaluation.json"
METHOD = (
    "95 % intervals over problems: accuracy by Wilson's score interval, reward and pass@k by a percentile bootstrap of "
    "1000 resamples; pass@k is the unbiased estimator of Chen et al. 2021"
)


@dataclass
class EnvironmentAnswers:
    """What came of one environment's problems."""

    problems: list[list[Answer]] = field(default_factory=list[list[Answer]])
    failed: int = 0
    """Of these, problems that failed again and again: they count as wrong."""
    unanswered: int = 0
    """Problems beside these."""
    versions: set[str] = field(default_factory=set[str])
    """Weights that sampled any token."""
    temperature: float = 0.0
    """Of their sampling; 0 is greedy."""


def figures_of(answers: EnvironmentAnswers, seed: int) -> dict[str, Any]:
    """The figures of one environment, as `evaluation.json` has them. The same answers and seed give the same."""
    problems = answers.problems
    summary = summarize(problems)
    rights = [(len(each), sum(answer.correct for answer in each)) for each in problems]
    passes = {k: [pass_at_k(n, right, k) for n, right in rights] for k in shown_ks(summary.samples_per_problem)}
    return {
        "problems": summary.problem_count,
        "samples": summary.samples_per_problem,
        "temperature": answers.temperature,
        "failed": answers.failed,
        "unanswered": answers.unanswered,
        "accuracy": summary.accuracy,
        "accuracy_interval": list(summary.accuracy_interval),
        "reward_mean": summary.reward_mean,
        "reward_interval": list(bootstrap(reward_means(problems), seed)),
        "pass_at_k": {str(k): summary.pass_at[k] for k in passes},
        "pass_at_k_intervals": {str(k): list(bootstrap(values, seed)) for k, values in passes.items()},
        "tokens_mean": summary.tokens_mean,
        "truncated_fraction": summary.truncated_fraction,
        **({"roles": {role: asdict(each) for role, each in summary.roles.items()}} if summary.roles else {}),
        "versions": sorted(answers.versions),
    }


def result_of(about: Mapping[str, Any], answers: Mapping[str, EnvironmentAnswers], seed: int) -> dict[str, Any]:
    """The whole evaluation. `about`: what was asked, and how."""
    found = {name: figures_of(each, seed) for name, each in answers.items() if each.problems}
    return {**about, "seed": seed, "method": METHOD, "environments": found}


def write_result(result: dict[str, Any], directory: Path) -> Path:
    """Write both files; returns the path of the page."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / FILE).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    page = directory / "evaluation.html"
    page.write_text(page_of(result), encoding="utf-8")
    return page


def open_console() -> Console:
    console = Console(highlight=False)
    return Console(highlight=False, width=min(console.width, WIDTH) if console.is_terminal else WIDTH)


def print_result(result: dict[str, Any]) -> None:
    """How problems were asked, the table, and where they were asked more than once pass@k with a plot."""
    print_figures(open_console(), result["environments"], "environment")


def print_figures(console: Console, figures: Mapping[str, dict[str, Any]], what: str) -> None:
    """Figures by name: of each environment, or of each evaluation, which `what` says."""
    console.print(_asked(figures), style="dim", markup=False)
    console.print(_table(figures, what))
    chart = Chart("pass@k")
    for name, each in figures.items():
        points = [(float(k), value) for k, value in each["pass_at_k"].items()]
        if len(points) > 1:
            chart.series[name] = points
    if chart.series:
        console.print()
        console.print(_passes(figures))
        console.print()
        console.print(draw(chart, "k"))


def print_method(result: dict[str, Any]) -> None:
    """What the intervals are."""
    print(textwrap.fill(result["method"], WIDTH))


def _asked(by_name: Mapping[str, dict[str, Any]]) -> str:
    """Samples and temperature, with names where they differ."""
    by_way: dict[str, list[str]] = {}
    for name, figures in by_name.items():
        count = figures["samples"]
        answers = "one answer" if count == 1 else f"{count} answers"
        by_way.setdefault(
            f"{answers} to each problem, {_temperature(figures['temperature'], 'temperature ')}", []
        ).append(name)
    if len(by_way) == 1:
        return next(iter(by_way))
    return "\n".join(f"{', '.join(names)}: {way}" for way, names in by_way.items())


def _table(by_name: Mapping[str, dict[str, Any]], what: str) -> Table:
    """The main figures; what is not narrow enough is in `evaluation.json`. Long names are broken, figures never."""
    failures = any(figures["failed"] for figures in by_name.values())
    table = _grid(what, "problems", "accuracy", "reward", "tokens", "cut off", *(["failed"] * failures))
    for name, figures in by_name.items():
        asked = str(figures["problems"])
        asked += f" of {figures['problems'] + figures['unanswered']}" if figures["unanswered"] else ""
        low, high = (100 * end for end in figures["accuracy_interval"])
        least, most = figures["reward_interval"]
        table.add_row(
            escape_markup(name),
            asked,
            rf"{_percent(figures['accuracy'])} \[{low:.0f}, {high:.0f}]",
            rf"{figures['reward_mean']:.3f} \[{least:.2f}, {most:.2f}]",
            f"{figures['tokens_mean']:.1f}",
            _percent(figures["truncated_fraction"]),
            *([str(figures["failed"])] * failures),
        )
        for role, each in figures.get("roles", {}).items():
            accuracy, reward = _percent(each["accuracy"]), f"{each['reward_mean']:.3f}"
            table.add_row(escape_markup(f"  as {role}"), f"{each['answer_count']} answers", accuracy, reward)
    return table


def _passes(by_name: Mapping[str, dict[str, Any]]) -> Table:
    """pass@k in percent, a column for each k."""
    ks = sorted({int(k) for figures in by_name.values() for k in figures["pass_at_k"]})
    table = _grid("pass@k, %", *map(str, ks))
    for name, figures in by_name.items():
        passes = {int(k): f"{100 * value:.1f}" for k, value in figures["pass_at_k"].items()}
        table.add_row(escape_markup(name), *(passes.get(k, "") for k in ks))
    return table


def _grid(first: str, *columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(first, overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _temperature(value: float, before: str = "") -> str:
    return "greedy" if value == 0 else f"{before}{value:g}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _ends(interval: Sequence[float], *, percent: bool = False) -> str:
    low, high = interval
    return f"({100 * low:.1f}-{100 * high:.1f})" if percent else f"({low:.3f}-{high:.3f})"


def page_of(result: dict[str, Any]) -> str:
    """A page that opens anywhere: accuracy, and pass@k by k with its interval."""
    environments = result["environments"]
    bars = [(name, 100 * each["accuracy"]) for name, each in environments.items()]
    cards = [_card("Accuracy, in percent", charts.bar_chart(bars, x_label="environment", y_label="percent"))]
    for name, each in environments.items():
        points = [(float(k), value) for k, value in each["pass_at_k"].items()]
        ends = [[(float(k), pair[at]) for k, pair in each["pass_at_k_intervals"].items()] for at in (0, 1)]
        lines = [Series("pass@k", points, PALETTE[0], marked=True)]
        lines += [Series("95 %", line, PALETTE[0], faint=True) for line in ends]
        chart = charts.line_chart(lines, x_label="k", y_label="pass@k", y_range=(0, 1))
        cards.append(_card(f"{name}: one of k answers is right", chart))
    rows = "".join(_row(name, each) + _role_rows(name, each) for name, each in environments.items())
    heads = "".join(
        f"<th>{head}</th>"
        for head in ("environment", "problems", "temperature", "accuracy", "reward", "tokens", "cut off")
    )
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    about = ", ".join(f"{name}: {value}" for name, value in result.items() if isinstance(value, str | int | float))
    title = escape(f"evaluation of {result.get('of', '')}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head>"
        f"<body><main><header><h1>{title}</h1><p>{escape(about)}</p></header>"
        f'<section><div class="cards">{_card("Figures", table, wide=True)}{"".join(cards)}</div></section>'
        "</main></body></html>\n"
    )


def _row(name: str, each: dict[str, Any]) -> str:
    cells = (
        name,
        str(each["problems"]),
        _temperature(each["temperature"]),
        f"{_percent(each['accuracy'])} {_ends(each['accuracy_interval'], percent=True)}",
        f"{each['reward_mean']:.3f} {_ends(each['reward_interval'])}",
        f"{each['tokens_mean']:.1f}",
        _percent(each["truncated_fraction"]),
    )
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _role_rows(name: str, each: dict[str, Any]) -> str:
    return "".join(
        f"<tr><td>{escape(f'{name} as {role}')}</td><td>{figures['answer_count']}</td><td></td>"
        f"<td>{_percent(figures['accuracy'])}</td><td>{figures['reward_mean']:.3f}</td><td></td><td></td></tr>"
        for role, figures in each.get("roles", {}).items()
    )


def _card(title: str, body: str, *, wide: bool = False) -> str:
    return f'<figure class="card{" wide" if wide else ""}"><figcaption>{escape(title)}</figcaption>{body}</figure>'
