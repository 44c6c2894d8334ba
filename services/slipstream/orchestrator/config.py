"""Configuration of the orchestrator."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from slipstream.common.config import BaseConfig, ServiceConfig
from slipstream.environments.config_base import SequencedConfig
from slipstream.orchestrator.advantage_config import AdvantageConfig, GroupNormalizedConfig
from slipstream.orchestrator.evaluation_config import EvaluationConfig
from slipstream.orchestrator.tracking.config import AnyTracker


class EnvironmentConfig(SequencedConfig):
    """One environment of the training mixture."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """Its configured name, as the runner knows it."""

    stop_token_ids: list[int] = Field(default_factory=list)
    """Tokens that end a sample. Empty leaves the choice to the runner, which knows the tokenizer."""


SESSION, PROMPT = "session", "prompt"
"""What groups of sessions, and third parties' prompts of their own, are counted under: they are of no environment."""


class WorkerConfig(BaseConfig):
    """One inference worker that the version keeper looks after."""

    replica: str
    """Its name in the run."""

    role: Literal["prefill", "decode"]
    """Its pool."""

    address: str
    """host:port of its WorkerService."""


class KeeperConfig(BaseConfig):
    """How weights reach the workers."""

    poll_interval_s: float = Field(default=1.0, gt=0)
    """How often each worker is asked what it serves."""

    away_after_s: float = Field(default=4.0, gt=0)
    """A worker that does not answer for this long is away and no longer holds the serving version back."""

    begin_timeout_s: float = Field(default=60.0, gt=0)
    """Time to fetch and verify one version."""

    apply_timeout_s: float = Field(default=20.0, gt=0)
    """Time to swap and check one version."""

    cancel_ack_timeout_s: float = Field(default=2.0, ge=0)
    """How long an update waits until the engines have dropped what was cancelled before it."""

    refit_backoff_s: float = Field(default=0.5, gt=0)
    """Pause before a failed update is tried again; doubles up to 10 s."""


class DiskConfig(BaseConfig):
    """When a disk counts as full."""

    min_free_bytes: int = Field(default=256 * 2**20, ge=0)
    """Below this many free bytes in the run directory the run pauses; it goes on at a quarter more. 0 waits for the
    first write that finds no room."""

    check_interval_s: float = Field(default=0.5, gt=0)
    """How often the free bytes are looked at."""


class SessionsConfig(BaseConfig):
    """Sessions that outside agents drive through the gateway."""

    max_open: int = Field(default=256, ge=1, le=65536)
    """Sessions that may be open, or wait for a slot, at once."""

    kept_ended: int = Field(default=1000, ge=1)
    """Sessions that have ended and are still shown; the oldest are forgotten."""

    idle_timeout_s: float = Field(default=600.0, gt=0, le=86400)
    """A session ends when nothing is asked of it for this long, unless it was opened with another time."""

    total_timeout_s: float = Field(default=3600.0, gt=0, le=86400)
    """A session ends this long after its group was dispatched, unless it was opened with another time."""

    only: bool = False
    """Train on sessions alone: no task of the environments is run for training."""


class BreakerConfig(BaseConfig):
    """When an environment that only fails is backed off, and how far."""

    open_after_failures: int = Field(default=16, ge=1)
    """Groups of one environment that fail in a row before it is backed off: then single groups try it now and then,
    and other environments go on. A sandbox that is away backs its environments off at once."""

    first_pause_s: float = Field(default=1.0, gt=0)
    """Time to the first try; doubles with each one that fails."""

    max_pause_s: float = Field(default=15.0, gt=0)
    """Longest time between tries."""


class ConcurrencyConfig(BaseConfig):
    """How many rollouts may be in flight; within the bounds it is found out."""

    enabled: bool = True
    """Follow what the engines hold, what waits for them and what fails. Otherwise only the staleness bound and the
    runners' slots limit what is in flight."""

    min_rollouts: int = Field(default=32, ge=1)
    """It never falls below; a group more may always run."""

    max_rollouts: int = Field(default=16384, ge=1)
    """It never rises above."""


