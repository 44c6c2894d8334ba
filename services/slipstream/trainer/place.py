"""Which rank this process is, where torchrun started it."""

from __future__ import annotations

from typing import Any, TypeVar

from slipstream.common.config import ENVIRONMENT
from slipstream.trainer.chat.config import ChatConfig
from slipstream.trainer.config import RankConfig, TrainerConfig

Config = TypeVar("Config", TrainerConfig, ChatConfig)


def placed(config: Config) -> Config:
    """The configuration of this rank: as it is, or, of one file for all, with what differs between them.

    torchrun's ranks of one machine listen at one port after another, and so do their metrics.
    """
    if "TORCHELASTIC_RUN_ID" not in ENVIRONMENT or config.group.rank_count > 1:
        return config
    rank, local = int(ENVIRONMENT["RANK"]), int(ENVIRONMENT["LOCAL_RANK"])
    group = RankConfig(rank=rank, rank_count=int(ENVIRONMENT["WORLD_SIZE"]), local_rank=local, rendezvous="env://")
    changed: dict[str, Any] = {
        "group": group.model_dump(),
        "replica": f"{config.replica or 'trainer'}-{rank}" if rank else config.replica,
        "listen": _beside(config.listen, local),
        "metrics": _beside(config.metrics, local),
    }
    if config.log.file is not None and rank:
        changed["log"] = {
            **config.log.model_dump(),
            "file": config.log.file.with_stem(f"{config.log.file.stem}-{rank}"),
        }
    return type(config).model_validate({**config.model_dump(exclude_unset=True), **changed})


def _beside(section: Any, local: int) -> dict[str, Any]:
    """The same, so many ports further on; a port that is chosen by the system, or none, stays."""
    values = section.model_dump()
    return {**values, "port": values["port"] + local} if values.get("port") else values
