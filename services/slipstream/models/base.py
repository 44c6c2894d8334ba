"""What an architecture gives, so that trainer and engine run it without knowing it. Imports no torch.

An architecture is a module with three functions (`Architecture`) that makes a torch module (`Model`). Trainer and
engine run the same model; what differs is the *context* they pass, which every attention layer asks to attend.

T = tokens of one pass, N = query heads, G = key and value heads, H = head size, D = width, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from slipstream.models.routing import Routes


class Sizes(Protocol):
    """What others need to know of a model before it is built."""

    @property
    def architecture(self) -> str:
        """The name or import path that finds the architecture again."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context_tokens(self) -> int: ...

    @property
    def n_layers(self) -> int:
        """Layers with attention, each of which has a part of the KV cache."""
        ...

    @property
    def n_heads(self) -> int: ...

    @property
    def n_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def moe_layers(self) -> int:
        """Layers whose experts are recorded; 0 for a dense model."""
        ...

    @property
    def n_experts(self) -> int:
        """Experts of a layer; 0 for a dense model."""
        ...

    @property
    def top_k(self) -> int: ...

    def to_hf(self) -> dict[str, Any]:
        """The model's `config.json`; `read_sizes` of it gives these sizes again."""
        ...


class Context(Protocol):
    """Who sees whom in one pass: packed documents in the trainer, the paged KV cache in the engine."""

    def attend(self, layer: int, q_1TNH: Tensor, k_1TGH: Tensor, v_1TGH: Tensor, scale: float | None) -> Tensor:
        """Attention output of layer `layer` (from 0), in the layout of `q_1TNH`. Rotary embedding has been applied."""
        ...


class Model(Protocol):
    """A torch module in float32. Its router nodes ask `routes` which experts to take."""

    @property
    def sizes(self) -> Sizes: ...

    @property
    def routes(self) -> Routes: ...

    def hidden(self, tokens: Tensor, positions: Tensor | None = None, attention_masks: Context | None = None) -> Tensor:
        """The last block's output `[1, T, D]` for tokens and positions `[1, T]`; each layer asks the context.

        Without positions and context: of one plain sequence.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and output head, for rows `[..., D]` of `hidden` in any selection."""
        ...

    def hf_views(self) -> dict[str, Tensor]:
        """Views into the live parameters by the names of the checkpoint, without gradient.

        A view of more than two dimensions stands for a matrix whose columns are its last dimension.
        """
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def buffers(self) -> Iterator[Tensor]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def eval(self) -> Any: ...

    def requires_grad_(self, requires_grad: bool = True) -> Any: ...


class Architecture(Protocol):
    """A module with these functions; torch is imported inside the last two, as sizes are read without it."""

    read_sizes: Callable[[dict[str, Any]], Sizes]
    """Sizes from a `config.json`. Raises `ValueError` for what it cannot compute."""

    build_model: Callable[[Any], Model]
    """The model of these sizes, its weights not initialised."""

    init_weights: Callable[[Any, int], None]
    """A random start, the same for the same seed."""
