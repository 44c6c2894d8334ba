"""`slipstream prepare`: what it leaves for whoever starts the processes, and what it refuses."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc

from slipstream.common.config import ConfigError
from slipstream.common.tls import TlsMaterial
from slipstream.engine.vllm import installed
from slipstream.launcher.certs import CertificateFiles, make_certificates
from slipstream.launcher.cli import main
from slipstream.launcher.errors import RunDirError
from slipstream.launcher.prepare import run_prepare

ROOT = Path(__file__).resolve().parents[3]
FILES = ("@", str(ROOT / "examples" / "demo.toml"), "@", str(ROOT / "deploy" / "compose.toml"))


def prepare(directory: Path, *arguments: str) -> int:
    return run_prepare([*FILES, "--run.directory", str(directory), *arguments])


def test_each_process_gets_its_file_its_name_and_the_secrets_and_a_repeat_keeps_them(tmp_path, capsys):
    assert prepare(tmp_path, "--certs") == 0
    run = tmp_path / "demo"
    endpoints = tomllib.loads((run / "endpoints.toml").read_text())["endpoints"]
    assert {path.stem for path in (run / "configs").iterdir()} == set(endpoints)
    for replica, address in endpoints.items():
        config = tomllib.loads((run / "configs" / f"{replica}.toml").read_text())
        port = int(address.partition(":")[2])
        assert config["listen"] == {"host": "0.0.0.0", "port": port, "advertise": address}
        assert config["auth"]["token_file"] == str(run / "token")
        assert config["tls"]["ca_file"] == str(run / "certs" / "ca.pem")
        assert config["redis"]["url"] == "redis://valkey:6379/0"
        assert "file" not in config["log"]
    modes = {path.name: path.stat().st_mode & 0o777 for path in (run / "token", run / "certs" / "service-key.pem")}
    assert modes == {"token": 0o600, "service-key.pem": 0o600}
    assert not (run / "certs" / "ca-key.pem").exists()
    token = (run / "token").read_text()
    assert prepare(tmp_path, "--certs") == 0
    assert capsys.readouterr().out.endswith("is prepared already; kept\n")
    assert (run / "token").read_text() == token
    with pytest.raises(RunDirError, match="was not made from this configuration"):
        prepare(tmp_path, "--certs", "--orchestrator.total-steps", "3")


async def test_a_prepared_run_is_asked_for_its_status_without_a_launcher(tmp_path, capsys):
    server = grpc.aio.server()
    answers = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
    health_pb2_grpc.add_HealthServicer_to_server(answers, server)
    files = CertificateFiles(tmp_path / "certs")
    make_certificates(files.directory, ["localhost"], 1)
    tls = TlsMaterial.load(files.tls)
    assert tls is not None
    port = server.add_secure_port("localhost:0", tls.server_credentials())
    names = tomllib.loads((ROOT / "deploy" / "compose.toml").read_text())["endpoints"]
    told = [f"--endpoints.{name}=localhost:{port}" for name in names]
    told += [f"--tls.{key}={path}" for key, path in files.tls.model_dump(mode="json").items()]
    await asyncio.to_thread(prepare, tmp_path, *told)
    capsys.readouterr()

    async def status() -> str:
        with pytest.raises(SystemExit):
            await asyncio.to_thread(main, ["status", str(tmp_path / "demo")])
        return capsys.readouterr().out

    await server.start()
    said = await status()
    await server.stop(None)
    assert "broadcaster   serving" in said
    assert "answers" not in said
    assert (await status()).startswith("demo is prepared, and none of its processes answers: 0 of 80 steps; ")


def test_hosts_with_vllm_are_prepared_on_one_without(tmp_path, monkeypatch):
    monkeypatch.setattr(installed, "DISTRIBUTIONS", ("not-installed",))
    pools = [f"--{pool}.engine.{words}" for pool in ("prefill", "decode") for words in ("type=vllm", "connector=nixl")]
    assert prepare(tmp_path, "--certs", *pools) == 0
    config = tomllib.loads((tmp_path / "demo" / "configs" / "decode-1.toml").read_text())
    assert (config["engine"]["type"], config["engine"]["connector"]) == ("vllm", "nixl")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give --certs, or a"),
        (["--certs", "--endpoints.decode-9", "decode-9:7000"], "endpoints.decode-9: this run has no such process"),
        (["--certs", "--decode.replicas", "3"], "endpoints.decode-3 is required"),
        (["--certs", "--endpoints.router", "router"], "endpoints.router: 'router' is no host:port"),
    ],
)
def test_what_cannot_be_reached_or_trusted_is_refused_before_anything_is_made(tmp_path, arguments, says):
    with pytest.raises(ConfigError) as refused:
        prepare(tmp_path, *arguments)
    assert says in str(refused.value)
    assert list(tmp_path.iterdir()) == []
