"""What people watch of a step: figures that add up over micro-batches, and over ranks. numpy only.

    figures = StepFigures()
    figures.add(tokens, sums, counts)   # of each micro-batch
    figures.merge(others)               # of another rank
    figures.report(trained)             # by the names of a step record

Nothing here is a mean until `report`: sums and the tokens themselves, as quantiles are of the whole step or wrong.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.algorithms.mismatch import mismatch, pure_tokens


@dataclass(frozen=True)
class TokenFigures:
    """Figures of one micro-batch: what is kept of it until the step ends. R = its trained tokens."""

    logp_R: NDArray[np.float32]
    entropy_R: NDArray[np.float32]
    inactive_R: NDArray[np.bool_]
    engine_R: NDArray[np.float32]
    sampled_R: NDArray[np.int64]
    oldest_R: NDArray[np.int64]
    replayed_R: NDArray[np.bool_]
    lengths: list[int]
    """Of the sequences' inputs."""
    row_tokens: int
    """Of the packed row, padding included."""
    unknown_count: int
    """Inputs without a recorded route."""


@dataclass
class StepFigures:
    """Sums over what was added so far."""

    tokens: list[TokenFigures] = field(default_factory=list[TokenFigures])
    sums: dict[str, float] = field(default_factory=dict[str, float])
    """Figures that add up: parts of the loss, FLOPs of the model."""

    expert_counts_LE: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    """How often each expert of each MoE layer was taken; empty for a dense model."""

    def add(self, tokens: TokenFigures | None, sums: Mapping[str, float], expert_counts_LE: NDArray[np.int64]) -> None:
        """Take in a micro-batch; its tokens too, unless another rank does."""
        if tokens is not None:
            self.tokens.append(tokens)
        self._add(sums, expert_counts_LE)

    def merge(self, other: StepFigures) -> None:
        """Take in those of another rank, as if this one had done it all."""
        self.tokens += other.tokens
        self._add(other.sums, other.expert_counts_LE)

    def to_bytes(self) -> bytes:
        """For another rank."""
        arrays: dict[str, Any] = {"counts": self.expert_counts_LE, "names": np.array([*self.sums], dtype=np.str_)}
        arrays["sums"] = np.array([*self.sums.values()], dtype=np.float64)
        for number, tokens in enumerate(self.tokens):
            arrays |= {f"{number}.{each.name}": np.asarray(getattr(tokens, each.name)) for each in fields(tokens)}
        file = io.BytesIO()
        np.savez(file, **arrays)
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> StepFigures:
        """What another rank gave."""
        arrays = np.load(io.BytesIO(data), allow_pickle=False)
        names = [each.name for each in fields(TokenFigures)]
        count = sum(name.endswith(f".{names[0]}") for name in arrays.files)
        tokens = [TokenFigures(**{name: arrays[f"{number}.{name}"] for name in names}) for number in range(count)]
        tokens = [
            replace(
                each, lengths=list(each.lengths), unknown_count=int(each.unknown_count), row_tokens=int(each.row_tokens)
            )
            for each in tokens
        ]
        sums = dict(zip(arrays["names"].tolist(), arrays["sums"].tolist(), strict=True))
        return cls(tokens, sums, arrays["counts"])

    def _add(self, sums: Mapping[str, float], counts_LE: NDArray[np.int64]) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        if counts_LE.size:
            self.expert_counts_LE = self.expert_counts_LE + counts_LE if self.expert_counts_LE.size else counts_LE

    def report(self, trained: int) -> dict[str, float]:
        """The figures of the step by name. `trained`: version number of the weights."""
        return {
            **self.sums,
            "padding_fraction": _padding_fraction(self.tokens),
            "attention_padding_fraction": _attention_padding_fraction(part.lengths for part in self.tokens),
            **expert_load(self.expert_counts_LE),
            **_token_metrics(self.tokens, trained),
        }


def expert_load(counts_LE: NDArray[np.int64]) -> dict[str, float]:
    """How uneven the experts' load was: the maximum violation, `(max - mean) / mean` over the experts of a layer.

    0 is even; E / K - 1 is every token to the same K experts (https://arxiv.org/abs/2408.15664, MaxVio). Of the worst
    layer, and the mean over layers. Empty without experts.
    """
    counts_LE = counts_LE[counts_LE.sum(1) > 0] if counts_LE.size else counts_LE
    if not counts_LE.size:
        return {}
    mean_L = counts_LE.mean(1)
    violation_L = (counts_LE.max(1) - mean_L) / mean_L
    return {"expert_load_max": float(violation_L.max()), "expert_load_mean": float(violation_L.mean())}


def _padding_fraction(tokens: Iterable[TokenFigures]) -> float:
    """Part of the packed rows that is padding: every layer computes it."""
    counts = [(sum(part.lengths), part.row_tokens) for part in tokens]
    rows = sum(count for _, count in counts)
    return 1.0 - sum(count for count, _ in counts) / rows if rows else 0.0


def _attention_padding_fraction(lengths: Iterable[list[int]]) -> float:
    """Part of the slots without a token where attention spreads documents into a batch (`models/documents.py`)."""
    batches = [batch for batch in lengths if batch]
    slots = sum(len(batch) * max(batch) for batch in batches)
    return 1.0 - sum(map(sum, batches)) / slots if slots else 0.0


def _token_metrics(tokens: list[TokenFigures], trained: int) -> dict[str, float]:
    """Figures over all trained tokens of the step."""
    trainer_R = np.concatenate([np.zeros(0, np.float32), *(part.logp_R for part in tokens)])
    if not trainer_R.size:
        return {"loss_tokens": 0.0}
    engine_R = np.concatenate([part.engine_R for part in tokens])
    sampled_R = np.concatenate([part.sampled_R for part in tokens])
    oldest_R = np.concatenate([part.oldest_R for part in tokens])
    exact_R = pure_tokens(sampled_R, oldest_R, trained) & np.concatenate([part.replayed_R for part in tokens])
    difference_R = np.abs(trainer_R - engine_R)[exact_R]
    input_count = sum(sum(part.lengths) for part in tokens)
    return {
        "loss_tokens": float(trainer_R.size),
        "entropy": float(np.concatenate([part.entropy_R for part in tokens]).mean()),
        "masked_fraction": float(np.concatenate([part.inactive_R for part in tokens]).mean()),
        "routes_unknown_fraction": sum(part.unknown_count for part in tokens) / input_count,
        "pure_max_abs_diff": float(difference_R.max()) if difference_R.size else 0.0,
        "pure_token_count": float(difference_R.size),
        **mismatch(trainer_R, engine_R, sampled_R, oldest_R, trained).metrics(),
    }
