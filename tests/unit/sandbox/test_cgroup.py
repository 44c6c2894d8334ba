"""Where cgroups are found, on the layouts of /proc that occur."""

from __future__ import annotations

from pathlib import Path

from slipstream.sandbox.cgroup import CgroupTree

PID = 4_000_000_000  # of no process


def mount(kind: str, point: Path, root: str, options: str) -> str:
    return f"30 25 0:26 {root} {point} rw,relatime - {kind} {kind} rw,{options}\n"


def test_version_1_hierarchies_are_used_below_the_own_group(tmp_path):
    names = ("memory", "pids", "cpuacct")
    for name in names:
        (tmp_path / name / "own").mkdir(parents=True)
    mounts = "".join(mount("cgroup", tmp_path / name, "/", name) for name in names)
    own = "".join(f"{i}:{name}:/own\n" for i, name in enumerate(names, 2))
    tree = CgroupTree.find(own + "0::/\n", mounts + mount("cgroup2", tmp_path / "unified", "/", "x"), PID)
    assert tree is not None
    assert tree.version == 1
    assert (tmp_path / "memory/own" / f"slipstream-sandbox-{PID}").is_dir()
    tree.close()
    assert not list(tmp_path.glob("*/own/*"))


def test_version_2_needs_memory_and_pids_and_hands_them_down(tmp_path):
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory pids\n")
    folder = tmp_path / f"slipstream-sandbox-{PID}"
    tree = CgroupTree.find("0::/docker/x\n", mount("cgroup2", tmp_path, "/docker/x", "nsdelegate"), PID)
    assert tree is not None
    assert tree.version == 2
    assert (folder / "cgroup.subtree_control").read_text() == "+memory +pids"


def test_nothing_writable_means_none(tmp_path):
    assert CgroupTree.find("0::/\n", mount("cgroup2", tmp_path / "missing", "/", "x"), PID) is None
    assert CgroupTree.find("", "", PID) is None
