"""Shows a run: a live panel on a terminal, a line every few seconds anywhere else."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO, cast

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slipstream.api.run.v1 import run_pb2
from slipstream.launcher.progress import Milestones, TimeLeft, Warnings, duration, facts, paused
from slipstream.launcher.sentences import one_line

LINE_INTERVAL_S = 5.0
SILENCE_S = 60.0
"""A line that says nothing new comes only this often, as a sign of life."""

LEGEND = (
    "training begins; groups: ready for the next step; reward: mean since the last step;",
    "lag: versions behind; tokens/s: sampled; filtered: groups whose rewards do not differ",
)
PANEL_WIDTH = 90
PANEL_FRAME = 4
"""Of the width, what the panel's sides take."""
GAPS = (3, 2)
SPARED = ("lag", "tokens/s", "filtered", "groups")
"""Figures that a narrow panel leaves out, the first of them first."""
METRICS_FILE = "metrics.jsonl"
"""Of the run's directory: it has what is cut here."""


class Display(Protocol):
    """Where the launcher tells what happens."""

    def say(self, text: str) -> None:
        """One line that stays."""
        ...

    def ready(self, replica: str, count: int, total: int) -> None:
        """A process is up: so many of all."""
        ...

    def show(self, run: run_pb2.Run) -> None:
        """The run now."""
        ...

    def close(self) -> None: ...


def open_display() -> Display:
    return PanelDisplay() if sys.stdout.isatty() else LineDisplay()


def tell(text: str, stream: TextIO | None = None) -> None:
    """Print a line; that nobody takes it must not end a run.

    What found no room on a full disk waits in the stream's buffer for the next line. Once a reader has gone for good,
    `slipstream rl | head`, there is nobody left to tell.
    """
    taker = stream or sys.stdout
    try:
        print(text, file=taker, flush=True)
    except BrokenPipeError:
        _give_up_on(taker)
    except OSError:
        pass


def finish_telling() -> None:
    """Tell what still waits, or drop it."""
    try:
        sys.stdout.flush()
    except OSError:
        _give_up_on(sys.stdout)


class Terminal:
    """A stream to a terminal that may be closed meanwhile: what is told then goes nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            _give_up_on(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            _give_up_on(self._stream)


def _give_up_on(stream: TextIO) -> None:
    """Let what is told here go nowhere, so that Python's own flush at its end does not fail either."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class LineDisplay:
    """Plain lines: for logs, pipes and CI."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun_s = clock()
        self._left = TimeLeft()
        self._milestones = Milestones()
        self._warnings = Warnings()
        self._phase = ""
        self._pause = ""
        self._explained = False
        self._said: list[tuple[str, str]] = []
        self._said_s = 0.0

    def say(self, text: str) -> None:
        tell(f"[{self._clock() - self._begun_s:5.0f} s] {text}")

    def ready(self, replica: str, count: int, total: int) -> None:
        self.say(f"{replica} is up ({count} of {total})")

    def show(self, run: run_pb2.Run) -> None:
        left_s = self._left.update(run)
        pause = one_line(run.reason, METRICS_FILE) if paused(run) else ""
        if pause != self._pause:
            self.say(f"paused: {pause}" if pause else "the run goes on")
            self._pause = pause
        for news in (*self._milestones.news(run), *self._warnings.news(run)):
            self.say(one_line(news, METRICS_FILE))
        (_, phase), *rest = facts(run, left_s)
        silent_s = self._clock() - self._said_s
        fresh = rest[:-1] != self._said  # all but the time left
        if phase == self._phase and silent_s < (LINE_INTERVAL_S if fresh else SILENCE_S):
            return
        begins = run.phase == "starting" and not self._phase  # that all services are up has just been told
        self._phase, self._said, self._said_s = phase, rest[:-1], self._clock()
        if run.phase == "training" and not self._explained:
            self._explained = True
            for line in LEGEND:
                self.say(line)
        if run.phase != "ended" and not begins:
            self.say("  ".join([phase, *(f"{name} {value}" for name, value in rest)]))

    def close(self) -> None:
        pass


def fitting(values: list[tuple[str, str]], width: int) -> tuple[list[tuple[str, str]], int]:
    """Those that have room beside each other, and the gap between them: of a narrow panel some are left out."""
    shown = list(values)
    for spared in (None, *SPARED):
        shown = [value for value in shown if value[0] != spared]
        taken = sum(max(map(len, value)) for value in shown)
        for gap in GAPS:
            if taken + gap * (len(shown) - 1) <= width:
                return shown, gap
    return shown, GAPS[-1]


class PanelDisplay:
    """A panel that is redrawn in place; lines that stay go above it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=cast(TextIO, Terminal(sys.stdout)))
        self._begun_s = time.monotonic()
        self._left = TimeLeft()
        self._milestones = Milestones()
        self._warnings = Warnings()
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._live.start()

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def ready(self, replica: str, count: int, total: int) -> None:
        self._draw("starting", count / total, [("up", f"{count} of {total}"), ("newest", replica)])

    def show(self, run: run_pb2.Run) -> None:
        for news in (*self._milestones.news(run), *self._warnings.news(run)):
            self.say(one_line(news, METRICS_FILE))
        (_, phase), *rest = facts(run, self._left.update(run))
        fraction = run.step / max(run.total_steps, 1) if run.phase == "training" else run.phase_fraction_done
        self._draw(phase, fraction, rest, one_line(run.reason, METRICS_FILE) if paused(run) else "")

    def _draw(self, title: str, fraction: float, values: list[tuple[str, str]], note: str = "") -> None:
        width = min(self._console.width, PANEL_WIDTH)
        so_far = ("so far", duration(time.monotonic() - self._begun_s))
        values, gap = fitting([*values, so_far], width - PANEL_FRAME)
        table = Table.grid(padding=(0, gap))
        for _ in values:
            table.add_column(no_wrap=True)  # or the panel's height would change
        table.add_row(*(Text(name, style="dim") for name, _ in values))
        table.add_row(*(Text(value, style="" if name == "so far" else "bold") for name, value in values))
        bar = Padding(ProgressBar(total=1.0, completed=fraction), 0)  # padded, or it does not end its line
        parts = [bar, table, Text(note, style="yellow")] if note else [bar, table]
        self._live.update(Panel(Group(*parts), title=title, title_align="left", width=width))

    def close(self) -> None:
        self._live.stop()
