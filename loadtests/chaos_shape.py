"""What a run that is to be killed consists of: how many runners and ranks, on which engine."""

from __future__ import annotations

from dataclasses import dataclass

SINGLE = ("orchestrator", "router", "broadcaster", "sandbox", "valkey")
"""Services of which there is one, whatever the shape."""
CHECKPOINT_STEPS = 4
BASE = {
    "prefill.replicas": "1",
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
    "model.max-context-tokens": "224",
    "decode.replicas": "1",
    # Short prompts are computed where they are decoded, long ones are sent there, unless most of it is there already.
    "router.remote-prefill-min-uncached-tokens": "144",
    **{
        f"{pool}.engine.{key}": value
        for pool in ("prefill", "decode")
        for key, value in {
            "type": "vllm",
            "connector": "nixl",
            "block-size-tokens": "32",
            "block-count": "16",
            "max-running-samples": "2",
            "offload.directory": "kv",
            "offload.memory-bytes": str(16 << 20),
            "offload.disk-bytes": str(64 << 20),
        }.items()
    },
}
"""Blocks are so few that prompts go to host memory and disk, where a process that is started again finds them."""
PADDING = (96, 160, 96, 160)
"""Characters that fill whole blocks of a prompt, alike in every fourth one.

So many prefixes do not fit a pool together, so that each is looked for in the tiers when it comes again.
"""


@dataclass(frozen=True)
class Shape:
    """Of one run."""

    runners: int = 1
    ranks: int = 1
    """Processes of the trainer."""
    offload: bool = False
    """Both pools with vLLM, NIXL between them, and their KV in host memory and on disk; otherwise embedded engines."""

    @property
    def arguments(self) -> dict[str, str]:
        """Of the run."""
        counts = {"runner.replicas": str(self.runners), "trainer.nproc": str(self.ranks)}
        if self.offload:
            return {**BASE, **OFFLOADING, **counts}
        return {**BASE, **counts, "decode.replicas": "2"}

    @property
    def options(self) -> str:
        """Of its environment."""
        shared = f"padding = {list(PADDING)}" if self.offload else ""
        return f"sandbox_s = 0.02\n{shared}"

    @property
    def targets(self) -> tuple[str, ...]:
        """What is killed, in turn, in an order drawn from the seed."""
        workers = ("prefill-1", "decode-1") if self.offload else ("prefill-1", "decode-1", "decode-2")
        runners = (f"runner-{number}" for number in range(1, self.runners + 1))
        ranks = (f"trainer-{rank}" for rank in range(1, self.ranks))
        return (*SINGLE, *workers, *runners, "trainer", *ranks)
