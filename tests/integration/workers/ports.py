"""Ports for servers whose address others must know before they are up."""

from __future__ import annotations

from itertools import islice

from slipstream.launcher.ports import bindable, candidate_ports


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now, and that no other server is given: a channel to a dead rank goes on trying."""
    return list(islice((port for port in candidate_ports() if bindable(port)), count))
