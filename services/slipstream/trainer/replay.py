"""Recorded rollouts trained once more, in one process without peers: for looking at the trainer, with a debugger too.

    python -m slipstream.trainer.replay @ trainer.toml

Plans are those that the run sealed, micro-batch by micro-batch; tokens and log-probabilities are those of its stored
rollouts. Routes are not stored, so that all tokens are routed live: to the same experts where the weights are the same.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from slipstream.api.training.v1 import batch_pb2
from slipstream.common.compressed_lines import SUFFIX, read_compressed
from slipstream.common.config import ConfigError, cli
from slipstream.common.disk import AppendFile, with_older
from slipstream.common.exits import REFUSED, end
from slipstream.common.telemetry import setup_logging
from slipstream.common.version import PolicyVersion
from slipstream.trainer.fetch import Part, RefId, ref_id
from slipstream.trainer.model_dir import prepare_model_dir_when_room
from slipstream.trainer.replay_config import ReplayConfig
from slipstream.trainer.rows import RowForm, RowsRefused, stitch
from slipstream.trainer.sequence import Lost, TrainSequence, version_number
from slipstream.trainer.start import start
from slipstream.trainer.status import Status
from slipstream.trainer.step import Learner

log = structlog.get_logger()

METRICS_LIMIT_BYTES = 64 << 20


@dataclass(frozen=True)
class Recorded:
    """What is stored of one rollout."""

    token_ids: NDArray[np.int32]
    logps: NDArray[np.float32]
    """Of all tokens; NaN where none was sampled."""
    teacher_logps: NDArray[np.float32] | None = None
    """The same of what a teacher worker said."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Recorded:
        """From a line of `rollouts/`. Raises `ValueError` and `KeyError` for one that is not whole."""
        token_ids = np.array(record["token_ids"], np.int32)
        positions = np.concatenate([np.arange(start, end) for start, end in record["loss_ranges"]])

        def placed(name: str) -> NDArray[np.float32]:
            logps = np.full(len(token_ids), np.nan, np.float32)
            logps[positions] = np.frombuffer(base64.b64decode(record[name]), "<f4")
            return logps

        judged = "teacher_logprobs_base64"
        return cls(token_ids, placed("logprobs_base64"), placed(judged) if judged in record else None)


def read_rollouts(directory: Path, wanted: set[str]) -> dict[str, Recorded]:
    """Those that are wanted, by name; what is damaged or gone is left out."""
    found: dict[str, Recorded] = {}
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        for record in (record for file in with_older(path) for record in read_compressed(file)):
            name = f"{record.get('group_id')}.{record.get('attempt')}.{record.get('sample')}"
            if name in wanted:
                try:
                    found[name] = Recorded.of(record)
                except (ValueError, KeyError, TypeError) as error:
                    log.warning("rollout_unreadable", rollout_id=name, detail=str(error))
    return found


def read_plans(directory: Path) -> Iterator[batch_pb2.Plan]:
    """In the order of their steps."""
    for path in sorted(directory.glob("*.plan"), key=lambda path: int(path.stem)):
        yield batch_pb2.Plan.FromString(path.read_bytes())


def replay_step(learner: Learner, plan: batch_pb2.Plan, rollouts: Mapping[str, Recorded]) -> dict[str, float]:
    """Train one plan; returns the step's figures."""
    version = PolicyVersion.from_proto(plan.version)
    trained = PolicyVersion(version.incarnation, version.step - 1)
    form = RowForm.of(learner.model, trained)
    batches = [[_made(planned, rollouts, form) for planned in batch.sequences] for batch in plan.micro_batches]
    inputs = sum(max(0, planned.token_count - 1) for batch in plan.micro_batches for planned in batch.sequences)
    learner.begin(plan.loss_token_count, plan.sequence_count, inputs, version_number(trained))
    learner.add(batches)
    return learner.finish(version.step)


def _made(planned: batch_pb2.PlannedSequence, rollouts: Mapping[str, Recorded], form: RowForm) -> TrainSequence | Lost:
    recorded = rollouts.get(planned.rollout_id)
    parts: dict[RefId, Part] = {}
    if recorded is not None:
        parts[ref_id(planned.token_ids)] = Part(0, recorded.token_ids.data.cast("B"))
        parts[ref_id(planned.logprobs)] = Part(0, recorded.logps.data.cast("B"))
        if recorded.teacher_logps is not None:
            parts[ref_id(planned.teacher_logprobs)] = Part(0, recorded.teacher_logps.data.cast("B"))
    try:
        made = stitch(planned, parts, form)
    except RowsRefused as error:
        log.warning("rows_refused", rollout_id=planned.rollout_id, field=error.field, detail=str(error))
        made = None
    return Lost(max(0, planned.token_count - 1)) if made is None else made


def _recorded_losses(run: Path) -> dict[int, float]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    records = [record for record in map(json.loads, lines) if record.get("kind") == "step" and "loss" in record]
    return {int(record["step"]): float(record["loss"]) for record in records}


def run(config: ReplayConfig) -> None:
    """Train every plan, and tell each step's figures beside what was recorded."""
    prepare_model_dir_when_room(config)
    learner, _ = start(config, Status())
    plans, then = list(read_plans(config.plans)), _recorded_losses(config.recorded)
    wanted = {each.rollout_id for plan in plans for batch in plan.micro_batches for each in batch.sequences}
    rollouts = read_rollouts(config.recorded / "rollouts", wanted)
    metrics = AppendFile(config.run_dir / "metrics.jsonl", METRICS_LIMIT_BYTES)
    print(f"{len(plans)} steps of {config.recorded}, {len(rollouts)} of {len(wanted)} rollouts stored", flush=True)
    for plan in plans:
        step, figures = plan.version.step, replay_step(learner, plan, rollouts)
        metrics.append(json.dumps({"kind": "replayed", "step": step, **figures}).encode() + b"\n")
        was = f" (recorded {then[step]:.6f})" if step in then else ""
        lost = f", {figures['sequences_lost']:.0f} rollouts missing" if figures.get("sequences_lost") else ""
        why = "nothing known" if figures.get("nothing_known") else "not finite"
        told = f"skipped, {why}" if figures["step_skipped"] else f"loss {figures['loss']:.6f}{was}"
        print(f"step {step}: {told}, gradient norm {figures.get('grad_norm', float('nan')):.4f}{lost}", flush=True)


def main() -> None:
    """Exits with 2 for a configuration that cannot be."""
    config = cli(ReplayConfig)
    setup_logging(config, "trainer")
    torch.set_num_threads(config.torch_threads)
    try:
        run(config)
    except ConfigError as error:
        end(REFUSED, str(error))


if __name__ == "__main__":
    main()
