"""What no file of the repository may hold."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LARGEST_BYTES = 1024 * 1024
FORBIDDEN = {
    "a path of somebody's machine": re.compile(r"(?<![\w.])/(?:home|root|Users)/\w"),
    "pickle, which runs what it reads": re.compile(
        r"^\s*(?:import|from)\s+(?:pickle|cPickle|dill|cloudpickle)\b", re.M
    ),
    "a merge conflict": re.compile(r"^(?:<{7}|>{7}) ", re.M),
    "an unfinished place": re.compile(r"#\s*(?:TODO|FIXME|XXX)\b|raise NotImplementedError"),
    "the environment, which only common/config.py reads": re.compile(r"\bos\.(?:environ|getenv)\b"),
}
# Tests hand environments to child processes; the config module is the reader.
READS_ENVIRONMENT = ("services/slipstream/common/config.py", "tests/")


def tracked():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_holds_what_is_forbidden():
    found = []
    for name in tracked():
        if (
            not name.endswith((".py", ".toml", ".md", ".proto", "Makefile", "run"))
            or name == "tests/unit/test_hygiene.py"
        ):
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        for what, pattern in FORBIDDEN.items():
            if what.startswith("the environment") and name.startswith(READS_ENVIRONMENT):
                continue
            found += [f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {what}" for match in pattern.finditer(text)]
    assert found == []


def test_generated_and_large_files_are_not_committed():
    names = tracked()
    assert [name for name in names if name.startswith(("services/slipstream/api/", "services/buf/", "runs/"))] == []
    assert [name for name in names if (ROOT / name).stat().st_size > LARGEST_BYTES] == []
