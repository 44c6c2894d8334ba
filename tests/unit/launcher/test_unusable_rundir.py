"""What cannot be a run directory is refused in one sentence."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.launcher.cli import main
from slipstream.launcher.errors import RunDirError
from slipstream.launcher.records import read_json_lines
from slipstream.launcher.report import write_report
from slipstream.launcher.rundir import RunDir, RunLock, create_run_dir, find_run, removed_unless_begun
from slipstream.launcher.status import read_status


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_in_the_way_is_refused(tmp_path, below):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match="no run directory"):
        create_run_dir(tmp_path / "file" / below, "demo")


@pytest.mark.parametrize("text", [None, "garbage", "", "[endpoints"])
async def test_endpoints_that_cannot_be_read_are_told(tmp_path, text):
    if text is not None:
        (tmp_path / "endpoints.toml").write_text(text)
    with pytest.raises(RunDirError, match="where its services are"):
        await read_status(RunDir(tmp_path))


@pytest.mark.parametrize("config", [b"\xff\xfe", b"a = [", None])
def test_a_configuration_that_cannot_be_read_is_told(tmp_path, config):
    if config is None:
        (tmp_path / "config.toml").mkdir()
    else:
        (tmp_path / "config.toml").write_bytes(config)
    with pytest.raises(RunDirError, match=r"config\.toml cannot be read: "):
        write_report(RunDir(tmp_path))


def test_a_name_that_no_file_can_have_is_no_run():
    with pytest.raises(RunDirError, match="no run called"):
        find_run("x" * 300)


def test_a_record_that_is_too_deep_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "a"}\n' + "[" * 100_000 + '\n{"kind": "b"}\n')
    assert [record["kind"] for record in read_json_lines(tmp_path / "metrics.jsonl")] == ["a", "b"]


def test_a_directory_whose_making_fails_half_way_is_not_left_behind(tmp_path):
    """A file of one byte is allowed, and the token is longer; signals that come of it are Python's to ignore."""
    program = (
        "import resource, sys; from pathlib import Path\n"
        "from slipstream.launcher.rundir import create_run_dir\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))\n"
        "create_run_dir(Path(sys.argv[1]), 'demo')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "runs")], capture_output=True, text=True, check=False, timeout=60
    )
    assert f"RunDirError: no run directory can be made in {tmp_path / 'runs'}: File too large" in ended.stderr
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_run_that_cannot_write_its_files_leaves_no_directory_behind(tmp_path):
    """Its token fits; its configuration does not."""
    (tmp_path / "base.toml").write_text('[[environments]]\ntype = "spell_backward"\n')
    program = (
        "import resource; from slipstream.common.config import load_config\n"
        "from slipstream.launcher.config import RUN_CONFIG\n"
        "from slipstream.launcher.rl import run_rl\n"
        "config = load_config(RUN_CONFIG, ['base.toml'], ['run.name=demo', 'launcher.check_memory=false'])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))\n"
        "run_rl(config, stay_up=False)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert f"RunDirError: {tmp_path / 'runs' / 'demo'} cannot be written: File too large" in ended.stderr
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("stopped", [KeyboardInterrupt, SystemExit])
def test_a_run_that_is_stopped_before_it_begins_leaves_no_directory_behind(tmp_path, stopped):
    run = create_run_dir(tmp_path, "demo")
    with pytest.raises(stopped), removed_unless_begun(run):
        raise stopped
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words", [["report"], ["trace"], ["problems", "chain_sum", "runs/demo/sums.jsonl", "--count=1"]]
)
def test_a_file_that_cannot_be_written_is_told_in_one_line(tmp_path, monkeypatch, capsys, words):
    run = create_run_dir(tmp_path / "runs", "demo")
    run.config_file.touch()
    opened = Path.open

    def closed(path: Path, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if "w" in mode:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, mode, *rest, **options)

    monkeypatch.setattr(Path, "open", closed)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(words)
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert re.fullmatch(r"error: .*demo/.*: permission denied\n", said)


def test_what_a_run_has_begun_stays_whatever_ends_it(tmp_path):
    run = create_run_dir(tmp_path, "demo")
    lock = RunLock(run)
    run.record("run_started")
    with pytest.raises(RunDirError, match="in use"), removed_unless_begun(run):
        RunLock(run)
    lock.release()
    assert run.events_file.exists()
