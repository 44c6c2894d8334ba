"""The one file that a run is started from. Imports no torch.

    slipstream rl @ examples/demo.toml --trainer.optim.lr 1e-3 --dry-run

Each service's section is that service's own configuration without what the launcher fills in: addresses,
paths, the token, and values that several services must agree on, which have a section of their own here.
"""

from __future__ import annotations

from collections.abc import Set
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, create_model, field_validator

from slipstream.broadcaster.config import BroadcasterConfig
from slipstream.common.config import BaseConfig, ServiceConfig, TlsConfig, TracingConfig
from slipstream.decode.config import DecodeConfig
from slipstream.environments.config import EnvironmentConfig
from slipstream.gateway.config import GatewayConfig
from slipstream.orchestrator.config import OrchestratorConfig
from slipstream.orchestrator.evaluation_config import EvaluationConfig
from slipstream.prefill.config import PrefillConfig
from slipstream.router.config import RouterConfig
from slipstream.runner.config import RunnerConfig
from slipstream.sandbox.config import SandboxConfig
from slipstream.teacher.config import TeacherConfig
from slipstream.trainer.config import ModelConfig, SftConfig, TrainerConfig
from slipstream.trainer.optim_config import OptimConfig
from slipstream.weights.config import WeightsConfig

SERVICES: dict[str, type[ServiceConfig]] = {
    "orchestrator": OrchestratorConfig,
    "broadcaster": BroadcasterConfig,
    "router": RouterConfig,
    "sandbox": SandboxConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "runner": RunnerConfig,
    "trainer": TrainerConfig,
    "gateway": GatewayConfig,
    "teacher": TeacherConfig,
}
"""Every service of a run, in the order in which they are started."""

REPLICATED = {"prefill": 1, "decode": 2, "runner": 1, "teacher": 0}
"""Services that can run several times, and how often they do unless told."""

OF_PREFILL = (
    "Processes of this service. 0: decode workers compute the prompts themselves; the rest of [prefill] is for nothing."
)

OPTIONAL = {
    "sandbox": (True, "Run it. false is for environments that run no programs, where its jail cannot be had."),
    "gateway": (False, "Run it: outside agents then drive sessions, whose trajectories train."),
}
"""Services that can be left out, and whether they run unless told."""

OF_TEACHER = "Processes of this service, which then judge in place of the trainer where the loss distils. 0: none."

GROUPED = frozenset({"prefill", "decode"})
"""Services of which several processes can be the ranks of one data-parallel group."""
OF_GROUPS = "Ranks of a data-parallel group, a process each; replicas then counts groups."

ON_CARDS = ("trainer", "prefill", "decode", "teacher")
"""Services whose processes compute on cards of their own."""
Card = Annotated[int, Field(ge=0, le=1023)]
OF_DEVICES = (
    "Cards of this machine that it computes on, from 0, shared out among its processes in their order. Empty: what "
    "CUDA picks, the first one for all."
)

FILLED = frozenset(
    {
        *ServiceConfig.model_fields,
        *SERVICES,  # a field called after a service takes its address
        *(f"{service}_address" for service in SERVICES),
        *("prefill_workers", "decode_workers", "workers", "group", "environments", "model", "sft", "model_dir"),
        *("evaluate_before", "evaluate_after", "evaluate_every_steps", "evaluate_only", "evaluation"),
        *("block_size_tokens", "gateway_url", "weights"),
        *("teacher_workers", "teacher_pool", "teacher_model", "teacher_architecture"),
    }
)
"""Fields of services that the launcher fills in; no section of a service has them."""


class RunSection(BaseConfig):
    """The run as a whole."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)
    """Name of its directory; a number is added when it is taken."""

    directory: Path = Path("runs")
    """Where run directories are made."""

    seed: int = Field(default=0, ge=0)
    """Seed of everything random."""


class LauncherSection(BaseConfig):
    """How the processes are kept."""

    restart: Literal["never", "on_failure"] = "never"
    """What the death of a service means: the end of the run, or a restart. Valkey always restarts, and the trainer
    where it writes checkpoints (`trainer.checkpoint`). A service that exits with code 2, as what it was given cannot be
    used, ends the run."""

    restart_budget: int = Field(default=5, ge=0)
    """Restarts of one service before the run ends after all."""

    max_backoff_s: float = Field(default=10.0, gt=0)
    """Longest pause before a restart: it begins at half a second, and doubles with each death of a service that did not
    run for a minute."""

    start_timeout_s: float = Field(default=180.0, gt=0)
    """Time until every service answers health checks; then the run ends."""

    stop_timeout_s: float = Field(default=20.0, ge=1.0)
    """Time in which everything ends: what has not drained after 70 % of it is killed."""

    check_memory: bool = True
    """Refuse to start a run that needs more memory than is available."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Level of every service's log."""

    log_limit_bytes: int = Field(default=64 * 2**20, ge=4096)
    """Size at which a service's log, or what it printed, becomes `<name>.1` and a new file is begun."""

    log_kept_files: int = Field(default=2, ge=0, le=100)
    """Older logs of a service that are kept; of what it printed, one at most."""

    metrics: bool = True
    """Serve Prometheus metrics of every service, each on a loopback port of its own."""


