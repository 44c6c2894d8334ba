"""Shows a run: a live panel on a terminal, a line every few seconds anywhere else."""

from __future__ import annotations

import sys
import time
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slipstream.api.run.v1 import run_pb2
from slipstream.launcher.progress import TimeLeft, duration, facts, paused

LINE_INTERVAL_S = 5.0


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


class LineDisplay:
    """Plain lines: for logs, pipes and CI."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic()
        self._left = TimeLeft()
        self._phase = ""
        self._pause = ""
        self._next_s = 0.0

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._begun_s:5.0f} s] {text}", flush=True)

    def ready(self, replica: str, count: int, total: int) -> None:
        self.say(f"{replica} is up ({count} of {total})")

    def show(self, run: run_pb2.Run) -> None:
        left_s = self._left.update(run)
        now_s = time.monotonic()
        pause = run.reason if paused(run) else ""
        if pause != self._pause:
            self.say(f"paused: {pause}" if pause else "the run goes on")
            self._pause = pause
        if run.phase == self._phase and now_s < self._next_s:
            return
        self._phase, self._next_s = run.phase, now_s + LINE_INTERVAL_S
        if run.phase != "ended":
            (_, phase), *rest = facts(run, left_s)
            self.say("  ".join([phase, *(f"{name} {value}" for name, value in rest)]))

    def close(self) -> None:
        pass


class PanelDisplay:
    """A panel that is redrawn in place; lines that stay go above it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._begun_s = time.monotonic()
        self._left = TimeLeft()
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._live.start()

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def ready(self, replica: str, count: int, total: int) -> None:
        self._draw("starting", count / total, [("up", f"{count} of {total}"), ("newest", replica)])

    def show(self, run: run_pb2.Run) -> None:
        (_, phase), *rest = facts(run, self._left.update(run))
        fraction = run.step / max(run.total_steps, 1) if run.phase == "training" else run.phase_fraction_done
        self._draw(phase, fraction, rest, run.reason if paused(run) else "")

    def _draw(self, title: str, fraction: float, values: list[tuple[str, str]], note: str = "") -> None:
        table = Table.grid(padding=(0, 3))
        table.add_row(*(Text(name, style="dim") for name, _ in values), Text("so far", style="dim"))
        table.add_row(*(Text(value, style="bold") for _, value in values), duration(time.monotonic() - self._begun_s))
        bar = Padding(ProgressBar(total=1.0, completed=fraction), 0)  # padded, or it does not end its line
        parts = [bar, table, Text(note, style="yellow")] if note else [bar, table]
        self._live.update(Panel(Group(*parts), title=title, title_align="left", width=min(self._console.width, 90)))

    def close(self) -> None:
        self._live.stop()
