"""Losses from configuration, in training steps: the built-in ones, a user's, with a reference and with a teacher."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.common.config import ConfigError
from slipstream.trainer.config import ModelConfig, SftConfig, TrainerConfig
from slipstream.trainer.frozen import FrozenModels
from slipstream.trainer.loss_config import (
    ClippedLossConfig,
    DistillationLossConfig,
    DrGrpoLossConfig,
    GrpoLossConfig,
    ImportedLossConfig,
    LossConfig,
    PpoLossConfig,
)
from slipstream.trainer.model_dir import prepare_model_dir
from slipstream.trainer.objective import build_objective
from slipstream.trainer.sequence import TrainSequence
from slipstream.trainer.start import start
from slipstream.trainer.status import Status
from slipstream.trainer.step import Learner

from .tiny import BASE, OPTIM, sequence, tiny_model

TINY = ModelConfig(dim=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, expert_dim=16)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def rollouts(agent: Learner) -> list[TrainSequence]:
    """Three, of which the engine said what the trainer says."""
    batch = [sequence(seed, advantage=a) for seed, a in ((1, 1.0), (2, -1.0), (3, 0.5))]
    return [replace(each, engine_logps=agent.logps([each])) for each in batch]


def trained(agent: Learner, micro_batches: list[list[TrainSequence]], step: int = 1) -> dict[str, float]:
    return agent.train(micro_batches, step=step, loss_token_count=15, trained=BASE)


def loss_of(config: LossConfig, batch: list[TrainSequence]) -> float:
    return trained(Learner(tiny_model(), OPTIM, config), [batch])["loss"]


def test_the_means_of_a_step_are_over_its_tokens_its_sequences_or_a_fixed_length():
    batch = rollouts(Learner(tiny_model(), OPTIM, PpoLossConfig()))  # five tokens each, all ratios 1
    cut = [batch[0], batch[1], replace_targets(batch[2], 2)]
    assert loss_of(PpoLossConfig(), cut) == pytest.approx(-(5 * 1.0 - 5 * 1.0 + 2 * 0.5) / 15, abs=1e-5)
    assert loss_of(GrpoLossConfig(reference_kl_coefficient=0), cut) == pytest.approx(-(1.0 - 1.0 + 0.5) / 3, abs=1e-5)
    fixed = DrGrpoLossConfig(fixed_length_tokens=10)
    assert loss_of(fixed, cut) == pytest.approx(-(5 * 1.0 - 5 * 1.0 + 2 * 0.5) / 30, abs=1e-5)


def replace_targets(whole: TrainSequence, count: int) -> TrainSequence:
    fields = ("target_positions", "engine_logps", "sampled_at", "kv_oldest")
    return replace(whole, **{name: getattr(whole, name)[:count] for name in fields})


def test_the_reference_starts_at_no_distance_stays_where_it_was_and_is_left_behind():
    model, reference = tiny_model(), tiny_model()
    loss = GrpoLossConfig(reference_kl_coefficient=0.04)
    agent = Learner(model, OPTIM, loss, FrozenModels(reference=reference))
    before = {name: tensor.clone() for name, tensor in reference.named_parameters()}
    batch = rollouts(agent)
    first = trained(agent, [batch], 1)
    later = trained(agent, [batch[:1], batch[1:]], 2)
    assert first["reference_kl"] == pytest.approx(0.0, abs=1e-9)
    assert later["reference_kl"] > 1e-6
    assert all(torch.equal(before[name], tensor) for name, tensor in reference.named_parameters())


def test_a_strong_reference_kl_holds_the_policy_near_it():
    distances = []
    for coefficient in (1e-6, 50.0):
        agent = Learner(
            tiny_model(),
            OPTIM,
            PpoLossConfig(reference_kl_coefficient=coefficient),
            FrozenModels(reference=tiny_model()),
        )
        batch = rollouts(agent)
        figures = [trained(agent, [batch], step) for step in range(1, 9)]
        distances.append(figures[-1]["reference_kl"])
    assert distances[1] < distances[0] / 5


def test_a_student_comes_nearer_to_its_teacher_without_any_reward():
    teacher = tiny_model(seed=5)
    loss = DistillationLossConfig(teacher=Path("unread"))
    agent = Learner(tiny_model(), OPTIM, loss, FrozenModels(teacher=teacher))
    batch = [replace(each, advantage=0.0) for each in rollouts(agent)]
    told = Learner(teacher, OPTIM, PpoLossConfig())
    routed_live = [replace(each, routes=replace(each.routes, unknown_ranges=((0, 9),))) for each in batch]
    wanted = np.concatenate([told.logps([each]) for each in routed_live])
    gaps = []
    for step in range(1, 13):
        gaps.append(np.concatenate([agent.logps([each]) for each in batch]) - wanted)
        figures = trained(agent, [batch], step)
        assert figures["teacher_kl"] == pytest.approx(gaps[-1].sum() / 15, abs=1e-4)
    # What teacher workers say of the same tokens, in place of a teacher in the trainer, is the same step.
    apart = Learner(tiny_model(), OPTIM, loss)
    split = np.split(wanted.astype(np.float32), np.cumsum([len(each.target_positions) for each in batch])[:-1])
    judged = [replace(each, teacher_logps=part) for each, part in zip(batch, split, strict=True)]
    assert trained(apart, [judged], 1)["teacher_kl"] == pytest.approx(gaps[0].sum() / 15, abs=1e-4)
    assert np.concatenate([apart.logps([each]) for each in batch]) - wanted == pytest.approx(gaps[1], abs=1e-4)
    # On the same tokens again and again: those that the teacher finds likelier rise, the others fall.
    assert np.abs(gaps[-1]).mean() < np.abs(gaps[0]).mean()


def test_tokens_of_which_the_engine_gave_no_number_are_counted_in_the_step():
    agent = Learner(tiny_model(), OPTIM, PpoLossConfig())
    batch = rollouts(agent)
    batch[0] = replace(batch[0], unknown_logp_count=3)
    assert trained(agent, [batch], 1)["logps_unknown"] == 3


def test_a_users_loss_is_imported_by_path_and_trains_with_its_options_and_figures():
    agent = Learner(tiny_model(), OPTIM, ImportedLossConfig(path="own_losses:plain", options={"scale": 2.0}))
    batch = rollouts(agent)
    logps = np.concatenate([each.engine_logps * each.advantage for each in batch])
    figures = trained(agent, [batch[:2], batch[2:]], 1)
    assert figures["loss"] == pytest.approx(-2.0 * logps.sum() / 15, rel=1e-4)
    assert figures["seen"] == 2.0  # one for each micro-batch
    assert agent.logps(batch[:1]).sum() > batch[0].engine_logps.sum()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "has no attribute 'missing'"),
        ("NOT_A_FUNCTION", "is not callable"),
        ("no_terms", "own_losses:no_terms returns Tensor, not LossTerms"),
        ("by_token", "a loss of shape (3,) and inactive_T of (3,); () and (3,) are needed"),
        ("without_gradient", "fails with RuntimeError"),
    ],
)
def test_a_users_loss_that_cannot_be_used_is_refused_at_the_start(name: str, words: str):
    with pytest.raises(ConfigError, match=r"^trainer\.loss\.path: ") as caught:
        build_objective(ImportedLossConfig(path=f"own_losses:{name}"))
    assert words in str(caught.value)


def config(run_dir: Path, loss: LossConfig, **fields) -> TrainerConfig:
    return TrainerConfig(run_dir=run_dir, model=TINY, sft=SftConfig(enabled=False), loss=loss, **fields)


def test_the_reference_of_a_run_is_what_its_first_step_started_from(tmp_path):
    asked = config(tmp_path, GrpoLossConfig())
    prepare_model_dir(asked)
    learner, _ = start(asked, Status())
    reference = FrozenModels.load(asked).reference
    assert reference is not None
    started = dict(learner.model.named_parameters())
    for name, tensor in reference.named_parameters():
        assert torch.equal(tensor, started[name])
        assert not tensor.requires_grad


def test_without_a_loss_that_asks_for_them_no_model_is_kept_frozen(tmp_path):
    assert FrozenModels.load(config(tmp_path, ClippedLossConfig())) == FrozenModels()


@pytest.fixture
def teacher(tmp_path) -> Path:
    """A model directory like the run's own."""
    asked = config(tmp_path / "teacher", PpoLossConfig(), seed=9)
    prepare_model_dir(asked)
    start(asked, Status())
    return asked.model_dir


