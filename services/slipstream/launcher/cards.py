"""Which cards each process sees. Imports no torch.

    [trainer]
    devices = [0]
    [decode]
    devices = [1]

A process computes on the first of the cards that it sees (ranks of one group on the first ones, each on its own), so
its own come first. Those of the others come after them: weights and KV go from card to card only between processes that
see both. With the lines above `CUDA_VISIBLE_DEVICES` is `0,1` for the trainer and `1,0` for decode workers.

A pool's cards are shared out among its workers in their order: as many for each, or as many workers on each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slipstream.common.config import ENVIRONMENT, ConfigError
from slipstream.launcher.config import ON_CARDS, RunConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER=PCI_BUS_ID"
"""Cards by their places in the machine, as nvidia-smi counts them, not by their speed."""


def variables_of(config: RunConfig, replica: str) -> tuple[str, ...]:
    """What the environment of a process says of cards, `NAME=VALUE` each; nothing where no section names any.

    Raises `ConfigError` for a card that the launcher does not see itself.
    """
    named = dict.fromkeys(card for service in ON_CARDS for card in devices_of(config, service))
    service, _, number = replica.partition("-")
    if service not in ON_CARDS or not devices_of(config, service):
        return ()
    own = cards_of(config, service, 0 if service == "trainer" else int(number.partition("-")[0]) - 1)
    return (ORDER, f"{VISIBLE}={','.join(_seen([*own, *(card for card in named if card not in own)]))}")


def cards_of(config: RunConfig, service: str, index: int) -> list[int]:
    """Cards of the trainer, all its ranks together, or of the worker or group of workers with this number, from 0."""
    cards, count = devices_of(config, service), _holders(config, service)
    each = len(cards) // count
    return cards[index * each : (index + 1) * each] if each else [cards[index * len(cards) // count]]


def problems(config: RunConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """Settings that cannot be, as `combinations.py` has them."""
    for service in ON_CARDS:
        cards, count = devices_of(config, service), _holders(config, service)
        if not cards or not count:
            continue
        keys = f"{service}.devices", f"{service}.{'nproc' if service == 'trainer' else 'replicas'}"
        if len(set(cards)) < len(cards):
            yield keys, f"is {cards}, which names a card twice"
        elif len(cards) % count and count % len(cards):
            yield keys, f"is {cards}, which {count} workers cannot share evenly"
        elif len(own := cards_of(config, service, 0)) < (ranks := _ranks(config, service)):
            yield keys, f"is {cards}: {ranks} ranks take a card each, and there are {len(own)} for them"


def devices_of(config: RunConfig, service: str) -> list[int]:
    section: Any = config.section(service)
    return section.devices if config.replicas(service) else []


def _holders(config: RunConfig, service: str) -> int:
    """Among how many the cards of a service are shared out."""
    return 1 if service == "trainer" else config.replicas(service)


def _ranks(config: RunConfig, service: str) -> int:
    """Processes or threads of one holder that take a card each."""
    section: Any = config.section(service)
    if service == "trainer":
        return section.nproc
    engine = getattr(section, "engine", None)
    parallel = getattr(engine, "parallel", engine)
    return config.data_parallel_size(service) * getattr(parallel, "tensor_parallel_size", 1)


def _seen(cards: list[int]) -> list[str]:
    """The cards as CUDA names them: where the launcher itself sees some only, numbers count among those."""
    given = ENVIRONMENT.get(VISIBLE, "")
    if not given:
        return [str(card) for card in cards]
    visible = given.split(",")
    for card in cards:
        if card >= len(visible):
            raise ConfigError(f"devices: there is no card {card}: {VISIBLE} is {given!r}")
    return [visible[card].strip() for card in cards]
