"""What a run that ended early leaves of the weights it trained."""

from __future__ import annotations

from slipstream.launcher.metrics_records import read_metrics
from slipstream.launcher.rundir import RunDir
from slipstream.trainer.checkpoint_store import CheckpointStore

KEEPER = "trainer.checkpoint.interval_steps sets how often one is written"


def lost_sentence(run: RunDir) -> str:
    """Up to which step weights are left, and what would have kept the rest; empty where no step is lost."""
    checkpoints = run.path / "checkpoints"
    if (checkpoints / "final").exists() or (checkpoints / "adapter").exists():
        return ""
    metrics = read_metrics(run.path / "metrics.jsonl")
    trained = max((int(record["step"]) for record in metrics if record.get("kind") == "step"), default=0)
    kept = max((version.step for version in CheckpointStore(checkpoints).versions()), default=0)
    if trained <= kept:
        return ""
    if not kept:
        steps = "the one step trained is" if trained == 1 else f"the {trained} steps trained are"
        return f"no checkpoint holds the weights: {steps} lost; {KEEPER}"
    steps = f"step {trained} is" if trained == kept + 1 else f"steps {kept + 1} to {trained} are"
    return f"a checkpoint holds the weights up to step {kept}; {steps} lost; {KEEPER}"
