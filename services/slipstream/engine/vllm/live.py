"""The weights a vLLM model computes with, by Hugging Face names.

vLLM keeps them fused, on the CPU packed for its kernels, and quantised where it is told to. Where its parameters are
just those of the checkpoint beside each other they are read as they are. Else a linear layer is read through its own
kernel, which gives the weights back exactly when it is fed the unit vectors; experts that are packed are compared with
what was applied, packed anew; experts that are quantised are multiplied by their scales.

What reads back equal to what was applied is given out as that, so that zeros keep their sign; so is what is quantised
and no further from it than `QUANTIZATION_ERROR`. A matrix of which vLLM made others (`latent.py`) reads back as it is
only where those are of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.engine.vllm.latent import is_cut_of, latent_layers
from slipstream.engine.vllm.layout import Group

_ROWS = 1024
"""Unit vectors fed at once."""
_AS_THEY_ARE = ("bias", "e_score_correction_bias")
"""Parameters that no kernel packs. The second, of which experts are chosen, is float32 whatever the weights are."""
QUANTIZATION_ERROR = 0.1
"""Length of the difference to what was applied, by the length of that."""


class LiveWeights:
    """Reads a model of vLLM, of one rank."""

    def __init__(self, model: nn.Module, groups: tuple[Group, ...], applied: Mapping[str, Tensor]) -> None:
        self._modules = dict(model.named_modules())
        self._groups = groups
        self._applied = applied
        self._latent = {layer.kv_b_proj: layer for layer in latent_layers(model)}
        self.errors: dict[str, float] = {}
        """Of the quantised modules that were read."""

    def tensors(self, names: Set[str]) -> dict[str, Tensor]:
        """Some of the parameters that were applied, as they are in use, in the dtype applied.

        One that is equal to what was applied is given out as that very tensor.
        """
        live: dict[str, Tensor] = {}
        for group in self._groups:
            wanted = names & set(group.names)
            if wanted:
                parameter = self.parameter(group)
                read = self._read(group) if parameter is None else self._cut(group, parameter, wanted)
                alike = self._cut_alike(group, read)
                live.update({name: each if alike else torch.full_like(each, torch.nan) for name, each in read.items()})
        return {name: live[name] for name in names}

    def _cut_alike(self, group: Group, read: Mapping[str, Tensor]) -> bool:
        """Whether what vLLM made of a matrix after loading is of what was read."""
        if (layer := self._latent.get(self.module(group))) is None:
            return True
        (weight,) = read.values()
        return is_cut_of(layer, weight.to(layer.W_UV.device))

    def parameter(self, group: Group) -> Tensor | None:
        """The parameter of a group if it is the group's tensors beside each other, else None. May have more rows."""
        module = self.module(group)
        tensor = getattr(module, group.parameter)
        first = self._applied[group.names[0]]
        if group.parameter in _AS_THEY_ARE:
            return tensor.data
        plain = tensor.is_contiguous() and tensor.dtype == first.dtype and not _quantised(module)
        if tensor.device.type == "cpu":  # packed in place, by a kernel that tells nobody
            packs = hasattr(module, "quant_method")
            plain = plain and (not packs or group.module.endswith("embed_tokens"))
        elif group.of_experts:
            plain = plain and module.quant_method.unquantized_backend.value in ("TRITON", "BATCHED_TRITON")
        return tensor.data if plain and tensor.numel() >= self._size(group) else None

    def module(self, group: Group) -> Any:
        if not group.of_experts:
            return self._modules[group.module]
        return next(m for key, m in self._modules.items() if key.startswith(group.module) and _is_experts(m))

    def quantised(self) -> dict[str, str]:
        """Modules that are quantised, by what."""
        found = {each.module: self.module(each) for each in self._groups}
        return {name: type(module.quant_method).__name__ for name, module in found.items() if _quantised(module)}

    def _read(self, group: Group) -> dict[str, Tensor]:
        applied = [self._applied[name] for name in group.names]
        module = self.module(group)
        if not group.of_experts:
            whole = self._linear(module, applied[0].shape[1]).flatten()[: self._size(group)].cpu()
        elif _quantised(module):
            whole = _dequantise(module, group.parameter).flatten().cpu()
        else:
            equal = self._packed_equal(group, module)
            whole = torch.cat([t.flatten() if equal else torch.full_like(t, torch.nan).flatten() for t in applied])
        before = torch.cat([tensor.flatten() for tensor in applied])
        if _quantised(module):
            error = float((whole.float() - before.float()).norm() / before.float().norm().clamp_min(1e-30))
            self.errors[group.module] = max(error, self.errors.get(group.module, 0.0))
            same = error <= QUANTIZATION_ERROR
        else:
            same = torch.equal(whole, before)
        if same:
            return dict(zip(group.names, applied, strict=True))
        parts = whole.to(before.dtype).split([tensor.numel() for tensor in applied])
        return {name: p.view(t.shape) for name, p, t in zip(group.names, parts, applied, strict=True)}

    def _cut(self, group: Group, parameter: Tensor, wanted: Set[str]) -> dict[str, Tensor]:
        """Some tensors out of a parameter that is just them: the rest of it is not moved."""
        flat, found, at = parameter.flatten(), {}, 0
        for name in group.names:
            applied = self._applied[name]
            if name in wanted:
                live = flat[at : at + applied.numel()].view(applied.shape)  # compared where it lies
                same = torch.equal(live, applied.to(live.device, live.dtype, non_blocking=True))
                found[name] = applied if same else live
            at += applied.numel()
        return found

    def _size(self, group: Group) -> int:
        return sum(self._applied[name].numel() for name in group.names)

    def _linear(self, module: Any, width: int) -> Tensor:
        """The matrix `[out, in]` of a linear layer, through its kernel."""
        example = next(iter(self._applied.values()))
        device = next(tensor.device for tensor in (*module.parameters(), *module.buffers()))
        columns = []
        for start in range(0, width, _ROWS):
            count = min(_ROWS, width - start)
            units = torch.zeros(count, width, dtype=example.dtype, device=device)
            units[torch.arange(count), start + torch.arange(count)] = 1
            columns.append(module.quant_method.apply(module, units))
        return torch.cat(columns).t().contiguous()

    def _packed_equal(self, group: Group, module: Any) -> bool:
        """Whether packed experts are what was applied, packed."""
        prefix = f"{group.module}."
        both = {g.parameter: g for g in self._groups if g.module == group.module and g.of_experts}
        packed: Any = nn.Module()
        for parameter, names in ((key, each.names) for key, each in both.items()):
            tensors = [self._applied[name] for name in names]
            count = len({name.removeprefix(prefix).partition(".")[0] for name in names})
            whole = torch.cat([tensor.flatten() for tensor in tensors])
            shape = (count, whole.numel() // count // tensors[0].shape[1], tensors[0].shape[1])
            assert prod(shape) == whole.numel()
            packed.register_parameter(parameter, nn.Parameter(whole.view(shape), requires_grad=False))
        module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(packed)
        return torch.equal(getattr(packed, group.parameter), getattr(module, group.parameter))


def _quantised(module: Any) -> bool:
    """Whether a module's weights are kept with fewer bits than it was given."""
    parameters = [getattr(module, name, None) for name in ("weight", "w13_weight")]
    return any(tensor is not None and tensor.element_size() == 1 for tensor in parameters)


def _dequantise(module: Any, parameter: str) -> Tensor:
    """Experts `[experts, out, in]`, times a scale for each expert, row or block of 128 by 128."""
    weight = getattr(module, parameter).float()
    name = parameter.removesuffix("_weight")
    scale = getattr(module, f"{name}_weight_scale_inv", None)
    if scale is None:
        scale = getattr(module, f"{name}_weight_scale")
    scale = scale.float()
    blocks = tuple(-(-size // 128) for size in weight.shape[1:])
    if scale.ndim == 3 and scale.shape[1:] == blocks:
        scale = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
        return weight * scale[:, : weight.shape[1], : weight.shape[2]]
    return weight * scale.reshape(weight.shape[0], -1, 1)


def own_groups(model: nn.Module, groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """The groups, where experts are spread over ranks with those of this one alone."""
    spread = {name: places for name, module in model.named_modules() if (places := _places(module)) is not None}
    found = []
    for group in groups:
        places = next((held for name, held in spread.items() if name.startswith(group.module)), None)
        if places is not None and group.of_experts:
            prefix = f"{group.module}."
            own = tuple(name for name in group.names if places[int(name.removeprefix(prefix).partition(".")[0])] >= 0)
            group = Group(group.module, group.parameter, own)
        found.append(group)
    return tuple(found)


def _places(module: nn.Module) -> list[int] | None:
    """Where each expert lies in a module of them, -1 for those of other ranks; None if it has them all."""
    places = getattr(module, "expert_map", None) if _is_experts(module) else None
    return None if places is None else places.tolist()


def _is_experts(module: nn.Module) -> bool:
    return hasattr(module, "w13_weight") and hasattr(module, "quant_method")
