"""One optimizer step of reinforcement learning, and what the model says of a probe. Runs on the torch thread.

The gradient is that of a sum over all trained tokens of the step divided by their number, so it does not depend on how
the plan cut the step into micro-batches. Recorded routes are replayed, which makes the trainer's log-probabilities
those of the engine, up to rounding, wherever the engine's whole context was computed at the trained weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.algorithms.mismatch import mismatch, pure_tokens
from slipstream.algorithms.tokens import LossTokens, StepTotals
from slipstream.models.base import Model
from slipstream.models.checkpoint import to_hf
from slipstream.trainer.config import OptimConfig
from slipstream.trainer.frozen import FrozenModels
from slipstream.trainer.loss_config import LossConfig
from slipstream.trainer.objective import build_objective
from slipstream.trainer.packed import Packed, pack, target_logps, temperatures
from slipstream.trainer.replay_check import check_replay
from slipstream.trainer.schedule import warmup_then_linear
from slipstream.trainer.sequence import TrainSequence


@dataclass
class _Tokens:
    """Per-token figures of one micro-batch, for the metrics: what is kept of it until the step ends."""

    logp_R: NDArray[np.float32]
    entropy_R: NDArray[np.float32]
    inactive_R: NDArray[np.bool_]
    engine_R: NDArray[np.float32]
    sampled_R: NDArray[np.int64]
    oldest_R: NDArray[np.int64]
    replayed_R: NDArray[np.bool_]
    lengths: list[int]
    """Of the sequences' inputs."""
    unknown_count: int
    """Inputs without a recorded route."""


class Learner:
    """The model, its optimizer, and the frozen models that its loss asks for."""

    def __init__(self, model: Model, optim: OptimConfig, loss: LossConfig, frozen: FrozenModels | None = None) -> None:
        self.model = model
        self._optim = optim
        self._objective = build_objective(loss)
        self._frozen = frozen or FrozenModels()
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
        """A whole step at once: `begin`, `add` and `finish`."""
        input_token_count = sum(len(sequence.token_ids) - 1 for batch in micro_batches for sequence in batch)
        checked = step % len(micro_batches) if with_replay_check and micro_batches else None
        sequence_count = sum(len(sequence.target_positions) > 0 for batch in micro_batches for sequence in batch)
        self.begin(loss_token_count, sequence_count, input_token_count, trained, checked)
        self.add(micro_batches)
        return self.finish(step)

    def begin(
        self,
        loss_token_count: int,
        sequence_count: int,
        input_token_count: int,
        trained: int,
        checked: int | None = None,
    ) -> None:
        """Start a step of so many trained tokens, sequences that have some, and inputs, over all ranks.

        `trained`: version number of the weights.
        `checked`: the micro-batch, from 0, whose mismatch is also looked at without replay.
        """
        self._adamw.zero_grad(set_to_none=True)
        self._denominators = StepTotals(float(loss_token_count), float(max(1, sequence_count)))
        self._input_token_count = input_token_count
        self._trained, self._checked, self._added = trained, checked, 0
        self._totals = {"loss": 0.0, "balance_loss": 0.0}
        self._tokens: list[_Tokens] = []

    def add(self, micro_batches: Sequence[Sequence[TrainSequence]]) -> None:
        """Add their gradients; nothing of them is kept but figures."""
        for batch in micro_batches:
            if batch:  # one rank: an empty one has no collective to keep in step
                self._tokens.append(self._backward(batch))
                if self._added == self._checked:
                    self._totals |= check_replay(self.model, batch, self._tokens[-1].logp_R, self._trained)
            self._added += 1

    def finish(self, step: int) -> dict[str, float]:
        """Take optimizer step `step` (from 1); returns its figures."""
        tokens, self._tokens = self._tokens, []
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._optim.max_grad_norm) if tokens else torch.tensor(0.0)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"the gradient of step {step} is not finite")
        lr = self.learning_rate(step)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        return {
            **self._totals,
            "grad_norm": float(norm),
            "learning_rate": lr,
            "padding_fraction": _padding_fraction([part.lengths for part in tokens]),
            **_token_metrics(tokens, self._trained),
        }

    def learning_rate(self, step: int) -> float:
        """The rate of step `step`, from 1."""
        return self._optim.lr * warmup_then_linear(
            step,
            warmup_steps=self._optim.warmup_steps,
            total_steps=self._optim.total_steps,
            final_fraction=self._optim.final_lr_fraction,
        )

    def _backward(self, batch: Sequence[TrainSequence]) -> _Tokens:
        packed = pack(batch)
        frozen = self._frozen.logps(batch, packed)  # first: they keep no activations
        logits_RV = packed.logits_RV(self.model, balance=True)
        new_R, entropy_R = target_logps(logits_RV, packed.targets_R, temperatures(batch))
        old_R = torch.from_numpy(np.concatenate([sequence.engine_logps for sequence in batch]))
        advantages = [sequence.advantage for sequence in batch]
        lengths = [len(sequence.target_positions) for sequence in batch]
        terms = self._objective(LossTokens.of_lengths(new_R, old_R, advantages, lengths, **frozen), self._denominators)
        balance = self.model.routes.balance_loss() * (packed.tokens_1T.numel() / self._input_token_count)
        (terms.loss + self._optim.balance_coefficient * balance).backward()
        figures = {"loss": float(terms.loss.detach()), "balance_loss": float(balance.detach()), **terms.figures}
        figures["logps_unknown"] += sum(sequence.unknown_logp_count for sequence in batch)
        for name, value in figures.items():
            self._totals[name] = self._totals.get(name, 0.0) + value
        return _Tokens(
            logp_R=new_R.detach().numpy(),
            entropy_R=entropy_R.numpy(),
            inactive_R=terms.inactive_T.numpy(),
            engine_R=old_R.numpy(),
            sampled_R=np.concatenate([sequence.sampled_at for sequence in batch]),
            oldest_R=np.concatenate([sequence.kv_oldest for sequence in batch]),
            replayed_R=np.concatenate([sequence.replayed_R for sequence in batch]),
            lengths=[len(sequence.token_ids) - 1 for sequence in batch],
            unknown_count=sum(int((~sequence.known_N).sum()) for sequence in batch),
        )

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


def _padding_fraction(lengths: Sequence[Sequence[int]]) -> float:
    """Part of attention's padded slots that hold no token, by the lengths of each micro-batch's sequences."""
    slots = sum(len(batch) * max(batch) for batch in lengths)
    return 1.0 - sum(map(sum, lengths)) / slots if slots else 0.0


def _token_metrics(tokens: Sequence[_Tokens], trained: int) -> dict[str, float]:
    """Figures over all trained tokens of the step."""
    if not tokens:
        return {"loss_tokens": 0.0}
    trainer_R = np.concatenate([part.logp_R for part in tokens])
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
