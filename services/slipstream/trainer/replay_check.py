"""What routing replay is worth: the mismatch of the same tokens with recorded routes and with live ones.

It takes one forward pass more, of one micro-batch, so it is done every few steps, on the weights that the step trains.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.algorithms.mismatch import mismatch
from slipstream.models.base import Model
from slipstream.trainer.packed import pack, target_logps, temperatures
from slipstream.trainer.sequence import TrainSequence

PARTS = ("kl", "numeric", "policy_lag", "stale_kv")
"""Of the mismatch, as `Mismatch` names them."""


@torch.no_grad()
def check_replay(
    model: Model, batch: Sequence[TrainSequence], replayed_logp_R: NDArray[np.float32], trained: int
) -> dict[str, float]:
    """Figures of a micro-batch whose log-probabilities with replay are known. R = targets."""
    packed = pack(batch, replay=False)
    live_R, _ = target_logps(packed.logits_RV(model, capture=True), packed.targets_R, temperatures(batch))
    live_TLK = model.routes.captured().numpy()
    engine_R, sampled_R, oldest_R = (
        np.concatenate([getattr(sequence, name) for sequence in batch])
        for name in ("engine_logps", "sampled_at", "kv_oldest")
    )
    figures = {"replay_check_tokens": float(live_R.numel()), "routes_flipped_fraction": _flipped(batch, live_TLK)}
    for name, logp_R in (("replay_on", replayed_logp_R), ("replay_off", live_R.numpy())):
        found = mismatch(logp_R, engine_R, sampled_R, oldest_R, trained)
        figures |= {f"{name}_{part}": getattr(found, part) for part in PARTS}
        figures |= {f"replay_check_{part}_fraction": getattr(found, f"{part}_fraction") for part in PARTS[1:]}
    return figures


def _flipped(batch: Sequence[TrainSequence], live_TLK: NDArray[np.uint8]) -> float:
    """Part of the recorded choices that the trainer would make otherwise: another set of experts, in one layer."""
    recorded_TLK = np.concatenate([sequence.routes.rows for sequence in batch])
    known_T = np.concatenate([sequence.known_N for sequence in batch])
    same_TL = (np.sort(recorded_TLK, axis=-1) == np.sort(live_TLK, axis=-1)).all(-1)[known_T]
    return float(1.0 - same_TL.mean()) if same_TL.size else 0.0
