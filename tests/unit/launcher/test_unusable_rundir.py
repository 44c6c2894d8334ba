"""What cannot be a run directory is refused in one sentence."""

from __future__ import annotations

import pytest

from slipstream.launcher.errors import RunDirError
from slipstream.launcher.rundir import RunDir, create_run_dir
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
