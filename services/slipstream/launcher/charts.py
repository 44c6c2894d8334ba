"""Charts as inline SVG text: lines, bars, busy timelines. No scripts, no fonts from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape

from slipstream.launcher.intervals import Interval

BLUE, ORANGE, TEAL, PURPLE, RED, GREY = "#2b6cb0", "#dd7a2f", "#178f83", "#7c5cc4", "#c53a4b", "#8a94a3"
PALETTE = (BLUE, ORANGE, TEAL, PURPLE, RED, GREY)
WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 66, 14, 12, 38
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    points: Sequence[Point]
    color: str
    faint: bool = False
    """Drawn thin and without an entry in the legend: the raw values behind a smoothed line."""
    marked: bool = False
    """Each point gets a dot: few measurements rather than a curve."""
    joined: bool = True
    """A line goes through the points; without, each dot has its value beside it."""


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    y_range: tuple[float, float] | None = None,
    log: bool = False,
    y_format: Callable[[float], str] | None = None,
) -> str:
    """Lines over a common x axis; with `log`, values that are not positive are left out."""
    series = [_positive(one) for one in series] if log else series
    series = [one for one in series if one.points]
    if not series:
        return empty_chart()
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points]
    x_ticks = nice_ticks(min(xs), max(xs), 6)
    y_ticks = decades(min(ys), max(ys)) if log else nice_ticks(*(y_range or (min(0.0, *ys), max(ys))), 5)
    x_of = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y_of = _scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP, log=log)
    parts = [_y_axis(y_ticks, y_of, y_label, y_format or (power if log else number))]
    parts.append(_x_axis([tick for tick in x_ticks if min(xs) <= tick <= max(xs)], x_of, x_label))
    for one in series:
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in one.points)
        style = 'stroke-width="1" opacity="0.3"' if one.faint else 'stroke-width="2"'
        if one.joined:
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{one.color}" {style} stroke-linejoin="round"/>'
            )
        else:
            parts += [_beside(x_of(x), y_of(y), (y_format or number)(y)) for x, y in one.points]
        if one.marked:
            parts += [
                f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="4.5" fill="#fff" stroke="{one.color}" '
                f'stroke-width="2"><title>{escape(one.name)}: {number(y)}</title></circle>'
                for x, y in one.points
            ]
    return svg(parts) + legend([(one.name, one.color) for one in series if not one.faint])


def bar_chart(bars: Sequence[tuple[str, float]], *, x_label: str, y_label: str, color: str = BLUE) -> str:
    """Upright bars with their values on top."""
    if not bars:
        return empty_chart()
    ticks = nice_ticks(0, max(value for _, value in bars) or 1, 5)
    y_of = _scale(0, ticks[-1], HEIGHT - BOTTOM, TOP + 8)
    slot = (WIDTH - LEFT - RIGHT) / len(bars)
    width = min(slot * 0.7, 72)
    parts = [_y_axis(ticks, y_of, y_label, number)]
    for index, (name, value) in enumerate(bars):
        middle, top = LEFT + slot * (index + 0.5), y_of(value)
        parts.append(
            f'<rect x="{middle - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{HEIGHT - BOTTOM - top:.1f}" rx="2" fill="{color}"/>'
        )
        parts.append(_text(middle, top - 5, number(value), "middle", "value"))
        parts.append(_text(middle, HEIGHT - BOTTOM + 15, name, "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, x_label, "middle", "label"))
    return svg(parts)


def level_chart(bars: Sequence[tuple[str, float, str]]) -> str:
    """Lying bars with name and value, one a row: (name, value, colour)."""
    if not bars:
        return empty_chart("none")
    row, left, right = 30, 190, 60
    largest = max(value for _, value, _ in bars) or 1
    height = row * len(bars) + 8
    parts = []
    for index, (name, value, color) in enumerate(bars):
        y = 4 + row * index
        width = max((WIDTH - left - right) * value / largest, 2)
        parts.append(_text(left - 10, y + 19, name, "end", "name"))
        parts.append(f'<rect x="{left}" y="{y + 5}" width="{width:.1f}" height="{row - 10}" rx="2" fill="{color}"/>')
        parts.append(_text(left + width + 8, y + 19, number(value), "start", "value"))
    return svg(parts, height=height)


@dataclass(frozen=True)
class Track:
    """One row of a timeline: coloured busy intervals of a process."""

    name: str
    intervals: Sequence[tuple[Interval, str]]


def timeline(tracks: Sequence[Track], start_s: float, end_s: float, *, width: int = 1160) -> str:
    """Busy intervals of several processes over one clock, which starts at `start_s`."""
    if not tracks or end_s <= start_s:
        return empty_chart()
    row, left = 26, max(96, 20 + 7 * max(len(track.name) for track in tracks))
    foot = 22
    height = TOP + row * len(tracks) + foot
    x_of = _scale(start_s, end_s, left, width - RIGHT)
    parts = []
    for tick in nice_ticks(0, end_s - start_s, 10):
        if tick <= end_s - start_s:
            x = x_of(start_s + tick)
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - foot}"/>')
            parts.append(_text(x, height - foot + 15, f"{number(tick)} s", "middle"))
    for index, track in enumerate(tracks):
        y = TOP + row * index
        parts.append(_text(left - 10, y + 17, track.name, "end", "name"))
        parts.append(f'<rect x="{left}" y="{y + 4}" width="{width - RIGHT - left}" height="{row - 8}" class="lane"/>')
        shapes: dict[str, list[str]] = {}
        for (begin, finish), color in track.intervals:
            if begin < end_s and finish > start_s:
                x = x_of(max(begin, start_s))
                shapes.setdefault(color, []).append(
                    f"M{x:.1f} {y + 4}h{max(x_of(min(finish, end_s)) - x, 0.4):.1f}v{row - 8}H{x:.1f}z"
                )
        # One path a colour: a rectangle each would make the file ten times as large.
        parts += [f'<path d="{"".join(paths)}" fill="{color}"/>' for color, paths in shapes.items()]
    return svg(parts, width=width, height=height)


def legend(entries: Sequence[tuple[str, str]]) -> str:
    if len(entries) < 2:
        return ""
    keys = "".join(f'<span><i style="background:{color}"></i>{escape(name)}</span>' for name, color in entries)
    return f'<div class="legend">{keys}</div>'


def svg(parts: Sequence[str], *, width: int = WIDTH, height: int = HEIGHT) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'


def empty_chart(text: str = "nothing recorded yet") -> str:
    return f'<p class="empty">{escape(text)}</p>'


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """Centred running mean; shorter at both ends."""
    half = window // 2
    averaged = []
    for index, (x, _) in enumerate(points):
        near = points[max(index - half, 0) : index + half + 1]
        averaged.append((x, sum(y for _, y in near) / len(near)))
    return averaged


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Round values that cover [low, high] in about `count` intervals."""
    if high <= low:
        high = low + 1
    rough = (high - low) / count
    magnitude = 10 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def decades(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**exponent for exponent in range(first, max(last, first + 1) + 1)]


