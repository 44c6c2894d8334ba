"""From the one configuration of a run to one for each process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from slipstream.common.config import ConfigError, MetricsConfig, ServiceConfig
from slipstream.common.config_errors import Origins, explain
from slipstream.engine.vllm.config import VllmConfig
from slipstream.launcher.combinations import check_combinations
from slipstream.launcher.config import FILLED, GROUPED, REPLICATED, SERVICES, RunConfig
from slipstream.launcher.ports import LOOPBACK, port_of
from slipstream.launcher.rundir import RunDir
from slipstream.launcher.services import service_of
from slipstream.orchestrator.evaluation_config import EvaluationConfig
from slipstream.trainer.loss_config import DistillationLossConfig

ANYWHERE = "0.0.0.0"
MAX_DRAIN_S = 5.0
RENDEZVOUS_OFFSET = 1000
DRAIN_FRACTION = 0.25
"""Part of the stop timeout that a service may drain for; it is killed some seconds later."""


def replicas_of(config: RunConfig) -> list[str]:
    """Names of all services' processes: `router`, but `decode-1` where there can be several, `decode-1-0` in groups."""
    names: list[str] = []
    for service in SERVICES:
        count, ranks = config.replicas(service), config.data_parallel_size(service)
        if service == "trainer":
            names += [service, *(f"{service}-{rank}" for rank in range(1, trainer_ranks(config)))]
        elif ranks > 1:
            names += [f"{service}-{n}-{rank}" for n in range(1, count + 1) for rank in range(ranks)]
        else:
            names += [f"{service}-{n}" for n in range(1, count + 1)] if service in REPLICATED else [service] * count
    return names


def trainer_ranks(config: RunConfig) -> int:
    """Processes of the trainer: rank 0 is called `trainer`, the others `trainer-1` and so on."""
    return _setting(config, "trainer", "nproc")


def rendezvous_of(config: RunConfig) -> list[str]:
    """What takes a port beside its services' own: groups whose ranks find each other there, and the gateway's HTTP."""
    trainers = ["trainer"] if trainer_ranks(config) > 1 else []
    http = ["gateway"] if config.replicas("gateway") and not _setting(config, "gateway", "http_port") else []
    return (
        trainers
        + http
        + [
            f"{service}-{n}"
            for service in sorted(GROUPED)
            if config.data_parallel_size(service) > 1 and isinstance(_setting(config, service, "engine"), VllmConfig)
            for n in range(1, config.replicas(service) + 1)
        ]
    )


def group_of(replica: str) -> tuple[str, int] | None:
    """Group and rank of `decode-1-0`; None for `decode-1`."""
    group_id, _, rank = replica.rpartition("-")
    return (group_id, int(rank)) if group_id.partition("-")[2] else None


def resolve(
    config: RunConfig,
    run: RunDir,
    endpoints: Mapping[str, str],
    *,
    redis_url: str,
    metrics: Mapping[str, str] | None = None,
    origins: Origins | None = None,
    elsewhere: bool = False,
    rendezvous: Mapping[str, str] | None = None,
) -> dict[str, ServiceConfig]:
    """The configuration of each process. Raises `ConfigError` for what does not fit together.

    `rendezvous`: addresses of `rendezvous_of`; left out, at the port of rank 0, or of the gateway, and 1000.
    `elsewhere`: each on a host of its own, on whose every address it listens, and whoever starts it takes its log.
    """
    shared = _shared_values(config, run, endpoints)
    http = _http_address(config, endpoints, (rendezvous or {}).get("gateway"))
    if http:
        shared["gateway_url"] = f"{'https' if elsewhere else 'http'}://{http}/v1"
    origins = origins or Origins()
    groups = _groups(endpoints, rendezvous or {}) | _trainer_groups(endpoints, rendezvous or {})
    configs = {
        replica: _resolve_one(
            config, run, replica, address, {**shared, **groups.get(replica, {})}, redis_url, origins, elsewhere, http
        )
        for replica, address in endpoints.items()
    }
    for replica, address in (metrics or {}).items():
        configs[replica] = configs[replica].model_copy(
            update={"metrics": MetricsConfig(host=LOOPBACK, port=port_of(address))}
        )
    return configs


def check(config: RunConfig, origins: Origins | None = None) -> None:
    """Resolve with made-up addresses, so that what is wrong is said before anything is made."""
    origins = origins or Origins()
    check_combinations(config, origins)
    endpoints = {replica: f"{LOOPBACK}:{port}" for port, replica in enumerate(replicas_of(config), start=1)}
    resolve(config, RunDir(Path(config.run.name)), endpoints, redis_url="redis://localhost", origins=origins)


