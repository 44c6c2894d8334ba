"""One optimizer step of reinforcement learning, and what the model says of a probe. Runs on the torch thread.

The gradient is that of a sum over all trained tokens of the step divided by their number, so it does not depend on how
the plan cut the step into micro-batches. Recorded routes are replayed, which makes the trainer's log-probabilities
those of the engine, up to rounding, wherever the engine's whole context was computed at the trained weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.algorithms.tokens import LossTokens, StepTotals
from slipstream.models.base import Model
from slipstream.models.checkpoint import to_hf
from slipstream.models.lora.adapters import adapters_of
from slipstream.trainer.clock import PhaseClock
from slipstream.trainer.cost import ModelCost, memory
from slipstream.trainer.figures import StepFigures, TokenFigures
from slipstream.trainer.frozen import FrozenModels
from slipstream.trainer.loss_config import LossConfig
from slipstream.trainer.objective import build_objective
from slipstream.trainer.offload import ActivationOffload
from slipstream.trainer.optim_config import OptimConfig
from slipstream.trainer.optimizer import ModelOptimizer
from slipstream.trainer.packed import Packed, pack, target_logps, temperatures
from slipstream.trainer.replay_check import check_replay
from slipstream.trainer.sequence import TrainSequence


class Learner:
    """The model, its optimizer, and the frozen models that its loss asks for."""

    def __init__(self, model: Model, optim: OptimConfig, loss: LossConfig, frozen: FrozenModels | None = None) -> None:
        self.model = model
        self._optim = optim
        self._objective = build_objective(loss)
        self._frozen = frozen or FrozenModels()
        self.optimizer = ModelOptimizer(model.named_parameters(), optim)
        self._offload = ActivationOffload(enabled=optim.offload_activations)
        self.device = next(model.parameters()).device
        self._cost = ModelCost.of(model)
        self._clock = PhaseClock(self.device)

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
        self.optimizer.zero_grad()
        self._denominators = StepTotals(float(loss_token_count), float(max(1, sequence_count)))
        self._input_token_count = input_token_count
        self._trained, self._checked, self._added = trained, checked, 0
        self._figures = StepFigures()
        self._replay_check: dict[str, float] = {}
        self._clock.read()

    def add(self, micro_batches: Sequence[Sequence[TrainSequence]]) -> None:
        """Add their gradients; nothing of them is kept but figures."""
        for batch in micro_batches:
            if batch:  # one rank: an empty one has no collective to keep in step
                logp_R = self._backward(batch)
                if self._added == self._checked:
                    with self._clock.phase("replay_check"):
                        self._replay_check = check_replay(self.model, batch, logp_R, self._trained)
            self._added += 1

    def finish(self, step: int) -> dict[str, float]:
        """Take optimizer step `step` (from 1); returns its figures.

        Where loss or gradient is not finite, weights and optimizer stay as they are, and `step_skipped` is 1.
        """
        figures, self._figures = self._figures, StepFigures()
        with self._clock.phase("optimizer"):
            parameters = [p for p in self.model.parameters() if p.grad is not None]
            norm = torch.zeros(())
            if figures.tokens:
                norm = torch.nn.utils.clip_grad_norm_(parameters, self._optim.max_grad_norm)
            skipped = not (math.isfinite(figures.sums.get("loss", 0.0)) and bool(torch.isfinite(norm)))
            lr = 0.0 if skipped else self.optimizer.step(step)
            if skipped:
                self.optimizer.zero_grad()
        if skipped:  # its figures say nothing of the model
            sums = {name: value for name, value in figures.sums.items() if math.isfinite(value)}
            return {**sums, "step_skipped": 1.0, **self._clock.read(), **memory(self.device)}
        return {
            "loss": 0.0,
            "balance_loss": 0.0,
            "step_skipped": 0.0,
            "grad_norm": float(norm),
            "learning_rate": lr,
            **figures.report(self._trained),
            **self._replay_check,
            **self._clock.read(),
            **memory(self.device),
        }

    def _backward(self, batch: Sequence[TrainSequence]) -> NDArray[np.float32]:
        """Add its gradient and figures; returns the log-probabilities of its targets."""
        packed, clock = pack(batch), self._clock
        with clock.phase("frozen"):
            frozen = self._frozen.logps(batch, packed)  # first: they keep no activations
        with clock.phase("forward"), self._offload.forward():
            logits_RV = packed.logits_RV(self.model, balance=True)
            new_R, entropy_R = target_logps(logits_RV, packed.targets_R, temperatures(batch))
        old_R = torch.from_numpy(np.concatenate([sequence.engine_logps for sequence in batch]))
        advantages = [sequence.advantage for sequence in batch]
        counts = [len(sequence.target_positions) for sequence in batch]
        lengths = [len(sequence.token_ids) - 1 for sequence in batch]
        with clock.phase("loss"):
            terms = self._objective(
                LossTokens.of_lengths(new_R, old_R, advantages, counts, **frozen), self._denominators
            )
            balance = self.model.routes.balance_loss() * (packed.tokens_1T.numel() / self._input_token_count)
        with clock.phase("backward"):
            (terms.loss + self._optim.balance_coefficient * balance).backward()
        sums = {"loss": float(terms.loss.detach()), "balance_loss": float(balance.detach()), **terms.figures}
        sums["logps_unknown"] += sum(sequence.unknown_logp_count for sequence in batch)
        sums["model_flops"] = self._cost.flops(lengths, sum(counts))
        tokens = TokenFigures(
            logp_R=new_R.detach().numpy(),
            entropy_R=entropy_R.numpy(),
            inactive_R=terms.inactive_T.numpy(),
            engine_R=old_R.numpy(),
            sampled_R=np.concatenate([sequence.sampled_at for sequence in batch]),
            oldest_R=np.concatenate([sequence.kv_oldest for sequence in batch]),
            replayed_R=np.concatenate([sequence.replayed_R for sequence in batch]),
            lengths=lengths,
            unknown_count=sum(int((~sequence.known_N).sum()) for sequence in batch),
        )
        self._figures.add(tokens, sums, self.model.routes.choice_counts().numpy())
        return tokens.logp_R

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
        """Copies of all weights by Hugging Face name, adapters merged: later steps leave them alone."""
        return {name: tensor.numpy().copy() for name, tensor in to_hf(self.model).items()}

    @torch.no_grad()
    def export_adapter(self, *, with_base: bool) -> dict[str, NDArray[np.float32]]:
        """Copies of the adapter's tensors, and of the weights that it is added to."""
        adapters = adapters_of(self.model)
        assert adapters is not None
        tensors = {**(to_hf(self.model, merged=False) if with_base else {}), **adapters.tensors()}
        return {name: tensor.numpy().copy() for name, tensor in tensors.items()}
