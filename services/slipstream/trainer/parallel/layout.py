"""How the ranks of a trainer share the work. Pure: no torch, no processes.

    layout = Layout(data=2, context=2, expert=2)     # 4 ranks
    layout.coordinate(3)                             # (data rank 1, context rank 1)

Ranks of one context group are neighbours. They hold slices of the same micro-batches; data ranks hold different ones.
Every parameter is sharded over all ranks, except that experts are spread over `expert` neighbouring ranks first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.models.base import Sizes

ContextKind = Literal["ulysses", "ring"]
"""How attention sees the tokens of other ranks: heads are exchanged for tokens, or keys and values go round."""


@dataclass(frozen=True)
class Layout:
    """Degrees of each kind of parallelism."""

    data: int = 1
    """Ranks with micro-batches of their own."""

    expert: int = 1
    """Ranks that share the experts of a layer; a divisor of `data * context`."""

    context: int = 1
    """Ranks that share the tokens of a micro-batch."""

    context_kind: ContextKind = "ulysses"

    def __post_init__(self) -> None:
        if min(self.data, self.expert, self.context) < 1:
            raise ValueError("degrees of parallelism are at least 1")
        if self.rank_count % self.expert:
            raise ValueError(f"expert: {self.expert} does not divide the {self.rank_count} ranks")

    @property
    def rank_count(self) -> int:
        return self.data * self.context

    def coordinate(self, rank: int) -> tuple[int, int]:
        """Data rank and context rank of a rank."""
        if not 0 <= rank < self.rank_count:
            raise ValueError(f"rank {rank} is not one of {self.rank_count}")
        return divmod(rank, self.context)

    def check_heads(self, n_heads: int, n_kv_heads: int) -> None:
        """Raise `ValueError` where heads cannot be shared out as Ulysses does."""
        if self.context == 1 or self.context_kind != "ulysses":
            return
        if n_heads % self.context or (n_kv_heads % self.context and self.context % n_kv_heads):
            raise ValueError(
                f"context: {self.context} ranks cannot share {n_heads} heads and {n_kv_heads} key-value heads evenly"
            )

    def check_experts(self, n_experts: int) -> None:
        """Raise `ValueError` where experts cannot be spread."""
        if n_experts % self.expert:
            raise ValueError(f"expert: {self.expert} ranks cannot share {n_experts} experts evenly")

    def check_sizes(self, sizes: Sizes) -> None:
        """Raise `ValueError` where a model of these sizes cannot be shared out."""
        self.check_heads(sizes.n_heads, sizes.n_kv_heads)
        self.check_experts(sizes.n_experts)
