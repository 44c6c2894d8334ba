"""Memory: what a run needs, what is left, and who was killed for want of it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from slipstream.common.config import ConfigError, load_config
from slipstream.launcher.config import RUN_CONFIG
from slipstream.launcher.errors import ServiceDiedError
from slipstream.launcher.memory import MIB, available_bytes, oom_kills
from slipstream.launcher.needs import ENVIRONMENT_MIB, check_memory, needed_bytes
from slipstream.launcher.process import ProcessSpec
from slipstream.launcher.supervisor import Supervisor

DEMO = Path(__file__).parents[3] / "examples" / "demo.toml"


@pytest.fixture
def proc(tmp_path):
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 8000000 kB\nMemFree: 100 kB\nMemAvailable: 4096000 kB\n")
    (proc / "self" / "cgroup").write_text("0::/user/session\n")
    (proc / "vmstat").write_text("pgfault 5\noom_kill 2\n")
    return proc


def write_limit(cgroup: Path, limit: str, used: int, cache: int) -> None:
    cgroup.mkdir(parents=True, exist_ok=True)
    (cgroup / "memory.max").write_text(f"{limit}\n")
    (cgroup / "memory.current").write_text(f"{used}\n")
    (cgroup / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")
    (cgroup / "memory.events").write_text("oom 9\noom_kill 3\n")


def test_without_a_limit_the_machine_counts(proc, tmp_path):
    assert available_bytes(proc, tmp_path / "cgroup") == 4000 * MIB


def test_the_tightest_cgroup_counts_and_its_cache_is_free(proc, tmp_path):
    cgroup = tmp_path / "cgroup"
    write_limit(cgroup / "user" / "session", "max", 10, 0)
    write_limit(cgroup / "user", str(500 * MIB), 450 * MIB, 50 * MIB)
    assert available_bytes(proc, cgroup) == 100 * MIB


def test_the_first_version_of_cgroups_counts_too(proc, tmp_path):
    (proc / "self" / "cgroup").write_text("5:cpu:/a\n4:memory:/a\n")
    directory = tmp_path / "cgroup" / "memory" / "a"
    directory.mkdir(parents=True)
    (directory / "memory.limit_in_bytes").write_text(str(300 * MIB))
    (directory / "memory.usage_in_bytes").write_text(str(100 * MIB))
    (directory / "memory.stat").write_text("total_inactive_file 0\n")
    assert available_bytes(proc, tmp_path / "cgroup") == 200 * MIB


def test_more_workers_and_more_blocks_need_more():
    small = needed_bytes(load_config(RUN_CONFIG, [DEMO]))
    assert 1000 * MIB < small < 2500 * MIB
    assert needed_bytes(load_config(RUN_CONFIG, [DEMO], ["decode.replicas=9"])) > small + 7 * 200 * MIB
    assert needed_bytes(load_config(RUN_CONFIG, [DEMO], ["decode.engine.block-count=1000000"])) > 10_000 * MIB
    one = load_config(RUN_CONFIG, [DEMO])
    more = one.model_copy(update={"environments": [*one.environments, *one.environments]})
    assert needed_bytes(more) == small + len(one.environments) * ENVIRONMENT_MIB * MIB  # a process each
    vllm = ["decode.engine.type=vllm"]
    assert needed_bytes(load_config(RUN_CONFIG, [DEMO], vllm)) > small + 2 * 500 * MIB
    offload = [*vllm, "decode.engine.offload.memory-bytes=8000000000"]
    assert needed_bytes(load_config(RUN_CONFIG, [DEMO], offload)) > 2 * 8_000_000_000


def test_what_is_on_cards_takes_no_memory_of_the_machine_but_for_its_copies():
    on_cards = ["decode.engine.type=vllm", "decode.replicas=1", "prefill.replicas=0", "model.dim=2048"]
    on_cards += ["trainer.compute.device=cuda", "decode.engine.device=cuda"]
    config = load_config(RUN_CONFIG, [DEMO], on_cards)
    weights = 4 * config.model.parameter_count(128)
    small = load_config(RUN_CONFIG, [DEMO], [each for each in on_cards if "dim" not in each])
    more = weights - 4 * small.model.parameter_count(128)
    assert needed_bytes(config) - needed_bytes(small) == 5 * more
    assert needed_bytes(
        load_config(RUN_CONFIG, [DEMO], [*on_cards, "decode.engine.block-count=1000000"])
    ) == needed_bytes(config)


def test_a_reference_policy_needs_one_more_copy_of_the_weights():
    small = load_config(RUN_CONFIG, [DEMO])
    held = load_config(RUN_CONFIG, [DEMO], ["trainer.loss.reference-kl-coefficient=0.1"])
    assert needed_bytes(held) - needed_bytes(small) == 4 * small.model.parameter_count(128)


def test_a_run_that_does_not_fit_is_refused_before_it_starts():
    config = load_config(RUN_CONFIG, [DEMO])
    with pytest.raises(ConfigError, match=r"needs about \d+ MiB of memory and 512 MiB are available; end other"):
        check_memory(config, lambda: 512 * MIB)
    check_memory(config, lambda: 4000 * MIB)
    check_memory(load_config(RUN_CONFIG, [DEMO], ["launcher.check_memory=false"]), lambda: 0)


def test_kills_for_want_of_memory_are_counted(proc, tmp_path):
    write_limit(tmp_path / "cgroup" / "user", "max", 0, 0)
    assert oom_kills(proc, tmp_path / "cgroup") == 5
    assert oom_kills(tmp_path / "nowhere", tmp_path / "nowhere") == 0


@pytest.mark.parametrize(("kills", "says"), [(0, "(killed by SIGKILL)"), (1, "as the machine ran out of memory)")])
async def test_a_service_that_the_kernel_killed_is_named_so(tmp_path, kills, says):
    count = [0]
    supervisor = Supervisor(oom_kills=lambda: count[0])
    spec = ProcessSpec("decode-1", ("sleep", "60"), tmp_path / "log", tmp_path / "out")
    await supervisor.start([spec])
    count[0] = kills
    (process,) = supervisor._running.values()
    process.signal(signal.SIGKILL)
    with pytest.raises(ServiceDiedError) as caught:
        await asyncio.wait_for(supervisor.watch(), 30)
    assert says in str(caught.value)
    await supervisor.stop()
