"""Steps that were skipped one after another, and what they were to train: for whoever looks for the cause."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from slipstream.common.disk import replace_file
from slipstream.common.errors import DiskFull
from slipstream.orchestrator.sealer import SealedPlan

NOT_FINITE = "NOT_FINITE"
NOTHING_KNOWN = "NOTHING_KNOWN"
_WHY = {
    NOT_FINITE: "had a loss or gradient that is not finite",
    NOTHING_KNOWN: "had no token whose log-probabilities are known: engine, teacher or reference policy gave NaN, "
    "infinite or positive ones",
}


class SkippedSteps:
    """Counts them, and names the rollouts once there are too many in a row."""

    def __init__(self, limit: int, path: Path) -> None:
        self._limit = limit
        self._path = path
        self._in_a_row: list[SealedPlan] = []
        self.sentence = ""
        """Why the run cannot go on; empty while it can."""

    def restore(self, plans: Sequence[SealedPlan]) -> None:
        """Go on with the steps that an earlier process skipped last."""
        self._in_a_row = list(plans)

    def note(self, plan: SealedPlan, *, skipped: bool, reason: str = NOT_FINITE) -> None:
        """Take in what became of a step; `reason`: why it was skipped."""
        if not skipped:
            self._in_a_row.clear()
            return
        self._in_a_row.append(plan)
        if len(self._in_a_row) >= self._limit and not self.sentence:
            steps = f"{len(self._in_a_row)} steps in a row, {self._in_a_row[0].step} to {plan.step},"
            self.sentence = f"{steps} {_WHY[reason]}; {self._save()}"

    def _save(self) -> str:
        """Write the rollouts' ids; says where they are."""
        steps = [{"step": plan.step, "rollout_ids": rollout_ids(plan)} for plan in self._in_a_row]
        try:
            replace_file(self._path, json.dumps({"steps": steps}, indent=1).encode() + b"\n")
        except DiskFull as error:
            return f"their rollouts could not be saved: {error.message}"
        return f"their rollouts are in {self._path}"


def rollout_ids(plan: SealedPlan) -> list[str]:
    """Of every rank."""
    return [each.rollout_id for part in plan.plans for batch in part.micro_batches for each in batch.sequences]
