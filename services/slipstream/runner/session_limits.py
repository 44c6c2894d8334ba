"""What is said of a limit of a session: its name as a setting, and its unit."""

from __future__ import annotations

from slipstream.common.errors import SessionLimitReached


def limit_reached(name: str, limit: int, unit: str) -> SessionLimitReached:
    """The session has all of it. `name`: in `[runner.sessions]`."""
    return SessionLimitReached(
        f"a session may have {limit} {unit} (runner.sessions.{name}): close it, and open another",
        name=f"runner.sessions.{name}",
        limit=limit,
    )
