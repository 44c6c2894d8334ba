"""What cannot be a run directory is refused in one sentence."""

from __future__ import annotations

import pytest

from slipstream.launcher.errors import RunDirError
from slipstream.launcher.records import read_json_lines
from slipstream.launcher.report import write_report
from slipstream.launcher.rundir import RunDir, create_run_dir, find_run
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
