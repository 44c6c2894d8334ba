"""The staged root: in a mount namespace of the place's own, the tree of the jail and bubblewrap, reachable by anybody.

The interpreter may live below a directory that only root may enter (/root), and the place's user is nobody. So while
still root the place mounts a small file system over /tmp, which only it sees, and binds the pieces there. Nothing
of it is on a disk, and it is gone with the thread. Programs then need one bind instead of a dozen.
"""

from __future__ import annotations

import os
from pathlib import Path

from slipstream.sandbox import kernel
from slipstream.sandbox.jail import DEVICES, FILES, TMP, Bubblewrap, Jail, SystemTree, staged_arguments

STAGE = "/tmp"
ROOT = f"{STAGE}/root"
READ_ONLY = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV


def stage(tree: SystemTree, bubblewrap: Bubblewrap) -> Jail:
    """Build the stage for the calling thread, which must be root. Raises `OSError` where mounting is not allowed."""
    kernel.unshare_mounts()
    # Opened in the new namespace, and before /tmp is covered: a piece may lie below it.
    pieces = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in tree.directories}
    packages = [bubblewrap.program.parent] + ([bubblewrap.libraries] if bubblewrap.libraries else [])
    tools = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in packages}
    try:
        kernel.mount("none", STAGE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
        for path, descriptor in pieces.items():
            _bind(descriptor, ROOT + str(path))
        for place, target in tree.links:
            os.symlink(target, ROOT + place)
        for name in (TMP, FILES, "/dev"):
            os.makedirs(ROOT + name, exist_ok=True)
        for name in DEVICES:
            Path(f"{ROOT}/dev/{name}").touch()
            kernel.bind(f"/dev/{name}", f"{ROOT}/dev/{name}", kernel.MS_NOSUID)
        # The wheel's program finds its libraries relative to its own path, two folders up.
        common = Path(os.path.commonpath(packages)) if bubblewrap.libraries else bubblewrap.program.parent.parent
        for path, descriptor in tools.items():
            _bind(descriptor, f"{STAGE}/tools/{path.relative_to(common)}")
        program = f"{STAGE}/tools/{bubblewrap.program.relative_to(common)}"
    finally:
        for descriptor in (*pieces.values(), *tools.values()):
            os.close(descriptor)
    return Jail(program, tuple(staged_arguments(ROOT)), tree.path, bubblewrap.options)


def _bind(descriptor: int, target: str) -> None:
    os.makedirs(target, exist_ok=True)
    kernel.bind(f"/proc/self/fd/{descriptor}", target, READ_ONLY)
