"""The supervised warm-up."""

from __future__ import annotations

import torch

from slipstream.trainer.config import SftConfig
from slipstream.trainer.sft import exact_fraction, warm_up

from .tiny import Reversals, TinyExample, tiny_model


def test_twenty_steps_lower_the_loss_and_report_each_step():
    seen = []
    result = warm_up(tiny_model(), SftConfig(batch_size=32, max_steps=15, decay_steps=5), Reversals(), seen.append)
    assert [p.step for p in seen[:-1]] == list(range(1, 21))
    assert seen[-1].loss < 0.8 * seen[0].loss
    assert seen[-1] == result
    fractions = [p.fraction_done for p in seen]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_it_stops_when_the_validation_set_is_good_enough():
    config = SftConfig(batch_size=8, target_accuracy=0.0, validate_every=3, decay_steps=4)
    assert warm_up(tiny_model(), config, Reversals()).step == 3 + 4


def test_exact_means_every_token_of_the_answer():
    model = tiny_model()
    prompt = [5, 6, 7, 0]
    answer: list[int] = []
    for _ in range(3):  # what greedy decoding answers
        logits = model(_row([*prompt, *answer]))
        answer.append(int(logits[0, -1].argmax()))
    wrong = [*answer[:2], (answer[2] + 1) % 20]
    examples = [TinyExample(prompt, answer), TinyExample(prompt, wrong)]
    assert exact_fraction(model, examples) == 0.5


def _row(ids: list[int]) -> torch.Tensor:
    return torch.tensor([ids])
