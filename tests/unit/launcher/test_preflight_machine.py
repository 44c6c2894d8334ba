"""What a machine is refused for, and what it is not."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.common.config import ConfigError
from slipstream.common.config_errors import Origins
from slipstream.launcher.cards import VISIBLE
from slipstream.launcher.config import RUN_CONFIG, RunConfig
from slipstream.launcher.preflight_machine import _cards, check_machine


def config_of(**sections: Any) -> RunConfig:
    return RUN_CONFIG.model_validate({"environments": [{"type": "spell_backward"}], **sections})


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Its `/dev` and `/proc`, without a card."""
    monkeypatch.delenv(VISIBLE, raising=False)
    (tmp_path / "dev").mkdir()
    (tmp_path / "proc").mkdir()
    return tmp_path / "dev", tmp_path / "proc"


def refusal(config: RunConfig, machine: tuple[Path, Path]) -> str:
    try:
        _cards(config, Origins(), *machine)
    except ConfigError as error:
        return str(error)
    return ""


def test_cards_that_are_named_must_be_there(machine: tuple[Path, Path]) -> None:
    two = config_of(trainer={"devices": [0]}, decode={"devices": [1]})
    assert refusal(config_of(), machine) == ""
    assert refusal(two, machine) == "trainer.devices: there is no card 0; this machine has none"
    (machine[0] / "nvidia4").touch()  # the one that a container was given
    (machine[0] / "nvidiactl").touch()
    assert refusal(two, machine) == "decode.devices: there is no card 1; this machine has 1, from 0"
    (machine[0] / "nvidia5").touch()
    assert refusal(two, machine) == ""


def test_cards_whose_files_are_yet_to_be_made_are_there(machine: tuple[Path, Path]) -> None:
    for address in ("0000:01:00.0", "0000:02:00.0"):
        (machine[1] / "driver" / "nvidia" / "gpus" / address).mkdir(parents=True)
    assert refusal(config_of(trainer={"devices": [0]}, decode={"devices": [1]}), machine) == ""


def test_parts_of_a_card_are_counted_as_the_launcher_is_shown_them(
    machine: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(trainer={"devices": [0]}, decode={"devices": [1]})
    monkeypatch.setenv(VISIBLE, "MIG-a,MIG-b")
    assert "this machine has none" in refusal(config, machine)
    (machine[0] / "nvidia0").touch()
    assert refusal(config, machine) == ""


def test_a_disk_that_tells_no_size_is_refused_only_where_room_is_asked_for(
    machine: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=0, used=0, free=0))
    run, launcher = {"directory": str(tmp_path / "runs")}, {"check_memory": False}
    check_machine(config_of(run=run, launcher=launcher, orchestrator={"disk": {"min_free_bytes": 0}}), Origins())
    with pytest.raises(ConfigError, match="has 0 bytes in all"):
        check_machine(config_of(run=run, launcher=launcher), Origins())


def test_a_directory_behind_one_that_may_not_be_entered_is_told_of_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat, mine = os.stat, tmp_path / "closed" / "of" / "mine"

    def closed(path: Any, **options: Any) -> os.stat_result:
        if path == mine:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", closed)
    with pytest.raises(ConfigError) as refused:
        check_machine(config_of(run={"directory": str(mine)}), Origins())
    assert str(refused.value) == f"run.directory: {str(mine)!r} cannot be written to: permission denied"
