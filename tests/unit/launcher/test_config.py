"""One configuration in, one for each process out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.common.config import ConfigError, dump_toml, load_config
from slipstream.launcher.cli import main
from slipstream.launcher.config import RUN_CONFIG, SERVICES, RunConfig
from slipstream.launcher.resolve import check, rendezvous_of, replicas_of, resolve
from slipstream.launcher.rundir import RunDir, create_run_dir
from slipstream.launcher.services import service_of, write_configs

TOML = """
[run]
name = "small"
seed = 7

[orchestrator]
total_steps = 42
max_off_policy_steps = 1

[trainer.optim]
lr = 2e-3

[sft]
max_steps = 9

[decode]
replicas = 3

[evaluation]
after = false

[[environments]]
type = "spell_backward"
weight = 3.0
max_word_len = 6
evaluation_task_count = 50

[[environments]]
type = "expression"
"""


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    file = tmp_path / "small.toml"
    file.write_text(TOML)
    return file


@pytest.fixture
def config(toml: Path) -> RunConfig:
    return load_config(RUN_CONFIG, [toml])


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return create_run_dir(tmp_path, "small")


@pytest.fixture
def configs(config: RunConfig, run: RunDir):
    endpoints = {replica: f"127.0.0.1:{20000 + n}" for n, replica in enumerate(replicas_of(config))}
    return resolve(config, run, endpoints, redis_url="unix:///tmp/valkey.sock")


def test_every_service_gets_a_process_and_pools_get_several(config):
    replicas = replicas_of(config)
    assert {service_of(replica) for replica in replicas} == set(SERVICES) - {"gateway", "teacher"}, (
        "those are asked for"
    )
    assert [replica for replica in replicas if service_of(replica) == "decode"] == ["decode-1", "decode-2", "decode-3"]


def test_without_a_sandbox_none_is_started_and_runners_have_no_address_of_one(toml, run):
    toml.write_text(TOML.replace('type = "expression"', 'type = "reasoning_gym"\nname = "sums"\ndataset = "chain_sum"'))
    config = load_config(RUN_CONFIG, [toml], ["sandbox.enabled=false"])
    check(config)
    replicas = replicas_of(config)
    assert "sandbox" not in replicas
    endpoints = {replica: f"127.0.0.1:{port}" for port, replica in enumerate(replicas, start=1)}
    runner = resolve(config, run, endpoints, redis_url="redis://localhost")["runner-1"]
    assert runner.model_dump()["sandbox_address"] == ""


def test_a_gateway_listens_beside_its_port_and_sessions_are_told_where(toml, run):
    for overrides, port in (([], 25000), (["gateway.http-port=8080"], 8080)):
        config = load_config(RUN_CONFIG, [toml], ["gateway.enabled=true", *overrides])
        check(config)
        endpoints = {replica: f"127.0.0.1:{20000 + n}" for n, replica in enumerate(replicas_of(config))}
        assert rendezvous_of(config) == ([] if overrides else ["gateway"])
        configs = resolve(config, run, endpoints, redis_url="redis://localhost", rendezvous={"gateway": "x:25000"})
        assert configs["gateway"].model_dump()["http_port"] == port
        assert configs["orchestrator"].model_dump()["gateway_url"] == f"http://127.0.0.1:{port}/v1"
        elsewhere = resolve(config, run, endpoints, redis_url="redis://localhost", elsewhere=True)
        assert elsewhere["gateway"].model_dump()["http_host"] == "0.0.0.0"
        assert elsewhere["orchestrator"].model_dump()["gateway_url"].startswith("https://")


def test_a_run_may_do_without_a_prefill_pool(toml, run):
    config = load_config(
        RUN_CONFIG, [toml], ["prefill.replicas=0", "decode.replicas=1", "prefill.engine.block-size-tokens=3"]
    )
    check(config)
    endpoints = {replica: f"127.0.0.1:{20000 + n}" for n, replica in enumerate(replicas_of(config))}
    assert not [replica for replica in endpoints if service_of(replica) == "prefill"]
    configs = resolve(config, run, endpoints, redis_url="redis://localhost")
    assert configs["router"].model_dump()["prefill_workers"] == []
    assert {worker["role"] for worker in configs["orchestrator"].model_dump()["workers"]} == {"decode"}


def test_groups_of_ranks_get_a_process_a_rank_and_know_each_other(toml, run):
    config = load_config(RUN_CONFIG, [toml], ["decode.replicas=2", "decode.data-parallel-size=2"])
    check(config)
    endpoints = {replica: f"127.0.0.1:{20000 + n}" for n, replica in enumerate(replicas_of(config))}
    decode = [replica for replica in endpoints if service_of(replica) == "decode"]
    assert decode == ["decode-1-0", "decode-1-1", "decode-2-0", "decode-2-1"]
    configs = resolve(config, run, endpoints, redis_url="redis://localhost")
    group = configs["decode-2-1"].model_dump()["group"]
    assert (group["group_id"], group["rank"]) == ("decode-2", 1)
    assert group["addresses"] == [endpoints["decode-2-0"], endpoints["decode-2-1"]]
    assert configs["prefill-1"].model_dump()["group"]["group_id"] == ""
    assert len(configs["router"].model_dump()["decode_workers"]) == 4
    assert rendezvous_of(config) == []


def test_ranks_of_vllm_are_told_their_number_and_where_they_meet(toml, run):
    flags = ["prefill.replicas=0", "decode.engine.type=vllm", "decode.replicas=1", "decode.data-parallel-size=2"]
    flags += ["decode.engine.parallel.expert-parallel=true"]
    config = load_config(RUN_CONFIG, [toml], flags)
    check(config)
    assert rendezvous_of(config) == ["decode-1"]
    endpoints = {replica: f"127.0.0.1:{20000 + n}" for n, replica in enumerate(replicas_of(config))}
    met = resolve(config, run, endpoints, redis_url="redis://localhost", rendezvous={"decode-1": "127.0.0.1:1"})
    dumped = met["decode-1-1"].model_dump()
    assert dumped["engine"]["parallel"]["data_parallel_size"] == 2
    assert dumped["group"]["rendezvous"] == "127.0.0.1:1"


def test_ranks_of_the_trainer_get_a_process_each_and_share_the_data_as_they_can(toml, run):
    config = load_config(RUN_CONFIG, [toml], ["trainer.nproc=4", "trainer.parallel.context=2"])
    check(config)
    assert rendezvous_of(config) == ["trainer"]
    endpoints = {replica: f"127.0.0.1:{20000 + n}" for n, replica in enumerate(replicas_of(config))}
    ranks = [replica for replica in endpoints if service_of(replica) == "trainer"]
    assert ranks == ["trainer", "trainer-1", "trainer-2", "trainer-3"]
    configs = resolve(config, run, endpoints, redis_url="redis://localhost", rendezvous={"trainer": "127.0.0.1:1"})
    assert configs["orchestrator"].model_dump()["data_ranks"] == 2
    assert configs["trainer-3"].model_dump()["group"] == {
        "rank": 3,
        "rank_count": 4,
        "local_rank": None,
        "rendezvous": "tcp://127.0.0.1:1",
    }
    with pytest.raises(ConfigError, match=r"2 context ranks each are not the 3 ranks; trainer.nproc is 3"):
        check(load_config(RUN_CONFIG, [toml], ["trainer.nproc=3", "trainer.parallel.context=2"]))
    for flag, said in {
        "trainer.parallel.timeout-s=20": "which must be less",
        "trainer.parallel.expert=3": "expert: 3 does not divide the 2 ranks",
    }.items():
        with pytest.raises(ConfigError, match=said):
            check(load_config(RUN_CONFIG, [toml], ["trainer.nproc=2", flag]))


def test_two_sizes_of_a_group_are_refused(toml):
    flags = ["prefill.replicas=0", "decode.engine.type=vllm", "decode.data-parallel-size=2"]
    flags += ["decode.engine.parallel.expert-parallel=true", "decode.engine.parallel.data-parallel-size=4"]
    with pytest.raises(ConfigError, match=r"data_parallel_size is 2; set one of them"):
        check(load_config(RUN_CONFIG, [toml], flags))


def test_each_process_is_told_who_it_is_and_where_its_files_are(configs, run):
    for replica, config in configs.items():
        assert config.replica == replica
        assert config.run_id == "small"
        assert config.run_dir == run.path
        assert config.auth.token_file == run.token_file
        assert config.log.file == run.path / "logs" / f"{replica}.log"
        assert config.redis.url == "unix:///tmp/valkey.sock"
        assert config.seed == 7
    assert len({config.listen.port for config in configs.values()}) == len(configs)


def test_services_are_told_where_their_peers_listen(configs):
    address = {replica: f"127.0.0.1:{config.listen.port}" for replica, config in configs.items()}
    assert configs["trainer"].orchestrator == address["orchestrator"]
    assert configs["decode-2"].broadcaster == address["broadcaster"]
    assert configs["runner-1"].sandbox_address == address["sandbox"]
    assert [worker.address for worker in configs["router"].decode_workers] == [
        address[f"decode-{n}"] for n in (1, 2, 3)
    ]
    assert {worker.replica: worker.role for worker in configs["orchestrator"].workers} == {
        "prefill-1": "prefill", "decode-1": "decode", "decode-2": "decode", "decode-3": "decode"
    }  # fmt: skip


def test_what_services_must_agree_on_is_said_once(configs):
    assert configs["trainer"].optim.total_steps == configs["orchestrator"].total_steps == 42
    assert configs["trainer"].optim.lr == 2e-3
    assert configs["trainer"].sft.max_steps == 9
    assert not configs["orchestrator"].evaluate_after
    assert configs["runner-1"].block_size_tokens == configs["decode-1"].engine.block_size_tokens
    assert [(e.name, e.evaluation_task_count) for e in configs["orchestrator"].environments] == [
        ("spell_backward", 50), ("expression", 200)
    ]  # fmt: skip
    assert configs["runner-1"].environments[0].max_word_len == 6


def test_each_file_loads_as_its_service_would_load_it(configs, run):
    write_configs(run, configs)
    for replica, config in configs.items():
        assert load_config(SERVICES[service_of(replica)], [run.service_config(replica)]) == config


def test_the_resolved_configuration_loads_to_the_same(config, tmp_path):
    file = tmp_path / "resolved.toml"
    file.write_text(dump_toml(config))
    assert load_config(RUN_CONFIG, [file]) == config


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--trainer.optim.lrr=1", "unknown key 'trainer.optim.lrr'; did you mean 'trainer.optim.lr'?"),
        ("--trainer.orchestrator=x", "unknown key 'trainer.orchestrator'"),
        ("--decode.replicas=0", "--decode.replicas: must be at least 1 (got 0)"),
        ("--run.name=../other", "--run.name: must match "),
        ("--orchestrator.min-group-size=30", "--orchestrator.min-group-size: must not exceed samples_per_group"),
        ("--decode.engine.block-size-tokens=16", "prefill.engine.block_size_tokens is 8, decode"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_before_anything_is_made(toml, capsys, flag, message, monkeypatch):
    monkeypatch.chdir(toml.parent)
    with pytest.raises(SystemExit) as exit_info:
        main(["rl", "@", str(toml), flag])
    error = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert message in error
    assert error.count("\n") == 1
    assert not Path("runs").exists()


def test_a_dry_run_prints_and_makes_nothing(toml, capsys, monkeypatch):
    monkeypatch.chdir(toml.parent)
    with pytest.raises(SystemExit) as exit_info:
        main(["rl", "@", str(toml), "--orchestrator.max-off-policy-steps", "0", "--dry-run"])
    assert exit_info.value.code == 0
    assert "max_off_policy_steps = 0" in capsys.readouterr().out
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("statsu", "; did you mean 'status'?"),
        ("train", "; did you mean 'rl'?"),
        ("ls", "; did you mean 'status'?"),
        ("resume", "; did you mean 'rl --resume'?"),
        ("--verison", "; did you mean '--version'?"),
        ("-V", "; did you mean '--version'?"),
        ("dashboard", "; did you mean 'plot --follow'?"),
        ("validate", "; did you mean 'rl --dry-run'?"),
        ("chat", "; a run that is up answers programs"),
        ("export", "; a run leaves runs/NAME/checkpoints/final in Hugging Face's form"),
        ("logs", "; a run's logs are in runs/NAME/logs"),
        ("xyzzy", "; one of rl, up, sft, "),
    ],
)
def test_an_unknown_command_exits_with_2_and_what_may_be_meant(word, says, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main([word])
    assert exit_info.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: unknown command '{word}'{says}")


@pytest.mark.parametrize(
    ("words", "without", "extra"),
    [(["plot"], "rich", "launcher"), (["eval", "x"], "rich", "demo"), (["convert", "a", "b"], "torch", "convert")],
)
def test_a_command_names_the_smallest_extra_that_it_takes(words, without, extra):
    program = f"import sys; sys.modules[{without!r}] = None\nfrom slipstream.launcher.cli import main\nmain({words})"
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == 2
    said = f"error: slipstream {words[0]} needs {without}, which is not installed: pip install 'slipstream[{extra}]'\n"
    assert done.stderr == said


@pytest.mark.parametrize("words", [["a", "b"], ["--b"]])
def test_a_word_too_many_is_named(words, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["report", *words])
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == f"error: '{words[-1]}' is not understood; usage: slipstream report [RUN]\n"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("rl", "slipstream rl --resume RUN goes on"),
        ("sft", "--help data, --help start and --help training show them"),
        ("prepare", "--certs makes certificates"),
        ("certs", "--host NAME"),
    ],
)
def test_help_tells_what_a_command_takes_beside_its_fields(command, says, capsys):
    printed = []
    for words in ([command, "--help"], ["help", command]):
        with pytest.raises(SystemExit) as exit_info:
            main(words)
        assert exit_info.value.code == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert says in printed[0]
    assert "\n\n\n" not in printed[0]
    assert max(map(len, printed[0].splitlines())) <= 120


def test_stopping_when_nothing_is_up_is_no_failure(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        main(["stop"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == "no run is up\n"


@pytest.mark.parametrize("command", ["status", "stop", "report", "plot"])
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_a_command_on_a_run_explains_itself(command, flag, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main([command, flag])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: slipstream {command} [RUN]")


def test_contradictions_between_sections_are_found(config):
    check(config)
    with pytest.raises(ConfigError, match="environments: names must differ"):
        check(config.model_copy(update={"environments": [config.environments[0]] * 2}))


def test_the_command_needs_no_torch():
    code = "import sys, slipstream.launcher.rl, slipstream.launcher.status; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_flag_adds_a_tracker_and_a_second_one_sets_it():
    flags = [
        "orchestrator.tracking=tensorboard",
        "orchestrator.tracking=wandb",
        "orchestrator.tracking.wandb.project=mine",
    ]
    config = load_config(RUN_CONFIG, ["examples/demo.toml"], flags)
    tracking = config.section("orchestrator").tracking  # pyright: ignore[reportAttributeAccessIssue] made at run time
    assert [(each.type, getattr(each, "project", None)) for each in tracking] == [
        ("tensorboard", None),
        ("wandb", "mine"),
    ]
