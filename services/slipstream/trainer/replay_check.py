"""What routing replay is worth: the mismatch of the same tokens with recorded routes and with live ones.

It takes one forward pass more, of one micro-batch, so it is done every few steps, on the weights that the step trains.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.algorithms.mismatch import mismatch
from slipstream.trainer.packed import temperatures
from slipstream.trainer.parallel.sharding import Ranked
from slipstream.trainer.parallel.slices import Slice
from slipstream.trainer.sequence import TrainSequence

PARTS = ("kl", "numeric", "policy_lag", "stale_kv")
"""Of the mismatch, as `Mismatch` names them."""


@torch.no_grad()
def check_replay(
    ranked: Ranked, batch: Sequence[TrainSequence], part: Slice, replayed_logp_R: NDArray[np.float32], trained: int
) -> dict[str, float]:
    """Figures of a micro-batch whose log-probabilities with replay are known. R = targets.

    All ranks take part, and `routes_flipped_fraction` is over all of them; the rest is of this rank's micro-batch.
    """
    live_R = ranked.logps(part, temperatures(batch), replay=False, capture=True)[0].cpu().numpy()
    figures = {"replay_check_tokens": float(live_R.size), "routes_flipped_fraction": _flipped(ranked, part)}
    if not live_R.size:
        return figures
    engine_R, sampled_R, oldest_R = (
        np.concatenate([getattr(sequence, name) for sequence in batch])
        for name in ("engine_logps", "sampled_at", "kv_oldest")
    )
    for name, logp_R in (("replay_on", replayed_logp_R), ("replay_off", live_R)):
        found = mismatch(logp_R, engine_R, sampled_R, oldest_R, trained)
        figures |= {f"{name}_{part}": getattr(found, part) for part in PARTS}
        figures |= {f"replay_check_{part}_fraction": getattr(found, f"{part}_fraction") for part in PARTS[1:]}
    return figures


def _flipped(ranked: Ranked, part: Slice) -> float:
    """Part of the recorded choices that the trainer would make otherwise: another set of experts, in one layer."""
    recorded_S = part.known_S & part.real_S
    recorded_SLK, live_SLK = part.replay_SLK[recorded_S], ranked.model.routes.captured().cpu().numpy()
    live_SLK = live_SLK[recorded_S] if live_SLK.size else recorded_SLK
    same_SL = (np.sort(recorded_SLK, axis=-1) == np.sort(live_SLK, axis=-1)).all(-1)
    flipped, all_of_them = ranked.world.sum(torch.tensor([(~same_SL).sum(), same_SL.size])).tolist()
    return flipped / all_of_them if all_of_them else 0.0
