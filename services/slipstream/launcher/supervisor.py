"""Starts the processes of a run, watches them, restarts where told to, and leaves none behind.

| loop     | takes                  | waits for                 | unblocked by                       |
|----------|------------------------|---------------------------|------------------------------------|
| `start`  | the list of processes  | each one's ready check    | the check, or the start timeout    |
| `watch`  | exits, ten times a s   | the next exit             | a death that ends the run          |
| `stop`   | what still runs        | exits after SIGTERM       | the exits, or SIGKILL              |
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NoReturn

from slipstream.launcher.errors import ServiceDiedError
from slipstream.launcher.memory import oom_kills
from slipstream.launcher.process import ProcessSpec, SupervisedProcess

POLL_INTERVAL_S = 0.1
READY_INTERVAL_S = 0.2
OUTPUT_INTERVAL_S = 2.0
"""How often the length of what processes print is looked at, in seconds."""
TERM_FRACTION = 0.7
"""Part of the stop timeout that processes get between SIGTERM and SIGKILL."""
HEALTHY_AFTER_S = 60.0
"""A process that ran this long before dying starts again without back-off."""
ALWAYS_RESTART_BUDGET = 20
WAITING_INTERVAL_S = 15.0
"""How often it is told what a start still waits for."""

KILLED = f"killed by {signal.SIGKILL.name}"
LAST_WORDS_BYTES = 4096
LAST_WORDS_CHARACTERS = 300

RestartPolicy = Literal["never", "on_failure"]
OnEvent = Callable[..., None]


class Supervisor:
    """Owns the processes of one run. Use from the main thread's event loop only."""

    def __init__(
        self,
        *,
        restart: RestartPolicy = "never",
        restart_budget: int = 5,
        backoff_s: float = 0.5,
        max_backoff_s: float = 10.0,
        start_timeout_s: float = 180.0,
        stop_timeout_s: float = 20.0,
        log_limit_bytes: int = 64 << 20,
        log_kept_files: int = 1,
        on_event: OnEvent = lambda kind, **fields: None,
        oom_kills: Callable[[], int] = oom_kills,
    ) -> None:
        self._restart = restart
        self._restart_budget = restart_budget
        self._backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._log_limit_bytes = log_limit_bytes
        self._log_kept_files = log_kept_files
        self._on_event = on_event
        self._oom_kills = oom_kills
        self._oom_kills_before = oom_kills()
        self._running: dict[str, SupervisedProcess] = {}
        self._restarts: dict[str, int] = {}
        self._quick_deaths: dict[str, int] = {}
        """In a row, of processes that did not run for `HEALTHY_AFTER_S`."""
        self._due: dict[str, tuple[float, ProcessSpec]] = {}

    @property
    def pids(self) -> dict[str, int]:
        return {replica: process.pid for replica, process in self._running.items()}

    async def start(
        self,
        specs: list[ProcessSpec],
        on_ready: Callable[[str], None] = lambda replica: None,
        on_waiting: Callable[[list[str]], None] = lambda replicas: None,
    ) -> None:
        """Start all and return when every ready check has said yes; `on_waiting` hears now and then which have not."""
        for spec in specs:
            self._spawn(spec)
        told_s = time.monotonic()
        deadline_s = told_s + self._start_timeout_s
        waiting = {spec.replica: spec for spec in specs}
        while waiting:
            self._handle_exits()
            answers = await asyncio.gather(*(spec.ready() for spec in waiting.values()))
            for replica in [spec.replica for spec, ready in zip(waiting.values(), answers, strict=True) if ready]:
                del waiting[replica]
                self._on_event("service_ready", replica=replica)
                on_ready(replica)
                told_s = time.monotonic()
            if waiting and time.monotonic() - told_s > WAITING_INTERVAL_S:
                told_s = time.monotonic()
                on_waiting(list(waiting))
            if waiting and time.monotonic() > deadline_s:
                spec = next(iter(waiting.values()))
                self._give_up(spec, f"was not ready within {self._start_timeout_s:.0f} s")
            await asyncio.sleep(READY_INTERVAL_S if waiting else 0)

    async def watch(self) -> NoReturn:
        """Run until a death ends the run: raises ServiceDiedError."""
        looked_s = time.monotonic()
        while True:
            self._handle_exits()
            if time.monotonic() - looked_s > OUTPUT_INTERVAL_S:
                looked_s = time.monotonic()
                for process in self._running.values():
                    process.limit_output(self._log_limit_bytes, self._log_kept_files)
            await asyncio.sleep(POLL_INTERVAL_S)

    async def stop(self) -> None:
        """End everything within the stop timeout: SIGTERM, then SIGKILL for what is left."""
        self._due.clear()
        begun_s = time.monotonic()
        term_s = self._stop_timeout_s * TERM_FRACTION
        first = [process for process in self._running.values() if not process.spec.stops_last]
        last = [process for process in self._running.values() if process.spec.stops_last]
        try:
            await self._terminate(first, begun_s + term_s)
            self._kill(first)
            await self._terminate(last, min(time.monotonic() + 2.0, begun_s + term_s + 2.0))
        finally:  # also when a second Ctrl-C cancels the wait
            self._kill([*first, *last])
            self._running.clear()

    async def _terminate(self, processes: list[SupervisedProcess], deadline_s: float) -> None:
        for process in processes:
            process.signal(signal.SIGTERM)
        while time.monotonic() < deadline_s:
            if all(process.exit_reason() is not None for process in processes):
                return
            await asyncio.sleep(POLL_INTERVAL_S / 2)

    def _kill(self, processes: list[SupervisedProcess]) -> None:
        stubborn = [process for process in processes if process.exit_reason() is None]
        for process in stubborn:
            self._on_event("service_killed", replica=process.spec.replica)
            process.signal(signal.SIGKILL)
        for process in stubborn:
            process.wait()

    def _spawn(self, spec: ProcessSpec) -> None:
        process = SupervisedProcess(spec)
        self._running[spec.replica] = process
        self._on_event("service_started", replica=spec.replica, pid=process.pid)

    def _handle_exits(self) -> None:
        ended = [(process, process.exit_reason()) for process in self._running.values()]
        for process, reason in sorted(
            ((process, reason) for process, reason in ended if reason is not None),
            # Of several at once, one that refused is a cause, and one that was killed more often than an effect.
            key=lambda item: (not item[0].refused, not item[1].startswith("killed")),
        ):
            if self._running.pop(process.spec.replica, None) is None:
                continue  # ended with another of its group
            if reason == KILLED and self._oom_kills() > self._oom_kills_before:
                reason += ", as the machine ran out of memory"
            self._on_event("service_died", replica=process.spec.replica, reason=reason)
            self._restart_or_give_up(process, reason)
            self._end_group(process.spec)
        for replica, (due_s, spec) in list(self._due.items()):
            if time.monotonic() >= due_s:
                del self._due[replica]
                self._spawn(spec)

    def _restart_or_give_up(self, process: SupervisedProcess, reason: str) -> None:
        spec = process.spec
        count = self._restarts.get(spec.replica, 0)
        budget = ALWAYS_RESTART_BUDGET if spec.always_restart else self._restart_budget
        if process.refused and self._restart != "never":
            self._give_up(spec, f"died ({reason}) and would again")
        if not spec.always_restart and (self._restart == "never" or not spec.resumable):
            self._give_up(spec, f"died ({reason})")
        if count >= budget:
            self._give_up(spec, f"died ({reason}) after {count} restarts, which is its budget")
        self._restarts[spec.replica] = count + 1
        ran_long = time.monotonic() - process.started_s > HEALTHY_AFTER_S
        quick = self._quick_deaths[spec.replica] = 0 if ran_long else self._quick_deaths.get(spec.replica, 0) + 1
        delay_s = min(self._backoff_s * 2 ** min(quick - 1, 16), self._max_backoff_s) if quick else 0.0
        self._due[spec.replica] = (time.monotonic() + delay_s, spec)
        self._on_event(
            "service_restart",
            replica=spec.replica,
            restart=count + 1,
            delay_s=delay_s,
            reason=reason,
            said=last_words(spec.output_file) if "exited with code" in reason else "",
            always=spec.always_restart,
        )

    def _end_group(self, dead: ProcessSpec) -> None:
        """What the others of its group were at cannot go on: end them, and start them again with it."""
        members = [each for each in self._running.values() if dead.group and each.spec.group == dead.group]
        for process in members:
            process.signal(signal.SIGKILL)
            process.wait()
            process.exit_reason()
            del self._running[process.spec.replica]
            self._on_event("service_ended_with_group", replica=process.spec.replica, dead=dead.replica)
            self._due[process.spec.replica] = (self._due[dead.replica][0], process.spec)

    def _give_up(self, spec: ProcessSpec, what: str) -> NoReturn:
        # What was killed did not know it would be, so its last line says nothing of why.
        said = last_words(spec.output_file) if "exited with code" in what else ""
        sentence = f"{spec.replica} {what}{f': {said}' if said else ''}; its log is {_log_to_read(spec)}"
        raise ServiceDiedError(sentence, spec.replica)


def last_words(output_file: Path) -> str:
    """The last line that a service printed: the message of a traceback, or the sentence it gave up with."""
    try:
        with output_file.open("rb") as output:
            output.seek(max(output.seek(0, 2) - LAST_WORDS_BYTES, 0))
            lines = output.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    said = lines[-1].strip() if lines else ""
    said = re.sub(r"^(error|slipstream-[a-z]+|(\w+\.)*(ConfigError|ServiceFailed)): ", "", said)
    return said if len(said) <= LAST_WORDS_CHARACTERS else f"{said[:LAST_WORDS_CHARACTERS]}…"


def _log_to_read(spec: ProcessSpec) -> str:
    """Its log, and its output where it printed something, such as a traceback."""
    logged, printed = (path.exists() and path.stat().st_size > 0 for path in (spec.log_file, spec.output_file))
    if printed and spec.output_file != spec.log_file:
        return f"{spec.log_file} (and {spec.output_file.name})" if logged else str(spec.output_file)
    return str(spec.log_file)
