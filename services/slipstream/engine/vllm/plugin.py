"""Our plug-in, which vLLM loads into each of its processes: expert capture beside a KV connector, and what is set up.

vLLM refuses the two together, since rows of positions that came over a connector are not known where they arrive. Here
they are known to be unknown (`transfers.py` marks them), so the refusal is lifted; those for other reasons stay. From
0.31 on it also refuses to capture with its first model runner, which ours can (`step_rows.py`): there both are lifted,
for engines with our worker alone. Entry point `vllm.general_plugins`.

A process of vLLM's that was spawned has nothing of what ours was told: `inherited.py` tells it.
"""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from slipstream.engine.vllm.inherited import apply_in_spawned
from slipstream.engine.vllm.versions import VERSIONS, version_of

TESTED = tuple(VERSIONS)
"""What the plug-in changes is not public: it refuses to load on any other version."""
WORKER_EXTENSION = "slipstream.engine.vllm.worker.WorkerExtension"
_LIFTED = "_slipstream_lifted"
_SIZES_OF_ONE = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
"""Capture does not go with more; vLLM would refuse that as well."""


def register() -> None:
    """Let vLLM capture experts with a connector, and apply what is set up. May be called again."""
    import vllm
    from vllm.config import VllmConfig

    version = vllm.__version__.split("+")[0]
    if version not in TESTED:
        raise RuntimeError(f"expert capture beside a KV connector was tested with vLLM {TESTED}, not with {version}")
    if version_of(version).routes_by_slot:
        _lift_at_init(VllmConfig)
    else:
        _lift_check(VllmConfig)
    apply_in_spawned()


def _lift_at_init(config: Any) -> None:
    original: Any = config.__post_init__
    if hasattr(original, _LIFTED):
        return

    def post_init(self: Any) -> None:
        transfer = self.kv_transfer_config
        if transfer is None or not transfer.is_kv_transfer_instance or not _captures(self.model_config):
            original(self)
            return
        _check_sizes(self.parallel_config)
        self.model_config.enable_return_routed_experts = False
        try:
            original(self)
        finally:
            self.model_config.enable_return_routed_experts = True

    setattr(post_init, _LIFTED, True)
    config.__post_init__ = post_init


def _lift_check(config: Any) -> None:
    original: Any = config._verify_aux_output_compatibility
    if hasattr(original, _LIFTED):
        return

    def verify(self: Any) -> None:
        if self.parallel_config.worker_extension_cls != WORKER_EXTENSION:
            original(self)
        elif self.aux_output_config.enabled:
            _check_sizes(self.parallel_config)

    setattr(verify, _LIFTED, True)
    config._verify_aux_output_compatibility = verify


def _check_sizes(parallel: Any) -> None:
    for name in _SIZES_OF_ONE:
        if getattr(parallel, name) > 1:
            raise ValueError(f"expert capture does not go with {name} > 1")


def _captures(model_config: Any) -> bool:
    return model_config is not None and model_config.enable_return_routed_experts
