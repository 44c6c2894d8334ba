"""Environments from configuration, a third party's by import path."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from slipstream.common.config import ConfigError, load_config
from slipstream.environments.base import takes_turns
from slipstream.environments.config import (
    EntryPointConfig,
    EnvironmentConfig,
    ExpressionConfig,
    ImportedConfig,
    SpellBackwardConfig,
)
from slipstream.environments.config_adapters import TextArenaConfig, VerifiersConfig
from slipstream.environments.listing import run
from slipstream.environments.registry import EXTRAS, OWN, SUPPORTED, build_environments, factory_of
from slipstream.environments.roles import roles_of
from slipstream.runner.config import RunnerConfig

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_an_environment_is_imported_by_path_with_its_options_and_seed() -> None:
    config = ImportedConfig(name="echo", path="third_party:Echo", options={"greeting": "hello"})
    environment = build_environments([config], seed=3)["echo"]
    assert not takes_turns(environment)
    assert environment.prompt(environment.task("train", 5)) == "hello 3 5"
    own_seed = config.model_copy(update={"seed": 9})
    environment = build_environments([own_seed], seed=3)["echo"]
    assert not takes_turns(environment)
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


@pytest.fixture
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is installed and registers environments."""
    installed = tmp_path / "echoes-2.1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: echoes\nVersion: 2.1\n")
    lines = "echo = third_party:Echo\ngone = third_party:Missing\n"
    (installed / "entry_points.txt").write_text(f"[slipstream.environments]\n{lines}")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("_package")
def test_an_environment_is_found_by_the_name_that_an_installed_package_registers() -> None:
    config = EntryPointConfig(name="mine", entry_point="echo", options={"greeting": "hello"})
    environment = build_environments([config], seed=3)["mine"]
    assert not takes_turns(environment)
    assert environment.prompt(environment.task("train", 5)) == "hello 3 5"


@pytest.mark.usefixtures("_package")
def test_a_name_that_nobody_registers_is_refused_with_those_there_are() -> None:
    for name, words in (
        ("ecko", "no installed package registers an environment 'ecko'; did you mean 'echo'?; registered: echo, gone"),
        ("expression", 'it is built in: type = "expression"'),
        ("gone", "has no attribute 'Missing'"),
    ):
        with pytest.raises(ConfigError, match=r"^environments\.mine: ") as caught:
            build_environments([EntryPointConfig(name="mine", entry_point=name)], seed=0)
        assert words in str(caught.value)


@pytest.mark.usefixtures("_package")
def test_what_a_configuration_can_name_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert set(OWN) | {"import", "entry_point"} == set(listed["types"])
    assert listed["entry_points"]["echo"] == "third_party:Echo"
    assert {"chain_sum", "gcd"} <= set(listed["reasoning_gym"])
    assert [sentence for sentence in listed["types"].values() if not sentence.endswith(".")] == []
    assert run([]) == 0
    shown = capsys.readouterr().out
    assert "  echo  third_party:Echo, of echoes 2.1" in shown
    assert f"{len(listed['reasoning_gym'])} in reasoning-gym" in shown
    assert " chain_sum " in shown


@pytest.mark.parametrize("library", EXTRAS)
def test_a_library_that_is_not_installed_is_named_with_its_extra(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    section = {"type": library, "id": "x", "game": "x", "url": "http://x"}
    known = TypeAdapter(EnvironmentConfig)
    fields = {"verifiers": ("type", "id"), "textarena": ("type", "game"), "openenv": ("type", "url")}[library]
    config = known.validate_python({field: section[field] for field in fields})
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        ConfigError, match=rf"^environments\.{library}: {library} is not installed: pip install"
    ) as caught:
        build_environments([config], 0)
    assert f"'slipstream[{library}]'" in str(caught.value)


@pytest.mark.parametrize("version", ["0.1.9.post3", "0.4.0rc1", "0.4.0", "1.0"])
def test_a_version_that_is_not_supported_is_refused_with_the_range(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(version, tmp_path, monkeypatch)
    with pytest.raises(ConfigError) as caught:
        build_environments([VerifiersConfig(id="x")], 0)
    said = f"environments.verifiers: verifiers {version} is installed, and it takes 0.1.14 or later, below 0.4 "
    assert str(caught.value).startswith(said)
    assert str(caught.value).endswith("pip install 'slipstream[verifiers]'")


@pytest.mark.parametrize("version", ["0.1.14", "0.2.1", "0.3.1.post1"])
def test_supported_versions_of_verifiers_are_imported(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(version, tmp_path, monkeypatch)
    monkeypatch.setitem(OWN, "verifiers", "third_party:Echo")  # theirs takes seconds to import
    assert factory_of(VerifiersConfig(id="x")).__name__ == "Echo"


def installed(version: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this version of verifiers were the one."""
    (directory / "verifiers.dist-info").mkdir()
    (directory / "verifiers.dist-info" / "METADATA").write_text(f"Name: verifiers\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(directory))


def test_the_extra_takes_the_versions_that_are_supported() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for library, (least, beyond, _) in SUPPORTED.items():
        assert f"{library}>={least},<{beyond}" in extras[library]


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


def test_roles_that_train_are_roles_that_it_has() -> None:
    two = TextArenaConfig(game="TicTacToe-v0", players=2, trained_roles=["player-1"])
    assert roles_of(build_environments([two], seed=0)["textarena"]) == ("player-0", "player-1")
    with pytest.raises(ConfigError, match="it has no role 'player1'; did you mean 'player-1'"):
        build_environments([two.model_copy(update={"trained_roles": ["player1"]})], seed=0)
    echo = ImportedConfig(name="echo", path="third_party:Echo", options={"greeting": ""}, trained_roles=["a"])
    with pytest.raises(ConfigError, match="its roles: none"):
        build_environments([echo], seed=0)
