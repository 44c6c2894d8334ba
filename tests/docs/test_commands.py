"""The commands of the documents do what those say. Runs are made shorter by an overlay, not otherwise changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import ROOT, Command, commands_of, files_of

TIMEOUT_S = 400.0
SHORTER = """
[sft]
max_steps = 20
decay_steps = 0

[orchestrator]
total_steps = 2
groups_per_step = 4
samples_per_group = 4

[prefill]
replicas = 0

[decode]
replicas = 1

[evaluation]
before = false
after = false
"""
STARTS = ("slipstream rl ", "slipstream sft ", "slipstream up ")


def typed(command: Command, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run one command as a shell would, with the overlay where it starts something."""
    line = command.line
    if line.removeprefix("PYTHONPATH=examples:$PYTHONPATH ").startswith(STARTS):
        head, _, flags = line.partition(" --")
        line = f"{head} @ shorter.toml" + (f" --{flags}" if flags else "")
    # The command itself: `python -m` would look for modules in more places.
    line = line.replace("slipstream ", f"{Path(sys.executable).with_name('slipstream')} ", 1)
    return run(["bash", "-ec", line], folder, environment)


def slipstream(line: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """`slipstream ...` without a shell."""
    return run([sys.executable, "-m", "slipstream.launcher", *line.split()[1:]], folder, environment)


def run(command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@pytest.mark.timeout(1100)
@pytest.mark.parametrize(
    "document", ["docs/algorithms.md", "docs/environments.md", "docs/your-environment.md", "docs/your-model.md"]
)
def test_the_commands_of_a_document_do_what_it_says(document, tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "shorter.toml").write_text(SHORTER)
    for name, text in files_of(document).items():
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "services"), "OMP_NUM_THREADS": "1"}
    commands = commands_of(document)
    assert len(commands) >= 4
    for command in commands:
        done = typed(command, tmp_path, environment)
        said = done.stdout + done.stderr
        assert done.returncode == command.exit_code, f"{command.line}\n{said}"
        for part in command.shown:
            assert part in said, f"{command.line}\n{said}"


def test_the_quick_commands_of_the_readme_answer(tmp_path):
    """Those that need no run: each line of its "Use it" block, its start replaced by a dry run."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    text = (ROOT / "README.md").read_text()
    block = text.partition("## Use it")[2].partition("```\n")[2].partition("```")[0]
    lines = [line.partition("  #")[0].strip() for line in block.splitlines()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "services")}
    starts = [line for line in lines if line.startswith(STARTS)]
    assert len(starts) >= 4
    for line in starts:
        dry = line if "--dry-run" in line else f"{line} --dry-run"
        done = slipstream(dry, tmp_path, environment)
        assert done.returncode == 0, f"{dry}\n{done.stderr}"
        assert "[orchestrator]" in done.stdout
    usage = slipstream("slipstream --help", tmp_path, environment).stdout
    others = [line.split()[1] for line in lines if line.startswith("slipstream ") and line not in starts]
    assert [word for word in others if f"  {word}" not in usage] == []
