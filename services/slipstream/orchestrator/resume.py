"""A process that finds the journal of an earlier one goes on from it."""

from __future__ import annotations

import structlog

from slipstream.api.run.v1 import run_pb2
from slipstream.common.config import ConfigError
from slipstream.common.errors import JournalCorrupt
from slipstream.orchestrator.config import OrchestratorConfig
from slipstream.orchestrator.journal import Journal
from slipstream.orchestrator.metrics import MetricsFile
from slipstream.orchestrator.replay import History, replay
from slipstream.orchestrator.run_state import CLIENT, RunState
from slipstream.orchestrator.sequencer import Sequencer, task_sequence

log = structlog.get_logger()

FINAL = {"finished": run_pb2.RUN_STATE_FINISHED, "stopped": run_pb2.RUN_STATE_STOPPED}
"""How a run ends for good. One that failed goes on, since whoever starts it again thinks that it can."""


def earlier_history(journal: Journal, config: OrchestratorConfig) -> History | None:
    """What the journal says of earlier processes of this run, if there were any; then the journal lets go of it.

    Raises `ConfigError` where it is of another run, or what it begins with does not stand for all that came before.
    """
    records = journal.take_recovered()
    if not records:
        return None
    if records[0]["n"] and records[0]["kind"] != "summary":
        raise ConfigError(
            f"{journal.path} begins with record {records[0]['n']}, which is no summary of what came before: "
            "the run cannot go on from it"
        )
    try:
        history = replay(records, task_sequence(config).environment_of)
    except JournalCorrupt as error:
        raise JournalCorrupt(f"{journal.path}: {error.message}", **error.metadata) from None
    if (history.run_id, history.seed) != (config.run_id, config.seed):
        raise ConfigError(
            f"{journal.path} is the journal of run {history.run_id} with seed {history.seed}: take another directory"
        )
    return history


def take_up(history: History, sequencer: Sequencer, state: RunState, metrics: MetricsFile) -> None:
    """Go on where the earlier process left it, or say once more how the run ended."""
    history.begin_again()
    sequencer.resume(history)
    state.accuracies += [result for results in history.accuracies.values() for result in results]
    figures = {
        "trained_step": history.trained_step,
        "sealed_step": history.sealed_step,
        "incarnation": history.incarnation,
        "open_groups": sequencer.machine.open_groups,
        "waiting_groups": sum(group.phase == "waiting" for group in sequencer.machine),
    }
    if history.paused:
        state.pause(CLIENT, history.paused)
    metrics.write("resumed", **figures)
    log.info("run_taken_up", **figures)
    if history.ended in FINAL:
        state.end(FINAL[history.ended], history.reason)
