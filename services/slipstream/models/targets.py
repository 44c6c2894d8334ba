"""Which matrices of a checkpoint are projections, and of what. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection

GROUPS = ("attention", "mlp", "experts")
"""Projections of attention, of feed-forward networks, and of the experts that tokens choose."""


def group_of(name: str) -> str | None:
    """What kind of projection a checkpoint's tensor is; None for embeddings, head, router, norms and biases."""
    if not last_part(name).endswith(("_proj", "_with_mqa")):
        return None
    if ".self_attn." in name:
        return "attention"
    return "experts" if ".experts." in name else "mlp" if ".mlp." in name else None


def last_part(name: str) -> str:
    """Of a weight's name: that of its projection."""
    return name.removesuffix(".weight").rpartition(".")[2]


def checked(targets: tuple[str, ...]) -> tuple[str, ...]:
    """Targets as configured; raises `ValueError` for what can be no name."""
    if not targets or any(not name or not name.replace("_", "").isalnum() for name in targets):
        raise ValueError('name "attention", "mlp", "experts" or projections such as "q_proj"')
    return targets


def chosen(names: Collection[str], targets: tuple[str, ...]) -> set[str]:
    """The tensors that targets name, each a group or the last part of a projection's name.

    Raises:
        ValueError: one names nothing that the model has; of groups, all of them together.
    """
    found: set[str] = set()
    kinds = {name: (last_part(name), group_of(name)) for name in names}
    for target in targets:
        meant = {name for name, (last, group) in kinds.items() if group and target in (last, group)}
        if not meant and target not in GROUPS:
            known = sorted({last for last, group in kinds.values() if group})
            raise ValueError(f"the model has no {target!r}; it has {', '.join(known)}")
        found |= meant
    if not found:
        raise ValueError(f"the model has nothing of {', '.join(targets)}")
    return found
