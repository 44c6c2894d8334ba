"""Environments from configuration, a third party's by import path."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.common.config import ConfigError, load_config
from slipstream.environments.config import ExpressionConfig, ImportedConfig, SpellBackwardConfig
from slipstream.environments.registry import build_environments
from slipstream.runner.config import RunnerConfig


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_an_environment_is_imported_by_path_with_its_options_and_seed() -> None:
    config = ImportedConfig(name="echo", path="third_party:Echo", options={"greeting": "hello"})
    environment = build_environments([config], seed=3)["echo"]
    assert environment.prompt(environment.task("train", 5)) == "hello 3 5"
    own_seed = config.model_copy(update={"seed": 9})
    environment = build_environments([own_seed], seed=3)["echo"]
    assert environment.prompt(environment.task("train", 5)) == "hello 9 5"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_such_package:Echo", "No module named 'no_such_package'"),
        ("third_party:Missing", "has no attribute 'Missing'"),
        ("third_party:NOT_A_FACTORY", "is not callable"),
    ],
)
def test_an_import_path_that_leads_nowhere_is_named(path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"environments\.echo: ") as caught:
        build_environments([ImportedConfig(name="echo", path=path)], seed=0)
    assert words in str(caught.value)
    assert path in str(caught.value)


def test_two_environments_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two are called 'expression'"):
        build_environments([ExpressionConfig(), ExpressionConfig()], seed=0)


def test_builtin_environments_go_by_the_name_of_their_type() -> None:
    assert list(build_environments([SpellBackwardConfig(), ExpressionConfig()], 0)) == ["spell_backward", "expression"]


def test_environments_are_read_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "runner.toml"
    file.write_text('[[environments]]\ntype = "import"\nname = "echo"\npath = "third_party:Echo"\n')
    (config,) = load_config(RunnerConfig, [file]).environments
    assert config == ImportedConfig(name="echo", path="third_party:Echo")
    file.write_text('[[environments]]\ntype = "import"\nname = "echo"\npath = "not a path"\n')
    with pytest.raises(ConfigError, match="path"):
        load_config(RunnerConfig, [file])


def test_a_split_that_leaves_nothing_to_train_on_is_refused() -> None:
    with pytest.raises(ValueError, match="evaluation_task_count"):
        ExpressionConfig(min_target=10, max_target=209)
    with pytest.raises(ValueError, match="min_word_len"):
        SpellBackwardConfig(min_word_len=7)
