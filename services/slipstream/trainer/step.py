"""One optimizer step of any loss, and what the model says of a probe. Runs on the torch thread.

The gradient is that of a sum over all trained tokens of the step divided by their number, so it does not depend on how
the plan cut the step into micro-batches. Recorded routes are replayed, which makes the trainer's log-probabilities
those of the engine, up to rounding, wherever the engine's whole context was computed at the trained weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.algorithms.objective import Objective
from slipstream.algorithms.tokens import LossTerms, LossTokens, StepTotals
from slipstream.common.version import PolicyVersion
from slipstream.models.base import Model
from slipstream.models.checkpoint import to_hf
from slipstream.models.lora.adapters import adapters_of
from slipstream.trainer.clock import PhaseClock
from slipstream.trainer.config import ParallelConfig
from slipstream.trainer.cost import ModelCost, memory
from slipstream.trainer.figures import StepFigures, TokenFigures
from slipstream.trainer.frozen import FrozenLogps, FrozenModels
from slipstream.trainer.host_copies import Copying, HostCopies
from slipstream.trainer.kept import in_engine_order, whole_boxes
from slipstream.trainer.loss_config import LossConfig
from slipstream.trainer.objective import build_objective
from slipstream.trainer.offload import ActivationOffload
from slipstream.trainer.optim_config import OptimConfig
from slipstream.trainer.optimizer import ModelOptimizer
from slipstream.trainer.packed import temperatures
from slipstream.trainer.parallel.agreement import agree
from slipstream.trainer.parallel.export import boxes_of, places_of, tensor_boxes, whole_tensors
from slipstream.trainer.parallel.filling import fill
from slipstream.trainer.parallel.sharding import DEFAULT_PASSES, Passes, gradient_norm, scale_gradient, shard, slice_for
from slipstream.trainer.parallel.slices import Slice
from slipstream.trainer.parallel.world import World
from slipstream.trainer.replay_check import check_replay
from slipstream.trainer.rounded import RoundedWeights
from slipstream.trainer.sequence import Lost, TrainSequence, plain_sequence
from slipstream.trainer.teacher_rows import teacher_logps
from slipstream.weights.manifest import Box
from slipstream.weights.straight.lender import KeptShard, Lender


class Learner:
    """The model, its optimizer, and the frozen models that its loss asks for: one rank's part of them.

    Every rank calls the same methods in the same order. Given alike, so are the models, whole and the same on all.
    """

    def __init__(
        self,
        model: Model,
        optim: OptimConfig,
        loss: LossConfig | Objective,
        frozen: FrozenModels | None = None,
        world: World | None = None,
        parallel: ParallelConfig | None = None,
        passes: Passes = DEFAULT_PASSES,
    ) -> None:
        """`model` and the frozen ones are where they are to compute."""
        self.model = model
        self.world = world or World()
        parallel = parallel or ParallelConfig()
        self._optim = optim
        self._objective = loss if isinstance(loss, Objective) else build_objective(loss)
        self._cost = ModelCost.of(model)
        self._places = {} if self.world.alone else places_of(model)
        self.parameter_count = sum(parameter.numel() for parameter in model.parameters())
        compiler = parallel.compile_backend if parallel.compile else None
        self.ranked = shard(model, self.world, parallel.checkpointing, compiler, passes)
        self._frozen = FrozenLogps(frozen or FrozenModels(), self.world, passes)
        self.optimizer = ModelOptimizer(model.named_parameters(), optim)
        self._offload = ActivationOffload(enabled=optim.offload_activations)
        # FSDP gathers float32 weights anew for each pass.
        once = passes.round_once if passes.bfloat16 and self.world.alone else False
        self._rounded = RoundedWeights(model, enabled=once)
        self.device = next(model.parameters()).device
        self._clock = PhaseClock(self.device)
        self._copies = HostCopies(self.device)
        sizes = model.sizes
        self.expert_share_LE = torch.full((sizes.moe_layers, sizes.n_experts), 1.0 / max(1, sizes.n_experts))
        """Part of the choices of the previous step, over all ranks, that each expert got; even before the first."""

    def fill(self, source: Model | None) -> None:
        """Take over the weights of a model that rank 0 has whole, the others None. All ranks take part."""
        fill(self.model, source, self.world)
        self.optimizer.weights_changed()

    @property
    def carried(self) -> dict[str, Tensor]:
        """What it takes from one step into the next beside weights and optimizer."""
        return {"expert_share": self.expert_share_LE}

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
        """Start a step of so many trained tokens and sequences that have some over all ranks, and inputs of this one.

        `trained`: version number of the weights.
        `checked`: the micro-batch, from 0, whose mismatch is also looked at without replay.
        """
        self.world.arrive()
        self.optimizer.zero_grad()
        self._denominators = StepTotals(float(loss_token_count), float(max(1, sequence_count)))
        own = input_token_count if self.world.context_rank == 0 else 0
        self._input_token_count = max(1, int(self.world.sum(torch.tensor(own))))
        self._trained, self._checked, self._added = trained, checked, 0
        self.figures = StepFigures()
        self._known_count = 0.0
        """Of this rank's loss tokens, those of which all log-probabilities are known."""
        self._replay_check: dict[str, float] = {}
        self._clock.read()
        with self._clock.phase("forward"):
            self._rounded.refresh()

    def add(self, micro_batches: Sequence[Sequence[TrainSequence | Lost]]) -> None:
        """Add their gradients; nothing of them is kept but figures. Ranks add the same number of micro-batches."""
        for batch in micro_batches:
            self.world.arrive()
            agreed = agree(batch, self.world)
            checked = self._added == self._checked
            self._added += 1
            lost = {"sequences_lost": self._whole(len(batch) - len(_there(agreed)))}
            self.figures.add(None, lost, np.zeros((0, 0), np.int64))
            if agreed or not self.world.alone:  # alone, an empty one has no collective to keep in step
                part = slice_for(self.ranked, agreed)
                with self._rounded.in_place():
                    logp_R = self._backward(_there(agreed), part)
                if checked:
                    with self._clock.phase("replay_check"):
                        self._replay_check = check_replay(self.ranked, _there(agreed), part, logp_R, self._trained)

    def finish(self, step: int, refused: int = 0) -> dict[str, float]:
        """Take optimizer step `step` (from 1); returns its figures, at rank 0 those of all ranks.

        `refused`: sequences that are lost as their rows were wrong.

        Where loss or gradient is not finite, weights and optimizer stay as they are, and `step_skipped` is 1. So it is
        where tokens were to train and no one's log-probabilities are known: then `nothing_known` is 1, too.
        """
        self.world.arrive()
        self.figures.add(None, {"sequences_refused": self._whole(refused)}, np.zeros((0, 0), np.int64))
        figures, self.figures = self.figures, StepFigures()
        with self._clock.phase("optimizer"):
            norm = gradient_norm(self.ranked)
            sums = [figures.sums.get("loss", 0.0), self._known_count, figures.sums.get("logps_unknown", 0.0)]
            loss, known_count, unknown_count = self.world.sum(torch.tensor(sums)).unbind()  # of all ranks or of none
            blind = bool((unknown_count > 0) & (known_count == 0))
            skipped = blind or not bool(torch.isfinite(loss) & torch.isfinite(norm))
            if norm > self._optim.max_grad_norm:
                scale_gradient(self.ranked, self._optim.max_grad_norm / (float(norm) + 1e-6))
            self._copies.hold()
            lr = 0.0 if skipped else self.optimizer.step(step)
            if skipped:
                self.optimizer.zero_grad()
        counts_LE, figures = torch.from_numpy(figures.expert_counts_LE), self._of_all_ranks(figures)
        if skipped:  # its figures say nothing of the model
            sums = {name: value for name, value in figures.sums.items() if math.isfinite(value)}
            if blind:
                sums.pop("loss", None)  # of no tokens there is none
                sums["nothing_known"] = 1.0
            return {**sums, "step_skipped": 1.0, **self._clock.read(), **memory(self.device)}
        self._note_choices(counts_LE)
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

    def _backward(self, batch: Sequence[TrainSequence], part: Slice) -> NDArray[np.float32]:
        """Add the gradient of this rank's slice, and figures; returns the log-probabilities of all targets."""
        clock, temperature_R = self._clock, temperatures(batch)
        with clock.phase("frozen"):
            frozen = self._frozen(part, temperature_R)  # first: they keep no activations
            if any(sequence.teacher_logps is not None for sequence in batch):
                frozen["teacher_logp_T"] = torch.from_numpy(teacher_logps(batch)).to(self.device)
        with clock.phase("forward"), self._offload.forward():
            new_R, entropy_R = self.ranked.logps(part, temperature_R, share_LE=self.expert_share_LE)
        old_R = torch.from_numpy(_joined([sequence.engine_logps for sequence in batch], np.float32))
        counts = [len(sequence.target_positions) for sequence in batch]
        with clock.phase("loss"):
            tokens = LossTokens.of_lengths(
                new_R, old_R.to(self.device), [sequence.advantage for sequence in batch], counts, **frozen
            )
            # Of no tokens there is no loss, but a gradient of zero, by which all ranks stay in step.
            none = LossTerms(new_R.sum(), torch.zeros(0, dtype=torch.bool))
            terms = self._objective(tokens, self._denominators) if part.target_count else none
            balance = self.model.routes.balance_loss() / self._input_token_count
        with clock.phase("backward"):
            (terms.loss + self._optim.balance_coefficient * balance).backward()
        lengths = [sequence.input_count for sequence in batch]
        sums = {"loss": float(terms.loss.detach()), **terms.figures}
        self._known_count += self._whole(sum(counts) - sums.get("logps_unknown", 0.0))
        sums["logps_unknown"] = sums.get("logps_unknown", 0.0) + sum(each.unknown_logp_count for each in batch)
        sums["model_flops"] = self._cost.flops(lengths, sum(counts))
        sums["sequences"] = len(batch)
        sums = {name: self._whole(value) for name, value in sums.items()}
        sums["balance_loss"] = float(balance.detach())
        logp_R = new_R.detach().cpu().numpy()
        figures = TokenFigures(
            logp_R=logp_R,
            entropy_R=entropy_R.cpu().numpy(),
            inactive_R=terms.inactive_T.cpu().numpy(),
            engine_R=old_R.numpy(),
            sampled_R=_joined([sequence.sampled_at for sequence in batch], np.int64),
            oldest_R=_joined([sequence.kv_oldest for sequence in batch], np.int64),
            replayed_R=_joined([sequence.replayed_R for sequence in batch], np.bool_),
            lengths=lengths,
            row_tokens=sum(part.lengths),
            unknown_count=sum(int((~sequence.known_N).sum()) for sequence in batch),
        )
        self.figures.add(
            figures if self.world.context_rank == 0 else None,
            sums,
            self.model.routes.choice_counts().cpu().numpy(),
        )
        return logp_R

    def _whole(self, value: float) -> float:
        """A figure of a whole micro-batch, which all ranks of a context group have: counted by one of them."""
        return float(value) if self.world.context_rank == 0 else 0.0

    def _of_all_ranks(self, figures: StepFigures) -> StepFigures:
        """At rank 0, those of all; elsewhere this rank's."""
        if self.world.alone:
            return figures
        whole = StepFigures()
        for data in self.world.gather(figures.to_bytes()):
            whole.merge(StepFigures.from_bytes(data))
        return whole if self.world.rank == 0 else figures

    def _note_choices(self, counts_LE: Tensor) -> None:
        """What the next step's balance loss goes by; a rank may have come by no tokens."""
        share_LE = self.expert_share_LE
        counts_LE = self.world.sum(counts_LE if counts_LE.numel() else torch.zeros(share_LE.shape, dtype=torch.int64))
        if counts_LE.any():
            self.expert_share_LE = (counts_LE / counts_LE.sum(1, keepdim=True).clamp(min=1)).float()

    @torch.no_grad()
    def logps(self, batch: Sequence[TrainSequence]) -> NDArray[np.float32]:
        """Log-probabilities of the targets of a micro-batch, routes replayed."""
        return self.ranked.logps(slice_for(self.ranked, batch), temperatures(batch))[0].cpu().numpy()

    @torch.no_grad()
    def probe(self, token_ids: Sequence[int]) -> tuple[list[float], float]:
        """Log-probabilities of `token_ids[1:]`, routed live, and the smallest margin by which an expert was chosen.

        A margin near zero means that rounding could choose another expert, and that engine and trainer may differ.
        """
        part = slice_for(self.ranked, [plain_sequence(token_ids, self.model.routes)])
        logps_R, _ = self.ranked.logps(part, replay=False, margins=True)
        return logps_R.tolist(), float(self.world.smallest(torch.tensor(self.model.routes.margin())))

    @torch.no_grad()
    def begin_export(self) -> Copying:
        """Copies of all weights, adapters merged, by Hugging Face name (`host_copies.py`). Of a rank alone."""
        return self._copies.begin(to_hf(self.model))

    @torch.no_grad()
    def begin_adapter_export(self, *, with_base: bool) -> Copying:
        """Copies of the adapter's tensors, and of the weights that it is added to. Of a rank alone."""
        adapters = adapters_of(self.model)
        assert adapters is not None
        return self._copies.begin({**(to_hf(self.model, merged=False) if with_base else {}), **adapters.tensors()})

    def export(self) -> dict[str, NDArray[np.float32]]:
        """`begin_export`, and wait for it."""
        return self.begin_export().arrays()

    def export_adapter(self, *, with_base: bool) -> dict[str, NDArray[np.float32]]:
        """`begin_adapter_export`, and wait for it."""
        return self.begin_adapter_export(with_base=with_base).arrays()

    @torch.no_grad()
    def keep(self, lender: Lender, version: PolicyVersion) -> KeptShard:
        """Copy what this rank holds to where readers find it, in the order of the engines' parameters."""
        boxes = tensor_boxes(self.model, self._places) if not self.world.alone else whole_boxes(to_hf(self.model))
        return lender.keep(version, in_engine_order(boxes))

    def export_boxes(self) -> list[Box]:
        """Copies of the weights that this rank holds, by Hugging Face name."""
        return boxes_of(self.model, self._places)

    def whole_tensors(self) -> dict[str, Tensor]:
        """All weights by Hugging Face name at rank 0, nothing elsewhere; all ranks take part."""
        if self.world.alone:
            return {name: tensor.cpu() for name, tensor in to_hf(self.model).items()}
        return whole_tensors(self.model, self._places, keep=self.world.rank == 0)


def _there(batch: Sequence[TrainSequence | Lost]) -> list[TrainSequence]:
    return [sequence for sequence in batch if isinstance(sequence, TrainSequence)]


def _joined(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts])
