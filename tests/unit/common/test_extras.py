"""What is said when something that is imported is not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.common.extras import explain_import


def run_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("module", ["slipstream.launcher", "slipstream.router"])
def test_a_file_in_the_current_folder_hides_no_installed_package(tmp_path, module: str) -> None:
    (tmp_path / "buf.py").write_text("import a_module_that_nobody_has\n")
    (tmp_path / "grpc.py").write_text("import a_module_that_nobody_has\n")
    ran = run_in(tmp_path, "-m", module, "--help")
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_module_of_the_current_folder_is_found_by_services_and_by_the_command(tmp_path) -> None:
    (tmp_path / "own_module.py").write_text("print('own module')\n")
    program = "from slipstream.launcher.cli import main\ntry: main(['--version'])\nfinally: import own_module"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "command.py").write_text(program)
    assert "own module\n" in run_in(tmp_path, "elsewhere/command.py").stdout
    moved = "import sys; sys.argv = ['-m']; sys.path.insert(0, ''); import slipstream, own_module; print(sys.path[-1])"
    assert run_in(tmp_path, "-c", moved).stdout == "own module\n\n"


def test_a_missing_package_is_told_apart_from_a_users_own_mistake(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = tmp_path / "my_rewards.py"
    mine.write_text("import a_module_that_nobody_has\n")
    with pytest.raises(ModuleNotFoundError) as caught:
        __import__("my_rewards")
    assert (
        explain_import("slipstream rl", caught.value)
        == f"{mine} imports a_module_that_nobody_has, which is not installed"
    )
    plain = tmp_path / "hides_a_package.py"
    plain.write_text("")
    with pytest.raises(ModuleNotFoundError) as caught:
        __import__("hides_a_package.part")
    said = explain_import("slipstream rl", caught.value)
    assert said.startswith(f"slipstream rl needs hides_a_package.part, which {plain} does not have")
    bare = ModuleNotFoundError("No module named 'torch2'", name="torch2")
    assert explain_import("slipstream rl", bare).endswith("not installed: pip install 'slipstream[demo]'")


def test_a_missing_module_of_our_own_is_a_bug() -> None:
    error = ModuleNotFoundError("No module named 'slipstream.nowhere'", name="slipstream.nowhere")
    with pytest.raises(ModuleNotFoundError, match=r"slipstream\.nowhere"):
        explain_import("slipstream rl", error)
