"""Fine-tuning: the step of `trainer/step.py` on the likelihood of the assistant's tokens, over all of a step's.

Every rank has one, and calls the same methods in the same order.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import structlog
import torch
import torch.distributed as dist

from slipstream.algorithms.losses import likelihood_loss
from slipstream.algorithms.objective import Objective
from slipstream.algorithms.packing import pack
from slipstream.common.errors import CheckpointFailed
from slipstream.common.version import PolicyVersion
from slipstream.models.base import Model
from slipstream.trainer.chat.batches import order, plan_steps
from slipstream.trainer.chat.config import ChatConfig
from slipstream.trainer.chat.examples import Dataset, Example
from slipstream.trainer.checkpoint_state import Saving, Target, load, own_group, save_async
from slipstream.trainer.checkpoint_store import CheckpointStore, Saved
from slipstream.trainer.compute import passes_of
from slipstream.trainer.newest import newest_of_all
from slipstream.trainer.parallel.world import World
from slipstream.trainer.sequence import TrainSequence, plain_sequence
from slipstream.trainer.step import Learner

log = structlog.get_logger()

MAX_SKIPPED_IN_A_ROW = 3
PLAN = "plan"
"""Of a checkpoint: what its steps learned from, in their order, as a digest."""
SKIPPED, TAKEN = "skipped_steps", "conversations"
"""Figures of a checkpoint: steps that changed nothing, and conversations that were learned from, over all epochs."""


class Diverged(Exception):
    """Loss or gradient was not finite too often."""


@dataclass(frozen=True)
class Progress:
    """One step, or one validation between two."""

    step: int
    step_count: int
    figures: dict[str, float]


class Finetuner:
    """One model, and the steps it is to take."""

    def __init__(
        self,
        model: Model,
        config: ChatConfig,
        data: Dataset,
        world: World | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Looks for what there is to go on from. Raises `CheckpointFailed` where ranks do not find the same."""
        self.world = world or World()
        self._config = config
        self._data = data
        self._store = CheckpointStore(config.checkpoint_dir, config.checkpoint.keep_last)
        self._saved = newest_of_all(self._store, self.world, stopped)
        self._saved_step = -1 if self._saved is None else self._saved.version.step
        self._step, self._skipped = max(0, self._saved_step), int(_figure(self._saved, SKIPPED))
        self._taken = int(_figure(self._saved, TAKEN))
        lengths = [len(example.token_ids) for example in data.training]
        self._steps = plan_steps(lengths, config.training, config.seed, step=self._step, taken=self._taken)
        self._steps_before = self._step
        self.step_count = self._step + len(self._steps)
        optim = config.optim.model_copy(update={"total_steps": max(1, self.step_count)})
        objective, passes = Objective(likelihood_loss), passes_of(config.compute)
        self.learner = Learner(model, optim, objective, None, self.world, config.parallel, passes)
        self._group: dist.ProcessGroup | None = None
        self._saving: Saving | None = None
        self._skipped_in_a_row = 0
        self._save_failed = False

    @property
    def resumes(self) -> bool:
        """Whether `restore` has weights to bring."""
        return self._saved is not None

    def restore(self) -> int:
        """Go on from the newest checkpoint, if there is one; returns its step.

        Raises `ConfigError` and `CheckpointFailed`, and `ValueError` where it learned from something else.
        """
        if self._saved is None:
            return 0
        expected = self._digest()
        plan = torch.zeros_like(expected)
        learner = self.learner
        others = {PLAN: plan, **learner.carried}
        load(learner.model, learner.optimizer, others, self._saved.path, "optim")
        if not torch.equal(plan, expected):
            raise ValueError(f"the checkpoint of step {self._step} learned from other data, or in another order")
        return self._step

    def run(self, on_progress: Callable[[Progress], None], stopped: Callable[[], bool] = lambda: False) -> bool:
        """Take the steps that are left; returns whether all were taken. Leaves a checkpoint.

        Progress is told at rank 0. Raises `Diverged`, and `CheckpointFailed` for the last one; one before is tried
        again after the next step.
        """

        def tell(figures: dict[str, float]) -> None:
            if figures and self.world.rank == 0:
                on_progress(Progress(self._step, self.step_count, figures))

        every = self._config.training.validate_every
        if not self._step:
            tell(self._validate())
        while self._step < self.step_count and self.world.all_agree(not stopped()):
            tell(self._train(self._steps[self._step - self._steps_before]))
            if self._step % every == 0 or self._step == self.step_count:
                tell(self._validate())
            if self._saving is not None and self.world.all_agree(self._saving.done()):
                self._settle()
            due = self._save_failed or self._step % self._config.checkpoint.every_steps == 0
            if due and self._step < self.step_count:
                self._save()
        self._settle()
        self._save()
        self._wait()
        return self._step == self.step_count

    def _save(self) -> None:
        """Copy the state; the copy is written beside the next steps."""
        if self._step == self._saved_step:
            return
        self._settle()
        if self._group is None:
            self._group = own_group()
        version = PolicyVersion(1, self._step)
        figures = {SKIPPED: float(self._skipped), TAKEN: float(self._taken)}
        learner = self.learner
        others = {PLAN: self._digest(), **learner.carried}
        target = Target.of(self._store, version, figures)
        self._saving = save_async(learner.model, learner.optimizer, others, target, self._group)
        self._saved_step, self._save_failed = self._step, False

    def _settle(self) -> None:
        """Wait for the one that is being written; a failure is logged, and the next step tries again."""
        try:
            self._wait()
        except CheckpointFailed as error:  # of all ranks, or of none
            log.error("checkpoint_failed", step=self._saved_step, detail=error.message)
            self._saved_step, self._save_failed = -1, True

    def _wait(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def _train(self, indexes: Sequence[int]) -> dict[str, float]:
        """One step; where loss or gradient is not finite, weights and state stay as they are."""
        started_s = time.monotonic()
        self._step += 1
        self._taken += len(indexes)
        examples = [self._data.training[index] for index in indexes]
        target_count = sum(len(example.target_positions) for example in examples)
        input_count = sum(len(example.token_ids) - 1 for example in examples)
        batches = self._micro_batches(examples)
        own_count = sum(sequence.input_count for batch in batches for sequence in batch)
        self.learner.begin(target_count, len(examples), own_count, trained=0)
        self.learner.add(batches)
        found = self.learner.finish(self._step)
        if found["step_skipped"]:
            self._skip(examples)
        else:
            self._skipped_in_a_row = 0
        duration_s = time.monotonic() - started_s
        shown = () if found["step_skipped"] else ("loss", "grad_norm", "learning_rate", "padding_fraction")
        return {
            "loss_tokens": target_count,
            "tokens": input_count,
            "sequences": len(examples),
            **{name: found[name] for name in shown if name in found},
            "skipped_steps": self._skipped,
            "tokens_per_s": input_count / duration_s,
            "duration_s": duration_s,
        }

    def _skip(self, examples: Sequence[Example]) -> None:
        self._skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
            lines = ", ".join(str(example.line) for example in examples)
            raise Diverged(
                f"loss or gradient was not finite in {MAX_SKIPPED_IN_A_ROW} steps in a row, up to step {self._step}, "
                f"which learned from these lines of {self._config.data.train}: {lines}"
            )

    def _validate(self) -> dict[str, float]:
        """The mean over all tokens of the validation set; nothing without one."""
        if not self._data.validation:
            return {}
        total, count = 0.0, 0
        for batch in self._micro_batches(self._data.validation):
            if not batch and self.world.alone:
                continue
            logps_R = self.learner.logps(batch)
            if self.world.context_rank == 0:  # whose ranks have them all
                total, count = total - float(logps_R.sum()), count + len(logps_R)
        sums = self.world.sum(torch.tensor([total, count], dtype=torch.float64)).tolist()
        return {"validation_loss": sums[0] / sums[1]}

    def _micro_batches(self, examples: Sequence[Example]) -> list[list[TrainSequence]]:
        """Of this rank; all have as many."""
        lengths = [len(example.token_ids) - 1 for example in examples]
        ranks = pack(lengths, self._config.training.micro_batch_tokens, self.world.layout.data)
        form = self.learner.model.routes
        return [
            [plain_sequence(examples[n].token_ids, form, examples[n].target_positions) for n in batch]
            for batch in ranks[self.world.data_rank]
        ]

    def _digest(self) -> torch.Tensor:
        """Of what the steps so far learned from."""
        training, config = self._data.training, self._config
        sha256 = hashlib.sha256()
        for example in training:
            sha256.update(example.token_ids.tobytes() + b"/" + example.target_positions.tobytes() + b"\n")
        taken = list(islice(order(len(training), config.training.epochs, config.seed), self._taken))
        sha256.update(repr(taken).encode())
        return torch.frombuffer(bytearray(sha256.digest()), dtype=torch.uint8)


def _figure(saved: Saved | None, name: str) -> float:
    return 0.0 if saved is None else saved.figures.get(name, 0.0)