class OrchestratorConfig(ServiceConfig):
    """The sequencer of a run: what is run, in which order, and which weights it is trained into."""

    total_steps: int = Field(default=170, ge=1)
    """Optimizer steps of the run."""

    total_positions: int | None = Field(default=None, ge=1)
    """Groups of the run, counted where they begin: the run also ends once so many have ended, trained or not, and its
    last step takes what is left. Unset: it ends with total_steps alone."""

    groups_per_step: int = Field(default=32, ge=1)
    """Groups one optimizer step trains on."""

    samples_per_group: int = Field(default=8, ge=2)
    """Rollouts of one task."""

    min_group_size: int = Field(default=2, ge=2)
    """A group that lost members is trained on if at least this many are left."""

    max_off_policy_steps: int = Field(default=2, ge=0)
    """Versions a group may lag the step that trains on it. 0 is synchronous."""

    over_sampling: float = Field(default=1.0, ge=1.0, le=8.0)
    """Multiplies groups_per_step in the admission bound only; the surplus of a step ages out."""

    step_quotas: bool = True
    """Compose each step of the environments by their weights, as long as that stalls nothing."""

    quota_patience_groups: int | None = Field(default=None, ge=0)
    """Groups ready beyond a step's at which its quotas yield. Unset means half of groups_per_step."""

    max_ready_groups: int | None = Field(default=None, ge=1)
    """Groups ready for training at which no new one is started; taken as a step's groups, with the quotas' patience, if
    less. Lets max_off_policy_steps cover the slowest groups while the others do not age in a queue. Unset means that
    max_off_policy_steps alone decides."""

    min_reward_std: float = Field(default=1e-6, ge=0)
    """Groups whose rewards spread less teach nothing and are filtered. 0 trains every group."""

    advantage: AdvantageConfig = GroupNormalizedConfig()

    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Tokens of one micro-batch at most; a longer sequence gets one of its own."""

    data_ranks: int = Field(default=1, ge=1)
    """Trainer ranks that share a step."""

    evaluate_before: bool = True
    """Ask the held-out tasks before the first step."""

    evaluate_every_steps: int = Field(default=0, ge=0)
    """Ask them also while training goes on, every so many steps. 0: never."""

    evaluate_after: bool = True
    """Ask the held-out tasks after the last step."""

    evaluate_only: bool = False
    """Ask the held-out tasks of the first version served, train nothing, and end."""

    evaluation: EvaluationConfig = EvaluationConfig()

    kv_dtype: str = "float32"
    """Element type of the engines' KV cache: part of the salt."""

    environments: list[EnvironmentConfig] = Field(min_length=1)
    """The training mixture."""

    workers: list[WorkerConfig] = Field(min_length=1)
    """All inference workers, of both pools."""

    broadcaster: str
    """host:port of the broadcaster."""

    gateway_url: str = ""
    """What sessions are told as an OpenAI client's base URL; empty when there is no gateway."""

    sessions: SessionsConfig = SessionsConfig()
    keeper: KeeperConfig = KeeperConfig()
    disk: DiskConfig = DiskConfig()
    breaker: BreakerConfig = BreakerConfig()
    concurrency: ConcurrencyConfig = ConcurrencyConfig()

    tracking: list[AnyTracker] = Field(default_factory=list[AnyTracker])
    """Experiment trackers that get the figures of steps and evaluations, too. A flag with a type adds one:
    `--orchestrator.tracking wandb`."""

    metrics_limit_bytes: int = Field(default=512 * 2**20, ge=4096)
    """Bytes of metrics.jsonl and the older file that it becomes; that one goes when they are reached."""

    journal_limit_bytes: int = Field(default=2 * 2**30, ge=2**16)
    """Bytes of the journal, beyond which its oldest segments go once all their positions have ended."""

    journal_buffer_bytes: int = Field(default=64 * 2**20, ge=2**16)
    """Records that wait in memory while the disk is full; beyond, runners keep their reports, and third
    parties are refused."""

    runner_lease_ttl_s: float = Field(default=10.0, gt=0.5)
    """A runner that is silent for this long loses its groups to others."""

    start_timeout_s: float = Field(default=240.0, gt=0)
    """Time from start to the first served version, warm-up included; then the run fails."""

    pool_timeout_s: float = Field(default=20.0, gt=0)
    """A pool without a routable worker, or a run without a runner, for this long ends the run."""

    stall_timeout_s: float | None = Field(default=None, gt=0)
    """Training or an evaluation that makes no progress for this long ends the run. Unset takes twice the longest
    `deadline_s` of an environment: a run must not end while it waits for a group that has time left."""

    max_skipped_steps: int = Field(default=3, ge=1)
    """Steps in a row whose loss or gradient is not finite, or of which nothing is known, before the run ends."""

    failing_environment_timeout_s: float = Field(default=60.0, gt=0)
    """An environment that only fails for this long ends the run; before, it is backed off (`breaker`)."""

    max_external_rollouts: int = Field(default=256, ge=1)
    """Groups of third parties that may wait or run at once."""

    kept_external_rollouts: int = Field(default=1000, ge=1)
    """Ended groups of third parties that GetRollout and ListRollouts still show; the oldest are forgotten."""

    kept_external_bytes: int = Field(default=64 * 2**20, ge=1)
    """Bytes of ended groups of third parties that are kept; the newest one always is."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [environment.name for environment in self.environments]
        if len(set(names)) != len(names):
            raise ValueError("environments: names must differ")
        if reserved := {SESSION, PROMPT} & set(names):
            raise ValueError(f"environments: {min(reserved)!r} is the name of groups that are of no environment")
        if self.min_group_size > self.samples_per_group:
            raise ValueError("min_group_size: must not exceed samples_per_group")
        kinds = [tracker.type for tracker in self.tracking]
        if len(set(kinds)) != len(kinds):
            raise ValueError("tracking: one of each type at most")
        if not any(worker.role == "decode" for worker in self.workers):
            raise ValueError("workers: at least one of role decode is needed")
        return self

    @property
    def longest_stall_s(self) -> float:
        """`stall_timeout_s`, or what it is when unset."""
        longest_s = max(environment.deadline_s for environment in self.environments)
        return 2 * longest_s if self.stall_timeout_s is None else self.stall_timeout_s

    @property
    def shares(self) -> dict[str, float]:
        """Part of each environment in the mixture."""
        total = sum(environment.weight for environment in self.environments)
        return {environment.name: environment.weight / total for environment in self.environments}

    @property
    def quotas(self) -> dict[str, int]:
        """Groups of each environment in a step: largest remainders, so that they add up."""
        if not self.step_quotas or len(self.environments) == 1:
            return {}
        shares = {name: self.groups_per_step * share for name, share in self.shares.items()}
        quotas = {name: int(share) for name, share in shares.items()}
        rest = self.groups_per_step - sum(quotas.values())
        for name in sorted(shares, key=lambda name: quotas[name] - shares[name])[:rest]:
            quotas[name] += 1
        return quotas