def _resolve_one(
    config: RunConfig,
    run: RunDir,
    replica: str,
    address: str,
    shared: Mapping[str, Any],
    redis_url: str,
    origins: Origins,
    elsewhere: bool,
    http: str,
) -> ServiceConfig:
    service = service_of(replica)
    config_class = SERVICES[service]
    values = {name: value for name, value in shared.items() if name in config_class.model_fields}
    values |= config.section(service).model_dump(
        exclude_unset=True, exclude={"replicas", "data_parallel_size", "enabled", "devices"}
    )
    if isinstance(_setting(config, service, "engine") if service in GROUPED else None, VllmConfig):
        parallel = values["engine"].setdefault("parallel", {})
        parallel["data_parallel_size"] = config.data_parallel_size(service)
    values |= {
        "run_id": run.run_id,
        "run_dir": run.path,
        "replica": replica,
        "listen": _listen(address, elsewhere),
        "auth": {"token_file": run.token_file},
        "tls": config.tls,
        "tracing": config.tracing,
        "log": {
            "level": config.launcher.log_level,
            "file": None if elsewhere else run.log_file(replica),
            "limit_bytes": config.launcher.log_limit_bytes,
            "kept_files": config.launcher.log_kept_files,
        },
        "redis": {"url": redis_url},
        "drain_timeout_s": min(MAX_DRAIN_S, DRAIN_FRACTION * config.launcher.stop_timeout_s),
        "seed": config.run.seed,
    }
    if service == "orchestrator":
        values["data_ranks"] = _data_ranks(config)
        values["environments"] = [environment.sequenced() for environment in config.environments]
    if service == "gateway":
        values["http_port"] = port_of(http)
        if elsewhere:
            values["http_host"] = ANYWHERE
    if service == "trainer":
        values["optim"] = {**values.get("optim", {}), "total_steps": _setting(config, "orchestrator", "total_steps")}
    try:
        return config_class.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(config_class, error, origins, service)) from None


def _http_address(config: RunConfig, endpoints: Mapping[str, str], taken: str | None) -> str:
    """Where agents reach the gateway, host:port; empty without one."""
    if "gateway" not in endpoints:
        return ""
    host, _, port = endpoints["gateway"].rpartition(":")
    chosen = _setting(config, "gateway", "http_port") or (port_of(taken) if taken else int(port) + RENDEZVOUS_OFFSET)
    return f"{host}:{chosen}"


def _groups(endpoints: Mapping[str, str], rendezvous: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """What each rank of a data-parallel group is told of it."""
    places = {replica: place for replica in endpoints if (place := group_of(replica)) is not None}
    addresses: dict[str, list[str]] = {}
    for replica, (group_id, _) in sorted(places.items(), key=lambda item: item[1]):
        addresses.setdefault(group_id, []).append(endpoints[replica])
    told = {}
    for replica, (group_id, rank) in places.items():
        leader = addresses[group_id][0]
        meeting = rendezvous.get(group_id) or f"{leader.rpartition(':')[0]}:{port_of(leader) + RENDEZVOUS_OFFSET}"
        group = {"group_id": group_id, "rank": rank, "addresses": addresses[group_id], "rendezvous": meeting}
        told[replica] = {"group": group}
    return told


def _trainer_groups(endpoints: Mapping[str, str], rendezvous: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """What each rank of the trainer is told of the others."""
    ranks = [replica for replica in endpoints if service_of(replica) == "trainer"]
    if len(ranks) == 1:
        return {}
    first = endpoints[ranks[0]]
    meeting = rendezvous.get("trainer") or f"{first.rpartition(':')[0]}:{port_of(first) + RENDEZVOUS_OFFSET}"
    group = {"rank_count": len(ranks), "rendezvous": f"tcp://{meeting}"}
    return {replica: {"group": {"rank": rank, **group}} for rank, replica in enumerate(ranks)}


def _listen(address: str, elsewhere: bool) -> dict[str, Any]:
    if elsewhere:
        return {"host": ANYWHERE, "port": port_of(address), "advertise": address}
    return {"host": LOOPBACK, "port": port_of(address)}


def _shared_values(config: RunConfig, run: RunDir, endpoints: Mapping[str, str]) -> dict[str, Any]:
    """Fields that mean the same in every service that has them."""
    pools = {
        role: [{"replica": name, "address": address} for name, address in endpoints.items() if service_of(name) == role]
        for role in ("prefill", "decode")
    }
    addresses = {replica: address for replica, address in endpoints.items() if replica in FILLED}
    return {
        **addresses,
        **{f"{service}_address": address for service, address in addresses.items()},
        "workers": [{**worker, "role": role} for role, pool in pools.items() for worker in pool],
        **{f"{role}_workers": pool for role, pool in pools.items()},
        "environments": [environment.model_dump(exclude_none=True) for environment in config.environments],
        "model": config.model.model_dump(exclude_unset=True),
        "sft": config.sft.model_dump(exclude_unset=True),
        "weights": config.weights.model_dump(exclude_unset=True),
        "model_dir": run.path / "model",
        **_teacher_values(config, endpoints),
        "block_size_tokens": _setting(config, "decode", "engine").block_size_tokens,
        "evaluate_before": config.evaluation.before,
        "evaluate_after": config.evaluation.after,
        "evaluate_every_steps": config.evaluation.every_steps,
        "evaluation": config.evaluation.model_dump(include=set(EvaluationConfig.model_fields)),
    }


def _teacher_values(config: RunConfig, endpoints: Mapping[str, str]) -> dict[str, Any]:
    """Who judges what is sampled, where the loss distils."""
    pool = [
        {"replica": name, "address": address} for name, address in endpoints.items() if service_of(name) == "teacher"
    ]
    loss = _setting(config, "trainer", "loss")
    named = {"teacher_model": loss.teacher.absolute()} if isinstance(loss, DistillationLossConfig) else {}
    architecture = config.model.architecture
    return {
        "teacher_workers": pool,
        "teacher_pool": config.replicas("teacher") > 0,
        "teacher_architecture": architecture,
        **named,
    }


def _data_ranks(config: RunConfig) -> int:
    """Ranks of the trainer with micro-batches of their own. Raises `ConfigError`."""
    try:
        return _setting(config, "trainer", "parallel").layout(trainer_ranks(config)).data
    except ValueError as error:
        raise ConfigError(f"trainer.parallel: {error}; trainer.nproc is {trainer_ranks(config)}") from None


def _setting(config: RunConfig, service: str, name: str) -> Any:
    return getattr(config.section(service), name)
