"""The optimizer of a model: AdamW, SGD or Muon, in groups, with or without its state in host memory.

    optimizer = ModelOptimizer(model.named_parameters(), config)
    optimizer.zero_grad()
    loss.backward()                       # of each micro-batch: gradients add up in float32
    optimizer.step(number)                # from 1
    optimizer.state                       # what a checkpoint keeps, by parameter

Parameters may be DTensors: what an optimizer does to each of their elements it does to the part that a rank has, and
Muon gathers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slipstream.trainer.muon import STATE, Muon, local
from slipstream.trainer.optim_config import OptimConfig, ParameterGroupConfig
from slipstream.trainer.schedule import rate_factor

NOT_MUON = re.compile(r"tok_embeddings|lm_head|router\.gate")
"""Matrices that Muon leaves to AdamW: rows of them are looked up or are directions of their own."""

WRAPPERS = re.compile(r"(^|\.)(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)(?=\.|$)")


class ModelOptimizer:
    """Takes the steps of one model's trainable parameters. They are float32, and so is the sum of their gradients."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], config: OptimConfig) -> None:
        self._config = config
        self.parameters = {plain_name(name): p for name, p in named if p.requires_grad}
        for name, parameter in self.parameters.items():
            if parameter.dtype is not torch.float32:
                raise ValueError(f"{name} is {parameter.dtype}: what is trained is float32, as are its gradients")
        self._stepped = self.parameters
        if config.offload_state:
            self._stepped = {name: _on_host(parameter) for name, parameter in self.parameters.items()}
        self._optimizers = _build(self._stepped, config)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def learning_rate(self, step: int) -> float:
        """The rate of step `step`, from 1, before the factors of groups."""
        return self._config.lr * rate_factor(step, self._config)

    @torch.no_grad()
    def step(self, step: int) -> float:
        """Take step `step` (from 1) along the gradients that there are; returns its rate."""
        rate = self.learning_rate(step)
        if self._config.offload_state:
            self._take_gradients()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["lr_factor"]
            optimizer.step()
        if self._config.offload_state:
            for name, parameter in self.parameters.items():
                local(parameter).copy_(self._stepped[name])
        return rate

    @torch.no_grad()
    def weights_changed(self) -> None:
        """Somebody else has written to the parameters."""
        if self._config.offload_state:
            for name, parameter in self.parameters.items():
                self._stepped[name].copy_(local(parameter))

    @property
    def state(self) -> dict[str, dict[str, Tensor]]:
        """The live state of each parameter that has had a step, by its name. Moments lie as the parameter does."""
        states = ((name, self._state_of(name)) for name in self.parameters)
        return {name: state for name, state in states if state}

    def load_state(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over a state, by the same names; parameters without one start afresh."""
        unknown = sorted(states.keys() - self.parameters.keys())
        if unknown:
            raise ValueError(f"state of parameters that are not trained: {unknown[:3]}")
        for name in self.parameters:
            optimizer, parameter = self._optimizer_of(name)
            optimizer.state.pop(parameter, None)
            if name in states:
                host = self._config.offload_state
                state = {key: local(value).to("cpu") if host else value for key, value in states[name].items()}
                optimizer.state[parameter] = state

    @property
    def algorithm(self) -> str:
        """As configured."""
        return self._config.algorithm

    def state_keys(self, name: str) -> set[str]:
        """What a parameter's own optimizer keeps of it, by the names in `state`."""
        optimizer, _ = self._optimizer_of(name)
        if isinstance(optimizer, torch.optim.AdamW):
            return {"step", "exp_avg", "exp_avg_sq"}
        return {STATE if isinstance(optimizer, Muon) else "momentum_buffer"}

    def _state_of(self, name: str) -> dict[str, Tensor]:
        optimizer, parameter = self._optimizer_of(name)
        return {key: value for key, value in optimizer.state.get(parameter, {}).items() if isinstance(value, Tensor)}

    def _optimizer_of(self, name: str) -> tuple[Optimizer, nn.Parameter]:
        parameter = self._stepped[name]
        for optimizer in self._optimizers:
            if any(parameter is each for group in optimizer.param_groups for each in group["params"]):
                return optimizer, parameter
        raise KeyError(name)

    def _take_gradients(self) -> None:
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            self._stepped[name].grad = None if gradient is None else local(gradient).to("cpu")


def plain_name(name: str) -> str:
    """A parameter's name without what checkpointing or compilation wrapped around its module."""
    return WRAPPERS.sub("", name).lstrip(".")


def _on_host(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(local(parameter.detach()).to("cpu", copy=True))


def _build(parameters: Mapping[str, nn.Parameter], config: OptimConfig) -> list[Optimizer]:
    if config.algorithm == "sgd":
        groups = _grouped(parameters, config)
        nesterov = config.momentum > 0
        return [torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=nesterov)]
    matrices: dict[str, nn.Parameter] = {}
    if config.algorithm == "muon":
        matrices = {name: p for name, p in parameters.items() if p.ndim >= 2 and not NOT_MUON.search(name)}
    rest = {name: p for name, p in parameters.items() if name not in matrices}
    optimizers: list[Optimizer] = []
    if matrices:
        optimizers.append(Muon(_grouped(matrices, config), config.lr, config.momentum, config.weight_decay))
    if rest:
        groups = _grouped(rest, config)
        optimizers.append(torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True))
    return optimizers


def _grouped(parameters: Mapping[str, nn.Parameter], config: OptimConfig) -> list[dict[str, Any]]:
    """torch's groups: parameters of one rate factor and weight decay together, in their order."""
    grouped: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        own = _group_of(name, config.groups)
        decay = config.weight_decay if own is None or own.weight_decay is None else own.weight_decay
        grouped.setdefault((1.0 if own is None else own.lr_factor, decay), []).append(parameter)
    return [
        {"params": members, "lr_factor": factor, "weight_decay": decay} for (factor, decay), members in grouped.items()
    ]


def _group_of(name: str, groups: Iterable[ParameterGroupConfig]) -> ParameterGroupConfig | None:
    return next((group for group in groups if re.search(group.pattern, name)), None)
