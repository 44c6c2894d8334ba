"""Sequences laid end to end for one pass through the model, and their logits at the positions that are trained.

T = input tokens of the micro-batch, R = targets (trained tokens), V = vocabulary, L = MoE layers, K = experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.engine.routes import RouteRows
from slipstream.models.base import Model
from slipstream.models.documents import Documents
from slipstream.trainer.sequence import TrainSequence


@dataclass(frozen=True)
class Packed:
    """One micro-batch. The last token of a sequence is a target only: as an input it would predict nothing."""

    documents: Documents
    tokens_1T: Tensor
    source_R: Tensor
    """Index among the T inputs of the token before each target."""

    targets_R: Tensor
    replay_TLK: Tensor | None = None
    known_T: Tensor | None = None

    @classmethod
    def of(
        cls,
        token_ids: Sequence[NDArray[np.int32]],
        target_positions: Sequence[NDArray[np.int64]],
        routes: Sequence[RouteRows] | None = None,
    ) -> Packed:
        """Pack sequences of 2 or more tokens. Targets are positions from 1; `routes` has a row for all but the last."""
        lengths = [len(ids) - 1 for ids in token_ids]
        starts = np.cumsum([0, *lengths[:-1]])
        sources = [start + positions - 1 for start, positions in zip(starts, target_positions, strict=True)]
        targets = [ids[positions] for ids, positions in zip(token_ids, target_positions, strict=True)]
        return cls(
            documents=Documents.of_lengths(lengths),
            tokens_1T=torch.from_numpy(np.concatenate([ids[:-1] for ids in token_ids]).astype(np.int64)).unsqueeze(0),
            source_R=torch.from_numpy(np.concatenate(sources).astype(np.int64)),
            targets_R=torch.from_numpy(np.concatenate(targets).astype(np.int64)),
            replay_TLK=None if routes is None else torch.from_numpy(np.concatenate([each.rows for each in routes])),
            known_T=None if routes is None else torch.from_numpy(np.concatenate([each.known() for each in routes])),
        )

    def logits_RV(self, model: Model, *, balance: bool = False, margins: bool = False, capture: bool = False) -> Tensor:
        """Logits that predict the targets. The head is applied to those positions alone."""
        model.routes.begin(
            replay_TLK=self.replay_TLK, known_T=self.known_T, balance=balance, margins=margins, capture=capture
        )
        hidden_1TD = model.hidden(self.tokens_1T, self.documents.positions_1T, self.documents)
        return model.logits(hidden_1TD[0].index_select(0, self.source_R))


def temperatures(batch: Sequence[TrainSequence]) -> Tensor | None:
    """One for each target; None if all are 1."""
    if all(sequence.temperature == 1.0 for sequence in batch):
        return None
    counts = torch.tensor([len(sequence.target_positions) for sequence in batch])
    return torch.tensor([sequence.temperature for sequence in batch]).repeat_interleave(counts)
