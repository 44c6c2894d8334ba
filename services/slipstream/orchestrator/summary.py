"""What the head of a journal's segment says of everything before it, so that the run goes on without that.

A summary is a `History` as one record. It holds no plans: a segment goes only when no plan in it may be asked for
again (`Sequencer.frontier`), so that those still needed stand in the segments that are left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import structlog

from slipstream.algorithms.staleness import Group
from slipstream.common.errors import JournalCorrupt
from slipstream.orchestrator.replay import SUMMED_UP, Dispatch, History, Record

log = structlog.get_logger()


def summary_of(history: History) -> dict[str, Any]:
    """The fields of the record."""
    return {
        **{name: getattr(history, name) for name in SUMMED_UP},
        "serving": str(history.serving),
        "groups": [_group(group, history.dispatches.get(position)) for position, group in history.groups.items()],
        "outcomes": {outcome.value: count for outcome, count in history.outcomes.items()},
        "accuracies": {
            name: [[each.environment, each.accuracy, each.problem_count, each.step] for each in results]
            for name, results in history.accuracies.items()
        },
        "evaluation_starts": dict(history.evaluation_starts),
        "tasks": [list(each) for each in history.tasks.items()],
        "success_rates": [[name, part, *rate] for (name, part), rate in history.success_rates.items()],
        "counted": [list(each) for each in history.counted.items()],
        "sessions": [session.as_record() for session in history.sessions.values()],
    }


def _group(group: Group, dispatch: Dispatch | None) -> dict[str, Any]:
    fields = {name: value for name, value in asdict(group).items() if name not in ("environment", "outcome")}
    if dispatch is None:
        return fields
    return {
        **fields,
        "version": str(dispatch.version),
        "runner": dispatch.runner_id,
        "begun_s": dispatch.begun_s,
        "sessions": dispatch.sessions,
    }


class Summarizer:
    """Follows a journal as it is written, so that a summary of it is at hand; it costs no second reading."""

    def __init__(self, environment_of: Callable[[int], str], earlier: History | None) -> None:
        """`earlier`: what the journal says already."""
        self._history: History | None = History(environment_of)
        if earlier is not None:  # a copy, as the run goes on with the other
            self._history.take({"kind": "summary", **summary_of(earlier)})

    def take(self, record: Record) -> None:
        """Take in what was appended."""
        if self._history is None:
            return
        try:
            self._history.take(record)
        except JournalCorrupt as error:  # a bug; the run itself goes on, with a journal that grows
            log.error("journal_not_summarized", detail=error.message)
            self._history = None
            return
        self._history.sealed.clear()  # their text is large, and a summary needs none of it

    def fields(self) -> dict[str, Any] | None:
        """Those of the record; None where there can be none."""
        return None if self._history is None else summary_of(self._history)
