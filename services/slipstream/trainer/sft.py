"""Supervised warm-up: cross-entropy on the answers of demonstrations, ended by a validation set.

The rate is constant until the model answers `target_accuracy` of the validation set exactly, then falls linearly to
zero: a start strong enough to earn rewards, weak enough to leave something to learn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from slipstream.common.config import ConfigError, cli
from slipstream.common.errors import SlipstreamError
from slipstream.common.exits import FAILED, REFUSED, end
from slipstream.common.telemetry import setup_logging
from slipstream.models.base import Model
from slipstream.trainer.config import SftConfig, TrainerConfig
from slipstream.trainer.model_dir import prepare_model_dir_when_room
from slipstream.trainer.packed import Packed
from slipstream.trainer.start import make_model
from slipstream.trainer.status import Status

PRINTED_STEPS = 10


class Example(Protocol):
    """A prompt and the answer to learn, end token included."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...

    @property
    def answer_ids(self) -> Sequence[int]: ...


class Demonstrations(Protocol):
    """Where examples come from; the same seed gives the same ones."""

    def batch(self, step: int, size: int) -> Sequence[Example]:
        """Training examples of one step, from 1."""
        ...

    def validation(self) -> Sequence[Example]:
        """Examples with one right answer each, none of them in any batch."""
        ...


@dataclass(frozen=True)
class SftProgress:
    """Where the warm-up is."""

    step: int
    loss: float
    accuracy: float
    """Part of the validation set answered exactly, at the last validation."""

    fraction_done: float
    """An estimate until the decay begins, 0 to 1."""


def warm_up(
    model: Model,
    config: SftConfig,
    demonstrations: Demonstrations,
    on_progress: Callable[[SftProgress], None] = lambda progress: None,
) -> SftProgress:
    """Train in place. `on_progress` is called after every step, on the calling thread."""
    adamw = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=config.betas, fused=True)
    validation = demonstrations.validation()
    accuracy, decay_start, step = 0.0, config.max_steps, 0
    progress = SftProgress(0, 0.0, 0.0, 0.0)
    while step < decay_start + config.decay_steps:
        step += 1
        lr = config.lr * min(1.0, 1.0 - (step - decay_start) / (config.decay_steps + 1))
        for group in adamw.param_groups:
            group["lr"] = lr
        loss = _step(model, adamw, demonstrations.batch(step, config.batch_size), config.balance_coefficient)
        if step < decay_start and step % config.validate_every == 0:
            accuracy = exact_fraction(model, validation)
            if accuracy >= config.target_accuracy:
                decay_start = step
        progress = SftProgress(step, loss, accuracy, _fraction_done(config, step, decay_start, accuracy))
        on_progress(progress)
    progress = SftProgress(step, progress.loss, exact_fraction(model, validation), 1.0)
    on_progress(progress)
    return progress


def _fraction_done(config: SftConfig, step: int, decay_start: int, accuracy: float) -> float:
    """Before the decay, the better of two guesses: by accuracy and by steps."""
    if step >= decay_start:
        return min(1.0, 0.8 + 0.2 * (step - decay_start) / max(1, config.decay_steps))
    by_accuracy = accuracy / config.target_accuracy if config.target_accuracy else 0.0
    return 0.8 * min(1.0, max(by_accuracy, step / config.max_steps))


def _step(model: Model, adamw: torch.optim.Optimizer, batch: Sequence[Example], balance_coefficient: float) -> float:
    packed = _pack(batch)
    adamw.zero_grad(set_to_none=True)
    loss = F.cross_entropy(packed.logits_RV(model, balance=True), packed.targets_R)
    (loss + balance_coefficient * model.routes.balance_loss()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adamw.step()
    return float(loss.detach())


@torch.no_grad()
def exact_fraction(model: Model, examples: Sequence[Example]) -> float:
    """Part of the examples that greedy decoding answers exactly.

    One pass tells: greedy decoding gives the answer if and only if, after every prefix of the answer, the most likely
    token is the answer's next one.
    """
    if not examples:
        return 0.0
    packed = _pack(examples)
    right_R = packed.logits_RV(model).argmax(-1) == packed.targets_R
    parts = right_R.split([len(example.answer_ids) for example in examples])
    return sum(bool(part.all()) for part in parts) / len(examples)


def _pack(examples: Sequence[Example]) -> Packed:
    ids = [np.array([*example.prompt_ids, *example.answer_ids], dtype=np.int32) for example in examples]
    targets = [
        np.arange(len(example.prompt_ids), len(example.prompt_ids) + len(example.answer_ids)) for example in examples
    ]
    return Packed.of(ids, targets)


def main() -> None:
    """`slipstream sft`: warm up a random start and leave it in `<run_dir>/model/`."""
    config = cli(TrainerConfig)
    setup_logging(config, "trainer")
    torch.set_num_threads(config.torch_threads)

    def on_progress(progress: SftProgress) -> None:
        if progress.step % PRINTED_STEPS == 0:
            print(f"step {progress.step}: loss {progress.loss:.3f}, validation {progress.accuracy:.2f}", flush=True)

    try:
        prepare_model_dir_when_room(config)
        _, figures = make_model(config, on_progress, Status())
    except ConfigError as error:
        end(REFUSED, str(error))
    except SlipstreamError as error:
        end(FAILED, str(error))
    print(
        f"warmed up in {figures['sft_step']:.0f} steps, validation {figures['sft_accuracy']:.2f}: {config.model_dir}",
        flush=True,
    )


if __name__ == "__main__":
    main()
