"""Ports for servers that have to be at an address which is known before they start, or again after they ended."""

from __future__ import annotations

from slipstream.launcher.ports import PortLease, candidate_ports

_LEASE = PortLease(owner="tests")
"""Kept while this process lives, so that neither another test nor a run beside it is given one of them."""


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on, where no outgoing connection can be; each is given once, as channels go on trying."""
    candidates = iter(candidate_ports())
    return [_LEASE.take_any(candidates) for _ in range(count)]


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]
