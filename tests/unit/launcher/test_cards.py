"""Which cards the processes of a run see."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.common.config import ENVIRONMENT, ConfigError, load_config
from slipstream.common.config_errors import Origins
from slipstream.launcher.cards import VISIBLE, variables_of
from slipstream.launcher.combinations import check_combinations
from slipstream.launcher.config import RUN_CONFIG, RunConfig
from slipstream.launcher.resolve import check, resolve
from slipstream.launcher.rundir import RunDir

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _all_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)


def config_of(**sections: dict) -> RunConfig:
    environments = [{"type": "spell_backward"}, {"type": "expression"}]
    return RUN_CONFIG.model_validate({"environments": environments, **sections})


def visible(config: RunConfig, *replicas: str) -> list[str]:
    cards = []
    for replica in replicas:
        named = dict(variable.split("=") for variable in variables_of(config, replica))
        cards.append(named.get(VISIBLE, ""))
    return cards


def test_a_process_sees_its_own_card_first_and_those_of_the_others_after_it():
    config = config_of(trainer={"devices": [0]}, decode={"devices": [1], "replicas": 1})
    assert visible(config, "trainer", "decode-1", "prefill-1", "router") == ["0,1", "1,0", "", ""]
    assert variables_of(config, "trainer")[0] == "CUDA_DEVICE_ORDER=PCI_BUS_ID"


def test_a_teacher_has_a_card_of_its_own():
    loss = {"type": "distillation", "teacher": "there"}
    config = config_of(trainer={"devices": [0], "loss": loss}, teacher={"devices": [2], "replicas": 1})
    check_combinations(config, Origins())
    assert visible(config, "trainer", "teacher-1") == ["0,2", "2,0"]


def test_without_devices_nothing_is_said():
    config = config_of()
    assert visible(config, "trainer", "decode-1") == ["", ""]


@pytest.mark.parametrize(
    ("devices", "replicas", "expected"),
    [
        ([3], 2, ["3,0", "3,0"]),
        ([2, 3], 2, ["2,0,3", "3,0,2"]),
        ([2, 3], 4, ["2,0,3", "2,0,3", "3,0,2", "3,0,2"]),
        ([2, 3, 4, 5], 2, ["2,3,0,4,5", "4,5,0,2,3"]),
    ],
)
def test_the_cards_of_a_pool_are_shared_out_in_order(devices, replicas, expected):
    config = config_of(trainer={"devices": [0]}, decode={"devices": devices, "replicas": replicas})
    assert visible(config, *(f"decode-{n}" for n in range(1, replicas + 1))) == expected


def test_ranks_of_one_group_see_the_same_cards():
    config = config_of(trainer={"devices": [0, 1], "nproc": 2}, decode={"devices": [2, 3], "data_parallel_size": 2})
    assert visible(config, "trainer", "trainer-1") == ["0,1,2,3"] * 2
    config = config_of(decode={"devices": [0, 1, 2, 3], "replicas": 2, "data_parallel_size": 2})
    assert visible(config, "decode-1-0", "decode-1-1", "decode-2-0") == ["0,1,2,3", "0,1,2,3", "2,3,0,1"]


def test_a_pool_without_workers_takes_no_cards():
    config = config_of(trainer={"devices": [0]}, prefill={"devices": [5], "replicas": 0})
    assert visible(config, "trainer") == ["0"]


def test_numbers_count_among_the_cards_that_the_launcher_sees(monkeypatch):
    monkeypatch.setitem(ENVIRONMENT, VISIBLE, "GPU-aa, 7")
    config = config_of(trainer={"devices": [1]}, decode={"devices": [0], "replicas": 1})
    assert visible(config, "trainer", "decode-1") == ["7,GPU-aa", "GPU-aa,7"]
    with pytest.raises(ConfigError, match="there is no card 2"):
        variables_of(config_of(trainer={"devices": [2]}), "trainer")


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"decode": {"devices": [1, 1]}}, "decode.devices is [1, 1], which names a card twice"),
        ({"decode": {"devices": [0, 1, 2], "replicas": 2}}, "which 2 workers cannot share evenly"),
        ({"trainer": {"devices": [0], "nproc": 2}}, "2 ranks take a card each, and there are 1 for them"),
        ({"decode": {"devices": [0], "replicas": 1, "data_parallel_size": 2}}, "2 ranks take a card each"),
    ],
)
def test_cards_that_cannot_be_shared_out_are_refused(sections, says):
    with pytest.raises(ConfigError) as refused:
        check_combinations(config_of(**sections), Origins())
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "overlays",
    [
        (),
        ("examples/h200-x2-prefill.toml",),
        ("examples/h200-x2-lora.toml",),
        ("examples/h200-x2-tiny.toml",),
        ("examples/h200-x2-prefill.toml", "examples/h200-x2-tiny.toml", "examples/h200-x2-cpu.toml"),
        ("loadtests/async_vs_sync_cards.toml",),
        (
            "loadtests/async_vs_sync_cards.toml",
            "examples/h200-x2-tiny.toml",
            "examples/h200-x2-cpu.toml",
            "loadtests/async_vs_sync_cards_cpu.toml",
        ),
    ],
)
def test_the_run_over_two_cards_resolves_with_all_that_is_laid_over_it(overlays):
    config = load_config(RUN_CONFIG, [ROOT / file for file in ("examples/h200-x2.toml", *overlays)])
    check(config)
    assert visible(config, "trainer", "decode-1") == ["0,1", "1,0"]


def test_services_are_not_told_of_cards(tmp_path):
    config = config_of(trainer={"devices": [0]})
    resolved = resolve(config, RunDir(tmp_path), {"trainer": "127.0.0.1:1"}, redis_url="redis://localhost")
    assert "devices" not in resolved["trainer"].model_dump()
