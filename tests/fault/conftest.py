"""The `launch` fixture: runs of all services."""

from __future__ import annotations

from run_process import launch

__all__ = ["launch"]
