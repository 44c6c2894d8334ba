"""Fine-tuning: cross-entropy of the assistant's tokens, over all of a step's, however they are packed."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
import torch
import torch.nn.functional as F

from slipstream.algorithms.packing import pack
from slipstream.common.errors import CheckpointFailed
from slipstream.common.version import PolicyVersion
from slipstream.models.base import Model
from slipstream.trainer.chat.batches import plan_steps
from slipstream.trainer.chat.config import ChatConfig
from slipstream.trainer.chat.examples import Dataset, Example
from slipstream.trainer.checkpoint_state import Target, load, save_async, wait
from slipstream.trainer.checkpoint_store import CheckpointStore
from slipstream.trainer.offload import ActivationOffload
from slipstream.trainer.optimizer import ModelOptimizer
from slipstream.trainer.packed import Packed

log = structlog.get_logger()

MAX_SKIPPED_IN_A_ROW = 3
PLAN = "plan"
"""Of a checkpoint: what the steps learn from, in their order, as a digest."""


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

    def __init__(self, model: Model, config: ChatConfig, data: Dataset) -> None:
        self.model = model
        self._config = config
        self._data = data
        lengths = [len(example.token_ids) for example in data.training]
        self.steps = plan_steps(lengths, config.training, config.seed)
        optim = config.optim.model_copy(update={"total_steps": len(self.steps)})
        self._optim = optim
        self._optimizer = ModelOptimizer(model.named_parameters(), optim)
        self._offload = ActivationOffload(enabled=optim.offload_activations)
        self._store = CheckpointStore(config.checkpoint_dir, config.checkpoint.keep_last)
        self._saving: Future[Any] | None = None
        self._plan = _digest(data.training, self.steps)
        self._step = self._skipped = self._skipped_in_a_row = 0
        self._saved_step = -1
        self._save_failed = False

    def restore(self) -> int:
        """Go on from the newest checkpoint, if there is one; returns its step.

        Raises `ConfigError` and `CheckpointFailed`, and `ValueError` where it learned from something else.
        """
        saved = self._store.newest()
        if saved is None:
            return 0
        plan = torch.zeros_like(self._plan)
        load(self.model, self._optimizer, {PLAN: plan}, saved.path, "optim")
        step = saved.version.step
        if not torch.equal(plan, self._plan):
            raise ValueError(f"the checkpoint of step {step} learned from other data, or in other steps")
        self._step = self._saved_step = step
        self._skipped = int(saved.figures["skipped_steps"])
        return step

    def run(self, on_progress: Callable[[Progress], None], stopped: Callable[[], bool] = lambda: False) -> bool:
        """Take the steps that are left; returns whether all were taken. Leaves a checkpoint.

        Raises `Diverged`, and `CheckpointFailed` for the last one; one before is tried again after the next step.
        """
        every = self._config.training.validate_every
        if not self._step:
            self._validate(on_progress)
        while self._step < len(self.steps) and not stopped():
            self._step += 1
            on_progress(Progress(self._step, len(self.steps), self._train(self.steps[self._step - 1])))
            if self._step % every == 0 or self._step == len(self.steps):
                self._validate(on_progress)
            if self._saving is not None and self._saving.done():
                self._settle()
            due = self._save_failed or self._step % self._config.checkpoint.every_steps == 0
            if due and self._step < len(self.steps):
                self._save()
        self._settle()
        self._save()
        self._wait()
        return self._step == len(self.steps)

    def _save(self) -> None:
        """Copy the state; the copy is written beside the next steps."""
        if self._step == self._saved_step:
            return
        self._settle()
        version, figures = PolicyVersion(1, self._step), {"skipped_steps": float(self._skipped)}
        begin, commit = partial(self._store.begin, version), partial(self._store.commit, version, figures)
        target = Target(begin, self._store.scratch(version), commit)
        self._saving = save_async(self.model, self._optimizer, {PLAN: self._plan}, target, group=None)
        self._saved_step, self._save_failed = self._step, False

    def _settle(self) -> None:
        """Wait for the one that is being written; a failure is logged, and the next step tries again."""
        try:
            self._wait()
        except CheckpointFailed as error:
            log.error("checkpoint_failed", step=self._saved_step, detail=error.message)
            self._saved_step, self._save_failed = -1, True

    def _wait(self) -> None:
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            wait(saving)
        except CheckpointFailed:
            self._store.discard(PolicyVersion(1, self._saved_step))
            raise

    def _train(self, indexes: Sequence[int]) -> dict[str, float]:
        """One step; where loss or gradient is not finite, weights and state stay as they are."""
        started_s = time.monotonic()
        examples = [self._data.training[index] for index in indexes]
        target_count = sum(len(example.target_positions) for example in examples)
        input_count = sum(len(example.token_ids) - 1 for example in examples)
        self._optimizer.zero_grad()
        loss, slots = 0.0, 0
        for batch in self._micro_batches(examples):
            packed = _packed(batch)
            with self._offload.forward():
                logits_RV = packed.logits_RV(self.model, balance=True)
                part = F.cross_entropy(logits_RV, packed.targets_R, reduction="sum") / target_count
            balance = self.model.routes.balance_loss() * (packed.tokens_1T.numel() / input_count)
            (part + self._optim.balance_coefficient * balance).backward()
            loss += float(part.detach())
            slots += math.prod(packed.documents.shape)
        norm = torch.nn.utils.clip_grad_norm_(list(self.model.parameters()), self._optim.max_grad_norm)
        figures = {"loss_tokens": target_count, "tokens": input_count, "sequences": len(examples)}
        if math.isfinite(loss) and bool(torch.isfinite(norm)):
            self._skipped_in_a_row = 0
            rate = self._optimizer.step(self._step)
            figures |= {"loss": loss, "grad_norm": float(norm), "learning_rate": rate}
        else:
            self._skip(examples)
        duration_s = time.monotonic() - started_s
        return {
            **figures,
            "skipped_steps": self._skipped,
            "padding_fraction": 1 - input_count / slots,
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

    @torch.no_grad()
    def _validate(self, on_progress: Callable[[Progress], None]) -> None:
        """The mean over all tokens of the validation set."""
        if not self._data.validation:
            return
        total, count = 0.0, 0
        for batch in self._micro_batches(self._data.validation):
            packed = _packed(batch)
            logits_RV = packed.logits_RV(self.model)
            total += float(F.cross_entropy(logits_RV, packed.targets_R, reduction="sum"))
            count += packed.targets_R.numel()
        on_progress(Progress(self._step, len(self.steps), {"validation_loss": total / count}))

    def _micro_batches(self, examples: Sequence[Example]) -> list[list[Example]]:
        lengths = [len(example.token_ids) - 1 for example in examples]
        (batches,) = pack(lengths, self._config.training.micro_batch_tokens)
        return [[examples[index] for index in batch] for batch in batches]


def _packed(batch: Sequence[Example]) -> Packed:
    return Packed.of([example.token_ids for example in batch], [example.target_positions for example in batch])


def _digest(training: Sequence[Example], steps: Sequence[Sequence[int]]) -> torch.Tensor:
    sha256 = hashlib.sha256()
    for example in training:
        sha256.update(example.token_ids.tobytes() + b"/" + example.target_positions.tobytes() + b"\n")
    sha256.update(repr(steps).encode())
    return torch.frombuffer(bytearray(sha256.digest()), dtype=torch.uint8)