class EvaluationSection(EvaluationConfig):
    """Held-out problems, asked through the same router, prefill and decode workers."""

    before: bool = True
    """Ask before the first training step."""

    after: bool = True
    """Ask after the last training step."""

    every_steps: int = Field(default=0, ge=0)
    """Ask while training goes on, too, every so many steps: some answers then cross an update. 0: never."""


class _Made(BaseConfig):
    """Base of classes made at run time: they have no source in which pydantic could look for docstrings."""

    model_config = ConfigDict(use_attribute_docstrings=False)


def _section(service: str, config_class: type[ServiceConfig]) -> type[BaseConfig]:
    """A service's configuration without what is filled in."""
    fields = _fields_of(config_class, FILLED)
    if service == "trainer":  # its decay ends where the run ends
        optim = create_model("OptimSection", __base__=_Made, **_fields_of(OptimConfig, {"total_steps"}))
        fields["optim"] = (optim, optim())
    if service in OPTIONAL:
        enabled, what = OPTIONAL[service]
        fields["enabled"] = (bool, Field(default=enabled, description=what))
    if service in REPLICATED:
        least, what = {"prefill": (0, OF_PREFILL), "teacher": (0, OF_TEACHER)}.get(
            service, (1, "Processes of this service.")
        )
        replicas = Field(default=REPLICATED[service], ge=least, le=64, description=what)
        fields["replicas"] = (int, replicas)
    if service in GROUPED:
        fields["data_parallel_size"] = (int, Field(default=1, ge=1, le=64, description=OF_GROUPS))
    if service in ON_CARDS:
        fields["devices"] = (list[Card], Field(default_factory=list[int], max_length=1024, description=OF_DEVICES))
    return create_model(f"{service.capitalize()}Section", __base__=_Made, __doc__=config_class.__doc__, **fields)


def _fields_of(config_class: type[BaseConfig], left_out: Set[str]) -> dict[str, Any]:
    return {
        name: (field.annotation, deepcopy(field))
        for name, field in config_class.model_fields.items()
        if name not in left_out
    }


class RunConfig(BaseConfig):
    """Everything that a run is made from."""

    run: RunSection = RunSection()
    launcher: LauncherSection = LauncherSection()
    model: ModelConfig = ModelConfig()
    sft: SftConfig = SftConfig()
    weights: WeightsConfig = WeightsConfig()
    evaluation: EvaluationSection = EvaluationSection()
    tls: TlsConfig = TlsConfig()
    tracing: TracingConfig = TracingConfig()

    environments: list[EnvironmentConfig] = Field(min_length=1)
    """The mixture of tasks. Accuracy before and after, without a name, speaks of the first."""

    @field_validator("tls")
    @classmethod
    def _absolute(cls, tls: TlsConfig) -> TlsConfig:
        """The run's own copy is read wherever `slipstream status` is typed."""
        return TlsConfig(**{name: path and path.absolute() for name, path in tls})

    def section(self, service: str) -> BaseConfig:
        return getattr(self, service)

    def replicas(self, service: str) -> int:
        if not getattr(self.section(service), "enabled", True):
            return 0
        return getattr(self.section(service), "replicas", 1)

    def pools_with(self, engine: str) -> list[str]:
        """The pools of workers that run this engine."""
        sections: dict[str, Any] = {pool: self.section(pool) for pool in ("prefill", "decode")}
        return [pool for pool, each in sections.items() if each.replicas and each.engine.type == engine]

    def data_parallel_size(self, service: str) -> int:
        """Ranks of each data-parallel group of a pool: as its section says, or its engine's."""
        section = self.section(service)
        parallel = getattr(getattr(section, "engine", None), "parallel", None)
        return max(getattr(section, "data_parallel_size", 1), getattr(parallel, "data_parallel_size", 1))


class _MadeRunConfig(RunConfig, _Made):
    pass


def _run_config() -> type[RunConfig]:
    sections: dict[str, Any] = {}
    for service, config_class in SERVICES.items():
        section = _section(service, config_class)
        sections[service] = (section, section())
    return create_model("RunConfig", __base__=_MadeRunConfig, __doc__=RunConfig.__doc__, **sections)


RUN_CONFIG = _run_config()
"""The same with a section for each service. These only exist at run time, hence `section`."""
