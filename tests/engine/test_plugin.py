"""The plug-in that vLLM loads into its processes: where it finds it, where that refuses, and what spawned ones have."""

from __future__ import annotations

import importlib
import multiprocessing
import signal
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from slipstream.common.config import ConfigError
from slipstream.engine.vllm import inherited, plugin
from slipstream.engine.vllm.installed import check_plugin
from slipstream.engine.vllm.nixl_rest import WAIT_US
from tests.engine.spawned import Found, tell_found

ROOT = Path(__file__).parents[2]


def test_vllm_is_told_of_the_plugin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["slipstream"].partition(":")
    assert getattr(importlib.import_module(module), name) is plugin.register


def test_the_plugin_loads_on_tested_versions_alone(monkeypatch: pytest.MonkeyPatch):
    import vllm
    from vllm.config import VllmConfig

    assert vllm.__version__.split("+")[0] in plugin.TESTED
    plugin.register()
    lifted = VllmConfig.__post_init__
    plugin.register()
    assert VllmConfig.__post_init__ is lifted, "lifted twice"
    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    with pytest.raises(RuntimeError, match=r"not with 0\.31\.0"):
        plugin.register()


def test_a_plugin_that_vllm_does_not_load_is_missed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    check_plugin()
    monkeypatch.setenv("VLLM_PLUGINS", "other,slipstream")
    check_plugin()
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(ConfigError, match="VLLM_PLUGINS is 'other'; engines need the plug-in 'slipstream' as well"):
        check_plugin()
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setattr(metadata, "entry_points", lambda group: metadata.EntryPoints())
    with pytest.raises(ConfigError, match="slipstream is on the path, but not installed"):
        check_plugin()


@pytest.mark.parametrize("nixl", [True, False])
def test_a_process_that_vllm_spawns_has_what_one_that_it_forks_has(
    nixl: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(ROOT))  # is passed on, and `tests` is found there
    monkeypatch.setenv(inherited.VARIABLE, "")  # taken back at the end, as is what is set up here
    monkeypatch.setattr(inherited, "_apply", lambda *asked: None)
    inherited.set_up(tmp_path, 3, nixl)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=tell_found, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(100), "nothing was told"
    found: Found = ours.recv()
    process.join(30)
    for store in found.stores:
        assert store.startswith(f"file://{tmp_path}/store_{tmp_path.name}_")
    assert found.death_signal == signal.SIGKILL
    assert found.threads == 3
    assert found.nixl_wait_us == (WAIT_US if nixl else None)
