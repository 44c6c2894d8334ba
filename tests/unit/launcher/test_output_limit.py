"""What a process prints is cut to its bound, however much came since the last look."""

from __future__ import annotations

import sys
from pathlib import Path

from slipstream.launcher.process import ProcessSpec, SupervisedProcess


def test_of_what_was_printed_the_newest_is_kept_and_no_more(tmp_path: Path) -> None:
    output = tmp_path / "runner-1.out"
    command = (sys.executable, "-c", "print('old' * 50_000 + 'new')")
    process = SupervisedProcess(ProcessSpec("runner-1", command, tmp_path / "runner-1.log", output))
    process.wait()
    process.limit_output(4096, 1)
    kept = (tmp_path / "runner-1.out.1").read_text()
    assert len(kept) == 4096
    assert kept.endswith("oldnew\n")
    assert output.read_text() == ""
