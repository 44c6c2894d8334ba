"""One optimizer step of reinforcement learning, and what the model says of a probe. Runs on the torch thread.

The gradient is that of a sum over all trained tokens of the step divided by their number, so it does not depend on how
the plan cut the step into micro-batches. Recorded routes are replayed, which makes the trainer's log-probabilities
those of the engine, up to rounding, wherever the engine's whole context was computed at the trained weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.algorithms.losses import LossTerms, clipped_loss, masked_ratio_loss
from slipstream.algorithms.mismatch import mismatch, pure_tokens
from slipstream.models.base import Model
from slipstream.models.checkpoint import to_hf
from slipstream.trainer.config import ClippedLossConfig, LossConfig, OptimConfig
from slipstream.trainer.packed import Packed, pack, target_logps, temperatures
from slipstream.trainer.replay_check import check_replay
from slipstream.trainer.schedule import warmup_then_linear
from slipstream.trainer.sequence import TrainSequence


@dataclass
class _Tokens:
    """Per-token figures of one micro-batch, for the metrics."""

    logp_R: NDArray[np.float32]
    entropy_R: NDArray[np.float32]
    inactive_R: NDArray[np.bool_]


class Learner:
    """The model and its optimizer."""

    def __init__(self, model: Model, optim: OptimConfig, loss: LossConfig) -> None:
        self.model = model
        self._optim = optim
        self._loss = _loss_function(loss)
        self._adamw = torch.optim.AdamW(
            model.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
        )

    def train(
        self,
        micro_batches: Sequence[Sequence[TrainSequence]],
        *,
        step: int,
        loss_token_count: int,
        trained: int,
        with_replay_check: bool = False,
    ) -> dict[str, float]:
        """Take optimizer step `step` (from 1) on weights of version number `trained`; returns the step's figures."""
        full = [batch for batch in micro_batches if batch]  # one rank: an empty one has no collective to keep in step
        input_tokens = sum(len(sequence.routes.rows) for batch in full for sequence in batch)
        self._adamw.zero_grad(set_to_none=True)
        totals = {"loss": 0.0, "balance_loss": 0.0}
        tokens = [self._backward(batch, loss_token_count, input_tokens, totals) for batch in full]
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._optim.max_grad_norm) if full else torch.tensor(0.0)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"the gradient of step {step} is not finite")
        lr = self.learning_rate(step)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        checked = {}
        if with_replay_check and full:
            index = step % len(full)
            checked = check_replay(self.model, full[index], tokens[index].logp_R, trained)
        self._adamw.step()
        return {
            **totals,
            **checked,
            "grad_norm": float(norm),
            "learning_rate": lr,
            "padding_fraction": _padding_fraction(full),
            **_token_metrics([sequence for batch in full for sequence in batch], tokens, trained),
        }

    def learning_rate(self, step: int) -> float:
        """The rate of step `step`, from 1."""
        return self._optim.lr * warmup_then_linear(
            step,
            warmup_steps=self._optim.warmup_steps,
            total_steps=self._optim.total_steps,
            final_fraction=self._optim.final_lr_fraction,
        )

    def _backward(
        self, batch: Sequence[TrainSequence], loss_token_count: int, input_tokens: int, totals: dict[str, float]
    ) -> _Tokens:
        packed = pack(batch)
        logits_RV = packed.logits_RV(self.model, balance=True)
        new_R, entropy_R = target_logps(logits_RV, packed.targets_R, temperatures(batch))
        old_R = torch.from_numpy(np.concatenate([sequence.engine_logps for sequence in batch]))
        counts = torch.tensor([len(sequence.target_positions) for sequence in batch])
        advantage_R = torch.tensor([s.advantage for s in batch], dtype=torch.float32).repeat_interleave(counts)
        terms = self._loss(new_R, old_R, advantage_R, denominator=float(loss_token_count))
        balance = self.model.routes.balance_loss() * (packed.tokens_1T.numel() / input_tokens)
        (terms.loss + self._optim.balance_coefficient * balance).backward()
        totals["loss"] += float(terms.loss.detach())
        totals["balance_loss"] += float(balance.detach())
        return _Tokens(new_R.detach().numpy(), entropy_R.numpy(), terms.inactive_T.numpy())

    @torch.no_grad()
    def logps(self, batch: Sequence[TrainSequence]) -> NDArray[np.float32]:
        """Log-probabilities of the targets of a micro-batch, routes replayed."""
        packed = pack(batch)
        return target_logps(packed.logits_RV(self.model), packed.targets_R, temperatures(batch))[0].numpy()

    @torch.no_grad()
    def probe(self, token_ids: Sequence[int]) -> tuple[list[float], float]:
        """Log-probabilities of `token_ids[1:]`, routed live, and the smallest margin by which an expert was chosen.

        A margin near zero means that rounding could choose another expert, and that engine and trainer may differ.
        """
        ids = np.asarray(token_ids, dtype=np.int32)
        packed = Packed.of([ids], [np.arange(1, len(ids))])
        logps_R, _ = target_logps(packed.logits_RV(self.model, margins=True), packed.targets_R)
        return logps_R.tolist(), self.model.routes.margin()

    @torch.no_grad()
    def export(self) -> dict[str, NDArray[np.float32]]:
        """Copies of all weights by Hugging Face name: later steps leave them alone."""
        return {name: tensor.numpy().copy() for name, tensor in to_hf(self.model).items()}


def _padding_fraction(batches: Sequence[Sequence[TrainSequence]]) -> float:
    """Part of attention's padded slots that hold no token."""
    lengths = [[len(sequence.routes.rows) for sequence in batch] for batch in batches]
    slots = sum(len(batch) * max(batch) for batch in lengths)
    return 1.0 - sum(map(sum, lengths)) / slots if slots else 0.0


def _loss_function(config: LossConfig) -> Callable[..., LossTerms]:
    options = config.model_dump(exclude={"type"})
    return partial(clipped_loss if isinstance(config, ClippedLossConfig) else masked_ratio_loss, **options)


def _token_metrics(sequences: Sequence[TrainSequence], tokens: Sequence[_Tokens], trained: int) -> dict[str, float]:
    """Figures over all trained tokens of the step."""
    if not sequences:
        return {"loss_tokens": 0.0}
    trainer_R = np.concatenate([part.logp_R for part in tokens])
    engine_R = np.concatenate([sequence.engine_logps for sequence in sequences])
    sampled_R = np.concatenate([sequence.sampled_at for sequence in sequences])
    oldest_R = np.concatenate([sequence.kv_oldest for sequence in sequences])
    replayed_R = np.concatenate([sequence.replayed_R for sequence in sequences])
    exact_R = pure_tokens(sampled_R, oldest_R, trained) & replayed_R
    difference_R = np.abs(trainer_R - engine_R)[exact_R]
    known = np.concatenate([sequence.known_N for sequence in sequences])
    return {
        "loss_tokens": float(trainer_R.size),
        "entropy": float(np.concatenate([part.entropy_R for part in tokens]).mean()),
        "masked_fraction": float(np.concatenate([part.inactive_R for part in tokens]).mean()),
        "routes_unknown_fraction": float(1.0 - known.mean()),
        "pure_max_abs_diff": float(difference_R.max()) if difference_R.size else 0.0,
        "pure_token_count": float(difference_R.size),
        **mismatch(trainer_R, engine_R, sampled_R, oldest_R, trained).metrics(),
    }
