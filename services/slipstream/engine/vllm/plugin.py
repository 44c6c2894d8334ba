"""Expert capture beside a KV connector, as a plug-in that vLLM loads into each of its processes.

vLLM 0.30.0 refuses the two together, since rows of positions that came over a connector are not known where they
arrive. Here they are known to be unknown (`transfers.py` marks them), so the refusal is lifted; those for other reasons
stay. Entry point `vllm.general_plugins`.
"""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

TESTED = ("0.30.0",)
"""What the plug-in changes is not public: it refuses to load on any other version."""
_LIFTED = "_slipstream_lifted"


def register() -> None:
    """Let vLLM capture experts with a connector. May be called again."""
    import vllm
    from vllm.config import VllmConfig

    version = vllm.__version__.split("+")[0]
    if version not in TESTED:
        raise RuntimeError(f"expert capture beside a KV connector was tested with vLLM {TESTED}, not with {version}")
    original: Any = VllmConfig.__post_init__
    if hasattr(original, _LIFTED):
        return

    def post_init(self: Any) -> None:
        transfer = self.kv_transfer_config
        if transfer is None or not transfer.is_kv_transfer_instance or not _captures(self.model_config):
            original(self)
            return
        for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(self.parallel_config, name) > 1:  # what vLLM would refuse as well
                raise ValueError(f"expert capture does not go with {name} > 1")
        self.model_config.enable_return_routed_experts = False
        try:
            original(self)
        finally:
            self.model_config.enable_return_routed_experts = True

    setattr(post_init, _LIFTED, True)
    VllmConfig.__post_init__ = post_init  # type: ignore[method-assign]


def _captures(model_config: Any) -> bool:
    return model_config is not None and model_config.enable_return_routed_experts