def number(value: float) -> str:
    """A short figure for an axis or a label."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:.3g}k"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    if value == int(value) or abs(value) >= 1000:
        return str(round(value))
    return f"{value:.3g}"


def power(value: float) -> str:
    return f"1e{round(math.log10(value))}"


def _beside(x: float, y: float, text: str) -> str:
    """A dot's value, on the side where there is room."""
    left = x > WIDTH / 2
    return _text(x + (-9 if left else 9), y + 4, text, "end" if left else "start", "value")


def _positive(one: Series) -> Series:
    return replace(one, points=[(x, y) for x, y in one.points if y > 0])


def _scale(low: float, high: float, at_low: float, at_high: float, *, log: bool = False) -> Callable[[float], float]:
    of = math.log10 if log else float
    span = of(high) - of(low) or 1.0
    return lambda value: at_low + (of(value) - of(low)) / span * (at_high - at_low)


def _y_axis(ticks: Sequence[float], y_of: Callable[[float], float], label: str, text: Callable[[float], str]) -> str:
    shown = ticks if len(ticks) <= 8 else ticks[:: math.ceil(len(ticks) / 7)]
    parts = []
    for tick in shown:
        y = y_of(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 7, y + 4, text(tick), "end"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<g transform="rotate(-90 13 {middle})">{_text(13, middle + 4, label, "middle", "label")}</g>')
    return "".join(parts)


def _x_axis(ticks: Sequence[float], x_of: Callable[[float], float], label: str) -> str:
    y = HEIGHT - BOTTOM
    parts = [f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>']
    parts += [_text(x_of(tick), y + 15, number(tick), "middle") for tick in ticks]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, label, "middle", "label"))
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str, css_class: str = "tick") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{css_class}">{escape(text)}</text>'