def test_a_teacher_is_loaded_from_a_model_directory(tmp_path, teacher):
    asked = config(tmp_path / "run", DistillationLossConfig(teacher=teacher))
    loaded = FrozenModels.load(asked).teacher
    assert loaded is not None
    assert loaded.sizes.max_context_tokens == 64


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("gone", "is no directory"),
        ("context", "has a context of 64 tokens; the run's is 128"),
        ("vocabulary", " tokens; the run's is 4096"),
        ("tokenizer", "has another tokenizer than the run"),
        ("weights", "has no *.safetensors"),
        ("tokenizer file", "tokenizer.json cannot be read"),
        ("config file", "config.json is damaged: it holds no JSON object"),
    ],
)
def test_a_teacher_that_cannot_judge_this_run_is_refused(tmp_path, teacher, broken: str, words: str):
    asked = config(tmp_path / "run", DistillationLossConfig(teacher=teacher))
    if broken == "gone":
        asked = config(tmp_path / "run", DistillationLossConfig(teacher=tmp_path / "nowhere"))
    elif broken == "context":
        asked = asked.model_copy(update={"model": TINY.model_copy(update={"max_context_tokens": 128})})
    elif broken == "vocabulary":
        asked = asked.model_copy(update={"model": TINY.model_copy(update={"vocab_size": 4096})})
    elif broken == "tokenizer":
        file = teacher / "tokenizer.json"
        file.write_text(file.read_text().replace("<|pad|>", "<|fill|>"))
    elif broken.endswith(" file"):
        (teacher / broken.replace(" file", ".json")).write_text("[]")
    else:
        (teacher / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"^trainer\.loss\.teacher ") as caught:
        FrozenModels.load(asked)
    assert words in str(caught.value)
