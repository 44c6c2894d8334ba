"""The master of a Mooncake store: started where a pool names one on this host, and counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.common.config import load_config
from slipstream.launcher.config import RUN_CONFIG
from slipstream.launcher.memory import MIB
from slipstream.launcher.mooncake import masters_of
from slipstream.launcher.needs import needed_bytes

EXAMPLES = Path(__file__).parents[3] / "examples"
VLLM = [EXAMPLES / "demo.toml", EXAMPLES / "vllm-cpu.toml"]


def store(address: str) -> list[str]:
    return [f"decode.engine.offload.mooncake-master={address}", "decode.engine.offload.mooncake-bytes=1073741824"]


@pytest.mark.parametrize(
    ("overrides", "masters"),
    [
        ([], []),
        (store("127.0.0.1:15999"), ["127.0.0.1:15999"]),
        (store("kv.example.org:15999"), []),
        (["decode.engine.offload.memory-bytes=1048576"], []),
    ],
    ids=["none", "here", "elsewhere", "memory alone"],
)
def test_a_master_on_loopback_is_the_launchers_to_start(overrides: list[str], masters: list[str]):
    assert masters_of(load_config(RUN_CONFIG, VLLM, overrides)) == masters


def test_memory_for_offloaded_kv_is_counted_in_what_a_run_needs():
    without = needed_bytes(load_config(RUN_CONFIG, VLLM))
    assert needed_bytes(load_config(RUN_CONFIG, VLLM, store("127.0.0.1:15999"))) == without + 2048 * MIB
