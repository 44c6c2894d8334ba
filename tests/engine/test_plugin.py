"""The plug-in that lets vLLM capture experts beside a connector: where vLLM finds it, and where it refuses."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest

from slipstream.engine.vllm import plugin

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
