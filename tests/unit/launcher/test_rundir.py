"""Run directories: unique names, a private token, one launcher at a time."""

from __future__ import annotations

import os
import stat

import pytest

from slipstream.launcher.errors import RunDirError
from slipstream.launcher.rundir import (
    RunLock,
    create_run_dir,
    find_run,
    find_services_run,
    launcher_pid,
    newest_running,
)


def test_the_newest_run_is_no_evaluation_unless_there_is_nothing_else(tmp_path):
    evaluated = create_run_dir(tmp_path, "run-eval")
    evaluated.config_file.write_text("")
    evaluated.service_config("orchestrator").write_text("evaluate_only = true\n")
    assert find_services_run(None, tmp_path).name == "run-eval"
    trained = create_run_dir(tmp_path, "run")
    trained.config_file.write_text("")
    os.utime(trained.config_file, (1, 1))
    assert find_services_run(None, tmp_path).name == "run"
    locks = [RunLock(evaluated)]
    assert newest_running(tmp_path) == evaluated
    locks.append(RunLock(trained))
    assert newest_running(tmp_path) == trained
    for lock in locks:
        lock.release()


def test_a_taken_name_gets_a_number(tmp_path):
    names = [create_run_dir(tmp_path, "demo").name for _ in range(3)]
    assert names == ["demo", "demo-2", "demo-3"]


def test_the_token_is_random_and_for_the_owner_only(tmp_path):
    one, two = create_run_dir(tmp_path, "demo"), create_run_dir(tmp_path, "demo")
    assert stat.S_IMODE(one.token_file.stat().st_mode) == 0o600
    assert len(bytes.fromhex(one.token_file.read_text())) == 32
    assert one.token_file.read_text() != two.token_file.read_text()


def test_a_directory_in_use_is_refused_and_names_its_process(tmp_path):
    run = create_run_dir(tmp_path, "demo")
    assert launcher_pid(run) is None
    lock = RunLock(run)
    assert launcher_pid(run) == os.getpid()
    with pytest.raises(RunDirError, match="in use"):
        RunLock(run)
    lock.release()
    assert launcher_pid(run) is None


def test_what_is_no_run_is_told_by_what_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text("")
    for number in range(7):
        create_run_dir(tmp_path / "elsewhere", f"run-{number}").config_file.write_text("")
    for reference, says in (
        ("a.toml", "a.toml is a file; a run is a directory, or its name in runs/, and a configuration follows an '@'"),
        ("elsewhere/run-1/logs", "elsewhere/run-1/logs is no run: it has no config.toml"),
        ("none", "no run called none in runs/, which has none"),
    ):
        with pytest.raises(RunDirError) as caught:
            find_run(reference)
        assert str(caught.value) == says
    with pytest.raises(RunDirError, match=r"elsewhere is no run: .*; it holds run-\d(, run-\d){4} and 2 more$"):
        find_run("elsewhere")


def test_a_run_is_found_by_name_by_path_and_as_the_newest(tmp_path):
    for name in ("old", "new"):
        run = create_run_dir(tmp_path, name)
        run.config_file.write_text("")
    os.utime(tmp_path / "old" / "config.toml", (1, 1))
    assert find_run("old", tmp_path).path == tmp_path / "old"
    assert find_run(str(tmp_path / "new"), tmp_path).path == tmp_path / "new"
    assert find_run(None, tmp_path).name == "new"
    with pytest.raises(RunDirError, match=r"no run called other in .*, which has new, old$"):
        find_run("other", tmp_path)
    with pytest.raises(RunDirError, match=r"no run called odl in .*; did you mean 'old'\?$"):
        find_run("odl", tmp_path)
    assert newest_running(tmp_path) is None
    lock = RunLock(find_run("old", tmp_path))
    found = newest_running(tmp_path)
    assert found is not None
    assert found.name == "old"
    lock.release()


def test_a_fine_tuning_is_passed_over_by_those_who_ask_for_services_and_named_where_it_is_asked_for(tmp_path):
    for name, text in (("run", "[orchestrator]"), ("tuned", '[data]\ntrain = "rows.jsonl"')):
        create_run_dir(tmp_path, name).config_file.write_text(text)
    os.utime(tmp_path / "run" / "config.toml", (1, 1))
    assert find_run(None, tmp_path).name == "tuned"
    assert find_services_run(None, tmp_path).name == "run"
    with pytest.raises(RunDirError, match=r"tuned is a fine-tuning.*metrics\.jsonl"):
        find_services_run("tuned", tmp_path)
    with pytest.raises(RunDirError, match="no run with services"):
        find_services_run(None, tmp_path / "run")
