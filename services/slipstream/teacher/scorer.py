"""A frozen model, and what it says of tokens. Runs on the teacher's torch thread.

T = tokens of one pass, R = positions asked about.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.models.checkpoint import load_model
from slipstream.models.documents import Documents
from slipstream.models.head import target_logps
from slipstream.models.teachers import sizes_of_teacher
from slipstream.teacher.asked import Asked
from slipstream.teacher.config import TeacherConfig


class Scorer:
    """The model. Raises `ConfigError` for weights that cannot be read."""

    def __init__(self, config: TeacherConfig) -> None:
        torch.set_num_threads(config.torch_threads)
        self.sizes = sizes_of_teacher(config.teacher_model, config.teacher_architecture)
        chosen = "cuda" if config.device == "auto" and torch.cuda.is_available() else config.device
        self._device = torch.device("cpu" if chosen == "auto" else chosen)
        self._model = load_model(self.sizes, config.teacher_model)
        module: Any = self._model
        module.to(self._device)
        module.requires_grad_(False)
        module.eval()
        self._bfloat16 = config.precision == "bfloat16"
        self._rows = config.logits_rows

    @torch.no_grad()
    def score(self, asked: Sequence[Asked]) -> list[NDArray[np.float32]]:
        """Log-probabilities of the positions of each, all in one pass. Experts are chosen live."""
        # The last token is a target only: as an input it would predict nothing.
        lengths = [len(each.token_ids) - 1 for each in asked]
        starts = np.cumsum([0, *lengths[:-1]])
        sources = [start + each.positions - 1 for start, each in zip(starts, asked, strict=True)]
        counts = [len(each.positions) for each in asked]
        source_R = self._tensor(np.concatenate(sources))
        targets_R = self._tensor(np.concatenate([each.token_ids[each.positions] for each in asked]).astype(np.int64))
        temperature_R = self._tensor(np.repeat([each.temperature for each in asked], counts).astype(np.float32))
        tokens_1T = self._tensor(np.concatenate([each.token_ids[:-1] for each in asked]).astype(np.int64)).unsqueeze(0)
        documents = Documents.of_lengths(lengths, self._device)
        with self._products():
            self._model.routes.begin()
            hidden_TD = self._model.hidden(tokens_1T, documents.positions_1T, documents)[0]
            pieces = [
                target_logps(self._model.logits(hidden_TD.index_select(0, rows)), targets, temperatures)[0]
                for rows, targets, temperatures in zip(
                    source_R.split(self._rows),
                    targets_R.split(self._rows),
                    temperature_R.split(self._rows),
                    strict=True,
                )
            ]
        logps_R = torch.cat(pieces).float().cpu().numpy()
        return np.split(logps_R, np.cumsum(counts)[:-1])

    def _products(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, torch.bfloat16) if self._bfloat16 else nullcontext()

    def _tensor(self, values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)
