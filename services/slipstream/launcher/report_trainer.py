"""What the trainer did with its time, and its experts' load, as charts of the report: title, chart and note each."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.launcher import charts
from slipstream.launcher.charts import BLUE, GREY, ORANGE, PURPLE, RED, TEAL, Series
from slipstream.launcher.records import Record, curve

Card = tuple[str, str, str]

_PARTS = (
    ("fetch_s", "rows", ORANGE),
    ("forward_s", "forward", BLUE),
    ("backward_s", "backward", PURPLE),
    ("optimizer_s", "optimizer", TEAL),
    ("frozen_s", "reference and teacher", GREY),
    ("export_s", "copy to publish", RED),
)


def trainer_cards(steps: Sequence[Record], window: int) -> list[Card]:
    """Parts of a training step; speed and, where the device's peak is known, its utilisation."""
    cards: list[Card] = []
    parts = [(name, curve(steps, key), color) for key, name, color in _PARTS]
    shown = [(name, points, color) for name, points, color in parts if any(y > 0.001 for _, y in points)]
    if shown:
        lines = [Series(name, charts.smooth(points, window), color) for name, points, color in shown]
        cards.append(("Within a training step", charts.line_chart(lines, x_label="step", y_label="seconds"), ""))
    used = curve(steps, "mfu")
    if used:
        lines = [Series("MFU", used, BLUE, faint=True), Series("MFU", charts.smooth(used, window), BLUE)]
        chart = charts.line_chart(lines, x_label="step", y_label="MFU", y_format=lambda y: f"{100 * y:.0f} %")
        note = "FLOPs that the mathematics of a step needs, by its time, as a part of what the devices can do."
        cards.append(("Utilisation of the trainer's devices", chart, note))
    return cards


def expert_cards(steps: Sequence[Record]) -> list[Card]:
    """How evenly experts are used; none for a dense model."""
    worst = curve(steps, "expert_load_max")
    if not worst:
        return []
    lines = [
        Series("worst layer", worst, ORANGE),
        Series("mean of layers", curve(steps, "expert_load_mean"), BLUE),
    ]
    chart = charts.line_chart(lines, x_label="step", y_label="(max - mean) / mean")
    return [("Load of experts", chart, "How much more the busiest expert of a layer does than the mean. 0: all alike.")]
