"""New weights for a vLLM model, in place, in the process that runs it.

vLLM prepares expert weights for its CPU kernel when a model is loaded and never again: after any of its own in-place
updates the kernel reads unprepared weights, and the output is wrong without an error. `mend_expert_reload` prepares
them each time. A head that is the embedding has prepared weights of its own there, and a reload prepares the
embedding's alone: `prepare_tied_head` does the head's. A reload that fails part-way leaves layers without storage;
`abandon_reload` puts the old ones back.
"""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from torch import nn
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload import layerwise

_MENDED = "_slipstream_mended"


def mend_expert_reload() -> None:
    """Prepare expert weights for the CPU kernel at each load, not only at the first."""
    original: Any = UnquantizedFusedMoEMethod._setup_kernel
    if hasattr(original, _MENDED):
        return

    def setup_kernel(self: Any, layer: nn.Module, w13: Any, w2: Any) -> None:
        reloading = self.moe_kernel is not None
        original(self, layer=layer, w13=w13, w2=w2)
        if reloading and self.unquantized_backend == UnquantizedMoeBackend.CPU:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    setattr(setup_kernel, _MENDED, True)
    UnquantizedFusedMoEMethod._setup_kernel = setup_kernel  # type: ignore[method-assign]


def prepare_tied_head(model: Any) -> None:
    """Prepare an output head anew that shares its matrix with the embedding, once that was loaded."""
    head, embedding = getattr(model, "lm_head", None), model.model.embed_tokens
    if head is not None and head is not embedding and getattr(head, "weight", None) is embedding.weight:
        head.quant_method.process_weights_after_loading(head)


def abandon_reload(model: nn.Module) -> None:
    """Undo a reload that did not come to its end."""
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
        info.reset()
    layerwise.LOADING_LAYERS.clear()
