"""What a run that is to be killed consists of: how many runners and ranks, on which engine."""

from __future__ import annotations

from dataclasses import dataclass

SINGLE = ("orchestrator", "router", "broadcaster", "sandbox", "valkey")
"""Services of which there is one, whatever the shape."""
CHECKPOINT_STEPS = 4
BASE = {
    "orchestrator.samples-per-group": "2",
    "orchestrator.min-reward-std": "0",
    "orchestrator.pool-timeout-s": "120",
    "orchestrator.stall-timeout-s": "300",
    "environments.0.deadline-s": "300",
    "trainer.rows-timeout-s": "120",
    "trainer.parallel.timeout-s": "180",
    "environments.0.age-out": "hold",
    "environments.0.max-new-tokens": "12",
    "launcher.restart": "on_failure",
    "launcher.restart-budget": "1000",
    # Killed once a minute, in turn, no service would have died a minute before.
    "launcher.max-backoff-s": "0.5",
    "runner.environment-timeout-s": "240",
    "trainer.checkpoint.interval-steps": str(CHECKPOINT_STEPS),
    "run.seed": "0",
}
OFFLOADING = {
    "launcher.start-timeout-s": "400",
    "orchestrator.pool-timeout-s": "300",
    "model.max-context-tokens": "192",
    "decode.engine.type": "vllm",
    "decode.engine.block-size-tokens": "32",
    "decode.engine.block-count": "16",
    "decode.engine.max-running-samples": "2",
    "decode.engine.offload.memory-bytes": str(16 << 20),
    "decode.engine.offload.disk-bytes": str(64 << 20),
}
"""Blocks are so few that prompts go to host memory and disk, where a process that is started again finds them."""
PADDING = 96
"""Characters that fill whole blocks of a prompt, alike in every fourth one."""
VARIANTS = 4
"""So many prefixes do not fit the pool together, so that each is looked for in the tiers when it comes again."""


@dataclass(frozen=True)
class Shape:
    """Of one run."""

    runners: int = 1
    ranks: int = 1
    """Processes of the trainer."""
    offload: bool = False
    """One decode worker with vLLM, whose KV goes to host memory and disk; otherwise both pools, embedded engines."""

    @property
    def arguments(self) -> dict[str, str]:
        """Of the run."""
        counts = {"runner.replicas": str(self.runners), "trainer.nproc": str(self.ranks)}
        if self.offload:
            pools = {"prefill.replicas": "0", "decode.replicas": "1", "decode.engine.offload.directory": "kv"}
            return {**BASE, **OFFLOADING, **counts, **pools}
        return {**BASE, **counts, "decode.replicas": "2"}

    @property
    def options(self) -> str:
        """Of its environment."""
        shared = f"padding = {PADDING}\nvariants = {VARIANTS}" if self.offload else ""
        return f"sandbox_s = 0.02\n{shared}"

    @property
    def targets(self) -> tuple[str, ...]:
        """What is killed, in turn, in an order drawn from the seed."""
        workers = ("decode-1",) if self.offload else ("prefill-1", "decode-1", "decode-2")
        runners = (f"runner-{number}" for number in range(1, self.runners + 1))
        ranks = (f"trainer-{rank}" for rank in range(1, self.ranks))
        return (*SINGLE, *workers, *runners, "trainer", *ranks)
