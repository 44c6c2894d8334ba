"""How the end of a fine-tuning is told."""

from __future__ import annotations

import signal

import pytest

from slipstream.launcher.chat import _told
from slipstream.launcher.rundir import RunDir


@pytest.mark.parametrize("code", [None, 0, 128 + signal.SIGINT, 128 + signal.SIGTERM])
def test_a_wanted_stop_is_told_as_one(tmp_path, capsys, code):
    assert _told(RunDir(tmp_path), code, finished=False) == (code or 0)
    assert "was stopped; go on with: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (1, "ended with code 1; its log is "),
        (128 + signal.SIGKILL, "was ended by SIGKILL, which may mean that memory ran out; its log is "),
        (128 + signal.SIGSEGV, "was ended by SIGSEGV; its log is "),
    ],
)
def test_another_end_is_told_with_its_cause(tmp_path, capsys, code, said):
    assert _told(RunDir(tmp_path), code, finished=False) == code
    found = capsys.readouterr()
    assert said in found.err
    assert not found.out


def test_a_run_that_had_finished_and_cannot_go_on_is_not_told_as_finished(tmp_path, capsys):
    assert _told(RunDir(tmp_path), 0, finished=True) == 0
    assert "finished: the model is in" in capsys.readouterr().out
    assert _told(RunDir(tmp_path), 1, finished=True) == 1
    assert "ended with code 1" in capsys.readouterr().err
