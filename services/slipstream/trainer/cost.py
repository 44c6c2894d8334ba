"""What a step costs: FLOPs that the model needs, the card's peak, memory. Imports torch only where a card is asked.

*Model FLOPs* are those of the mathematics, whatever the implementation computes beside it (PaLM, appendix B:
https://arxiv.org/abs/2204.02311): a trained weight takes 6 FLOPs a token, multiply and add in the forward pass, for the
gradient of the input and for that of the weight; a frozen one 4. Of the experts only those that a token takes count,
of the head only the rows whose logits the loss needs, and of attention only the pairs of tokens that see each other:
12 FLOPs a pair, head, layer and head size. PaLM and torchtitan count all pairs of a sequence, twice as many.
Recomputed activations count for nothing.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.models.base import Model

if TYPE_CHECKING:
    import torch

STEP_PHASES = ("forward", "loss", "backward", "optimizer", "frozen", "replay_check")
"""Parts of a step's training whose time is reported. `frozen`: reference policy and teacher. `replay_check`: one
micro-batch once more with live routes, every few steps."""

_EXPERT = re.compile(r"\.experts\.\d+\.")

PEAK_FLOPS: tuple[tuple[str, float], ...] = (
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("H20", 148e12),
    ("GB200", 2.5e15),
    ("GB300", 2.5e15),
    ("B200", 2.25e15),
    ("B300", 2.25e15),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("MI250X", 191.5e12),
    ("MI300X", 1307e12),
    ("MI325X", 1307e12),
    ("MI355X", 2.5e15),
)
"""Dense bfloat16 FLOPs a second of cards, by a word of their name; from the makers' data sheets, without sparsity."""


def peak_flops(device: torch.device, configured: float | None = None) -> float | None:
    """The most FLOPs a second of a device: as configured, else by its name; None where nobody knows, as on a CPU."""
    if configured is not None or device.type != "cuda":
        return configured
    import torch

    return peak_of_card(torch.cuda.get_device_name(device))


def peak_of_card(name: str) -> float | None:
    """That of a card as its driver names it, "NVIDIA H100 80GB HBM3" for one."""
    for words, peak in PEAK_FLOPS:
        if all(re.search(rf"\b{re.escape(word)}\b", name) for word in words.split()):
            return peak
    return None


@dataclass(frozen=True)
class ModelCost:
    """FLOPs of a forward and backward pass."""

    token_flops: float
    """An input: weights, head aside."""
    head_flops: float
    """A row of logits."""
    pair_flops: float
    """A pair of tokens of which one sees the other."""

    @classmethod
    def of(cls, model: Model) -> ModelCost:
        """That of a model with all its weights, before anything is spread over ranks."""
        sizes = model.sizes
        share = sizes.top_k / sizes.n_experts if sizes.n_experts else 1.0
        views = model.hf_views()
        head = views.get("lm_head.weight", views["model.embed_tokens.weight"]).numel()
        body = sum(
            view.numel() * (share if _EXPERT.search(name) else 1.0)
            for name, view in views.items()
            if name not in ("lm_head.weight", "model.embed_tokens.weight")
        )
        counts = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
        trained = sum(n for n, requires_grad in counts if requires_grad) / max(sum(n for n, _ in counts), 1)
        per_weight = 4.0 + 2.0 * trained
        head_dims = sizes.head_dim + getattr(sizes, "v_head_dim", sizes.head_dim)  # of keys, and of values
        return cls(per_weight * body, per_weight * head, 6.0 * sizes.n_layers * sizes.n_heads * head_dims)

    def flops(self, lengths: Sequence[int], target_count: int) -> float:
        """Of documents of these lengths, and so many rows of logits."""
        pairs = sum(length * (length + 1) / 2 for length in lengths)
        return self.token_flops * sum(lengths) + self.head_flops * target_count + self.pair_flops * pairs


def speed(
    model_flops: float, token_count: float, step_s: float, peak: float | None, ranks: int = 1
) -> dict[str, float]:
    """Figures of a step that took `step_s`, of all ranks together; `mfu` only where the peak is known."""
    step_s = max(step_s, 1e-9)
    figures = {"trainer_tokens_per_s": token_count / step_s, "model_flops_per_s": model_flops / step_s}
    return figures if peak is None else {**figures, "mfu": model_flops / step_s / (peak * ranks)}


def memory(device: torch.device) -> dict[str, float]:
    """Bytes that this process holds: on a card what tensors take and what is reserved for them, at most since the last
    call; on a CPU its resident memory, now and at most since its start."""
    if device.type == "cuda":
        import torch

        figures = {
            "memory_allocated_bytes": float(torch.cuda.max_memory_allocated(device)),
            "memory_reserved_bytes": float(torch.cuda.max_memory_reserved(device)),
        }
        torch.cuda.reset_peak_memory_stats(device)
        return figures
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"memory_resident_bytes": float(resident), "memory_resident_max_bytes": float(most)}
