"""Files, flags, and what a wrong one says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from slipstream.common.config import BaseConfig, ConfigError, ServiceConfig, cli, dump_toml, load_config


class GrpcWeights(BaseConfig):
    type: Literal["grpc"] = "grpc"
    chunk_bytes: int = 1024


class NcclWeights(BaseConfig):
    type: Literal["nccl"] = "nccl"
    channel_count: int = 2


class Admission(BaseConfig):
    """How far generation may run ahead."""

    groups_per_step: int = Field(default=64, ge=1)
    """Prompt groups consumed by one step."""

    rate: float = 1.0


class Environment(BaseConfig):
    name: str
    weight: float = 1.0


class Config(ServiceConfig):
    """A service for tests."""

    admission: Admission = Admission()
    weights: Annotated[GrpcWeights | NcclWeights, Field(discriminator="type")] = GrpcWeights()
    environments: list[Environment] = Field(default_factory=list)
    peers: dict[str, str] = Field(default_factory=dict)
    note: str | None = None


@pytest.fixture
def write(tmp_path):
    def write(text, name="a.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def refusal(files=(), overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config(Config, files, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_later_files_and_flags_win(write):
    a = write("seed = 1\n[admission]\ngroups-per-step = 2\nrate = 0.5\n")
    b = write("[admission]\ngroups_per_step = 3\n", "b.toml")
    config = load_config(Config, [a, b], ["admission.rate=0.25"])
    assert (config.seed, config.admission.groups_per_step, config.admission.rate) == (1, 3, 0.25)


@pytest.mark.parametrize(
    "argv",
    [
        ["--admission.groups-per-step=8"],
        ["--admission.groups_per_step", "8"],
        ["--admission.groups-per-step", "9", "--admission.groups_per_step=8"],
    ],
)
def test_flags_take_dashes_or_underscores_and_a_space_or_an_equals_sign(argv):
    assert cli(Config, argv).admission.groups_per_step == 8


def test_the_at_sign_may_stand_alone_or_touch_its_file(write):
    path = write("seed = 5\n")
    assert cli(Config, ["@", str(path)]).seed == cli(Config, [f"@{path}"]).seed == 5


def test_text_fields_keep_what_looks_like_a_number():
    config = load_config(Config, [], ["run_id=007", "note=true", "listen.host=::1"])
    assert (config.run_id, config.note, config.listen.host) == ("007", "true", "::1")


def test_a_flag_can_hold_a_list_or_a_table():
    config = load_config(Config, [], ['environments=[{name = "a"}, {name = "b", weight = 0.5}]', "weights.type=nccl"])
    assert [environment.name for environment in config.environments] == ["a", "b"]
    assert config.weights == NcclWeights()


def test_another_variant_replaces_the_table_of_the_first(write):
    a = write('[weights]\ntype = "grpc"\nchunk_bytes = 7\n')
    b = write('[weights]\ntype = "nccl"\nchannel_count = 4\n', "b.toml")
    assert load_config(Config, [a, b]).weights == NcclWeights(channel_count=4)


def test_names_in_a_free_table_keep_their_dashes(write):
    config = load_config(Config, [write('[peers]\ndecode-1 = "x:1"\n')], ["peers.decode-2=x:2"])
    assert config.peers == {"decode-1": "x:1", "decode-2": "x:2"}


def test_an_unknown_key_names_its_file_and_what_was_meant(write):
    path = write("[admission]\ngroups_per_stepp = 2\n")
    assert refusal([path]) == (
        f"{path}: unknown key 'admission.groups_per_stepp'; did you mean 'admission.groups_per_step'?"
    )
    assert refusal([], ["admision.rate=1"]) == ("--admision.rate: unknown key 'admision'; did you mean 'admission'?")


def test_a_key_in_the_wrong_section_is_found_in_the_right_one(write):
    assert "did you mean 'admission.groups_per_step'?" in refusal([write("groups_per_step = 2\n")])


def test_an_unknown_key_inside_a_variant_or_a_list_is_found(write):
    text = '[weights]\ntype = "nccl"\nchannel_cont = 1\n'
    assert "unknown key 'weights.channel_cont'; did you mean 'weights.channel_count'?" in refusal([write(text)])
    text = '[[environments]]\nname = "a"\nwieght = 1\n'
    assert "unknown key 'environments.0.wieght'; did you mean 'environments.0.weight'?" in refusal([write(text)])


def test_a_wrong_type_or_range_names_place_key_and_value(write):
    path = write('[admission]\ngroups_per_step = "many"\n')
    assert refusal([path]).startswith(f"{path}: admission.groups_per_step: must be a whole number")
    assert refusal([], ["admission.groups-per-step=0"]) == ("--admission.groups-per-step: must be at least 1 (got 0)")


def test_a_wrong_variant_lists_the_right_ones(write):
    assert "weights.type: 'rdma' is none of grpc, nccl" in refusal([write('[weights]\ntype = "rdma"\n')])


def test_a_missing_file_suggests_one_that_is_there(write, tmp_path):
    write("", "base.toml")
    meant = f"did you mean '{tmp_path / 'base.toml'}'?"
    assert refusal([tmp_path / "bsae.toml"]).endswith(f"bsae.toml: no such file; {meant}")
    (tmp_path / "examples").mkdir()
    write("", "examples/demo.toml")
    assert refusal([tmp_path / "demo.toml"]).endswith(f"did you mean '{tmp_path / 'examples' / 'demo.toml'}'?")


def test_a_file_that_is_not_toml_says_where(write):
    assert "line 1" in refusal([write("seed 5")])


def test_a_wrong_command_line_exits_2_with_one_line(capsys):
    with pytest.raises(SystemExit) as caught:
        cli(Config, ["--seeed=1"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: --seeed: unknown key 'seeed'; did you mean 'seed'?\n"


@pytest.mark.parametrize("argv", [["@"], ["--seed"], ["seed=1"], ["@x.toml", "--"]])
def test_a_broken_command_line_exits_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli(Config, argv)
    assert caught.value.code == 2


def test_a_dry_run_prints_toml_that_loads_to_the_same_config(write, capsys):
    argv = ["--run-id=a", '--environments=[{name = "x"}]', "--weights.type=nccl", "--peers.decode-1=x:1"]
    with pytest.raises(SystemExit) as caught:
        cli(Config, [*argv, "--dry-run"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert load_config(Config, [write(printed)]) == cli(Config, argv)


def test_help_shows_fields_with_their_docstrings(capsys):
    with pytest.raises(SystemExit) as caught:
        cli(Config, ["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    wanted = "--admission.groups-per-step INTEGER  (at least 1, default 64)\n      Prompt groups consumed by one step."
    assert wanted in printed


def test_a_config_does_not_change_after_loading():
    with pytest.raises(ValueError, match="frozen"):
        load_config(Config, []).seed = 1  # type: ignore[misc]


def test_paths_and_unset_values_survive_a_dump(write):
    config = Config(run_dir=Path('a "quoted"\\\n\t path'), note=None)
    assert load_config(Config, [write(dump_toml(config))]) == config


@pytest.mark.parametrize(("given", "used"), [({}, "ERROR"), ({"GRPC_VERBOSITY": "DEBUG"}, "DEBUG")])
def test_grpc_is_told_to_be_quiet_before_it_is_imported_unless_asked_to_speak(given, used):
    code = """
import os, sys, slipstream.launcher.cli
imported = list(sys.modules)  # in the order of their imports
assert imported.index("slipstream.common.config") < imported.index("grpc")
print(os.environ["GRPC_VERBOSITY"])
"""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), **given}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == used
