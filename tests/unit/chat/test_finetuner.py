"""Fine-tuning: what a step learns from, the same gradient however it is packed, and going on after an end."""

from __future__ import annotations

import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from slipstream.common.disk import AppendFile
from slipstream.common.errors import CheckpointFailed, DiskFull
from slipstream.models.base import Model
from slipstream.models.registry import find_architecture
from slipstream.trainer.chat.__main__ import Reporter
from slipstream.trainer.chat.batches import order, plan_steps
from slipstream.trainer.chat.config import ChatConfig, TrainingConfig
from slipstream.trainer.chat.examples import Dataset, load_dataset
from slipstream.trainer.chat.finetuner import Diverged, Finetuner, Progress
from slipstream.trainer.checkpoint_store import CheckpointStore
from tests.unit.chat.conversations import PLAIN_TEMPLATE, chat_template, codec, sizes, sums, write_rows


@given(
    st.lists(st.integers(2, 50), min_size=1, max_size=40),
    st.integers(2, 120),
    st.integers(1, 3),
    st.one_of(st.none(), st.integers(1, 20)),
)
def test_every_conversation_is_in_a_step_of_each_epoch_within_the_budget(lengths, tokens, epochs, max_steps):
    config = TrainingConfig(tokens_per_step=tokens, epochs=epochs, max_steps=max_steps)
    steps = plan_steps(lengths, config, 3)
    done = len(steps) // 2
    taken = sum(map(len, steps[:done]))
    assert steps[:done] + plan_steps(lengths, config, 3, step=done, taken=taken) == steps
    assert steps == plan_steps(lengths, config, 3)
    assert all(len(step) == 1 or sum(lengths[index] for index in step) <= tokens for step in steps)
    taken = [index for step in steps for index in step]
    if max_steps is None or len(steps) < max_steps:
        assert sorted(taken) == sorted(list(range(len(lengths))) * epochs)
    for epoch in range(len(taken) // len(lengths)):
        own = taken[epoch * len(lengths) : (epoch + 1) * len(lengths)]
        assert sorted(own) == list(range(len(lengths)))


def model() -> Model:
    built = find_architecture("llama").build_model(sizes())
    find_architecture("llama").init_weights(built, 1)
    return built


def config(run: Path, **training: Any) -> ChatConfig:
    run.mkdir(exist_ok=True)
    return ChatConfig.model_validate(
        {
            "run_dir": run,
            "start": {"initial": run},
            "data": {"train": write_rows(run / "rows.jsonl", sums(40)), "validation_rows": 8, "max_tokens": 64},
            "training": {"tokens_per_step": 300, "micro_batch_tokens": 100, "validate_every": 4, **training},
            "optim": {"lr": 1e-2, "warmup_steps": 2},
            "checkpoint": {"every_steps": 2, "keep_last": 2},
        }
    )


def data(of: ChatConfig) -> Dataset:
    return load_dataset(of.data, codec(), chat_template(PLAIN_TEMPLATE), of.seed)


def run(of: ChatConfig, tuner: Finetuner | None = None, stop_after: int = 10**9) -> list[Progress]:
    """Steps until the end, or until told to stop."""
    seen: list[Progress] = []
    tuner = tuner or Finetuner(model(), of, data(of))
    tuner.run(seen.append, lambda: sum("loss" in each.figures for each in seen) >= stop_after)
    return seen


def losses(seen: list[Progress]) -> list[float]:
    return [each.figures["loss"] for each in seen if "loss" in each.figures]


def validation(seen: list[Progress]) -> dict[int, float]:
    return {each.step: each.figures["validation_loss"] for each in seen if "validation_loss" in each.figures}


def test_loss_and_validation_loss_fall(tmp_path):
    seen = run(config(tmp_path, epochs=4))
    found = validation(seen)
    assert found.keys() == {0, *range(4, seen[-1].step + 1, 4), seen[-1].step}
    assert losses(seen)[-1] < 0.5 * losses(seen)[0]
    assert found[seen[-1].step] < 0.5 * found[0]


def test_a_step_s_loss_is_the_mean_over_the_assistants_tokens_however_it_is_packed(tmp_path):
    of = config(tmp_path / "a")
    whole, plain = data(of), model().requires_grad_(False)
    (first, *_) = plan_steps([len(e.token_ids) for e in whole.training], of.training, of.seed)
    total, count = 0.0, 0
    for index in first:
        example = whole.training[index]
        tokens = torch.from_numpy(example.token_ids.astype("int64"))
        plain.routes.begin()
        logits = plain.logits(plain.hidden(tokens[None]))[0][example.target_positions - 1]
        total += float(F.cross_entropy(logits, tokens[example.target_positions], reduction="sum"))
        count += len(example.target_positions)
    expected = total / count
    assert list(islice(order(len(whole.training), 2, of.seed), len(first))) == first
    grads = []
    for name, size in (("a", 100), ("b", 10_000), ("c", 2)):
        each = config(tmp_path / name, micro_batch_tokens=size, max_steps=1)
        tuner = Finetuner(model(), each, whole)
        seen = run(each, tuner)
        assert losses(seen) == [pytest.approx(expected, rel=1e-5)]
        grads.append(next(each.figures["grad_norm"] for each in seen if "grad_norm" in each.figures))
    assert grads == [pytest.approx(grads[0], rel=1e-4)] * 3


def test_a_stopped_run_goes_on_with_bit_equal_losses(tmp_path):
    uninterrupted = run(config(tmp_path / "whole", epochs=2))
    of = config(tmp_path / "cut", epochs=2)
    before = run(of, stop_after=3)
    second = Finetuner(model(), of, data(of))
    assert second.restore() == 3
    after = run(of, second)
    assert losses(before) + losses(after) == losses(uninterrupted)
    assert validation(before) | validation(after) == validation(uninterrupted)


def test_more_steps_go_on_where_a_finished_run_ended(tmp_path):
    of = config(tmp_path, epochs=1)
    first = run(of)
    longer = config(tmp_path, epochs=3)
    tuner = Finetuner(model(), longer, data(longer))
    assert tuner.restore() == first[-1].step
    more = run(longer, tuner)
    taken = [int(each.figures["sequences"]) for each in (*first, *more) if "loss" in each.figures]
    assert sum(taken) == 3 * len(data(of).training)
    assert [each.step for each in more if "loss" in each.figures] == list(
        range(first[-1].step + 1, tuner.step_count + 1)
    )
    assert losses(more)[-1] < losses(first)[-1]


def test_the_last_checkpoints_are_kept_and_one_that_is_not_whole_is_none(tmp_path):
    of = config(tmp_path, epochs=2)
    steps = run(of)[-1].step
    kept = sorted(int(path.name.removeprefix("1.")) for path in of.checkpoint_dir.iterdir())
    assert len(kept) == 2
    assert kept[-1] == steps
    torn = of.checkpoint_dir / f"1.{steps + 1}"
    shutil.copytree(of.checkpoint_dir / f"1.{steps}", torn)
    (torn / "COMPLETE").unlink()
    assert Finetuner(model(), of, data(of)).restore() == steps


def test_a_checkpoint_of_other_data_is_refused(tmp_path):
    of = config(tmp_path)
    run(of)
    write_rows(of.data.train, sums(39))
    with pytest.raises(ValueError, match="learned from other data"):
        Finetuner(model(), of, data(of)).restore()


def test_steps_that_are_not_finite_change_nothing_and_three_in_a_row_end_it(tmp_path):
    of = config(tmp_path, epochs=4)
    broken = model()
    with torch.no_grad():
        next(iter(broken.parameters()))[0, 0] = torch.nan
    before = {name: parameter.clone() for name, parameter in broken.named_parameters()}
    tuner, seen = Finetuner(broken, of, data(of)), []
    with pytest.raises(Diverged, match=r"3 steps in a row, up to step 3, .*rows.jsonl: \d+"):
        tuner.run(seen.append)
    assert [each.figures["skipped_steps"] for each in seen if "tokens" in each.figures] == [1, 2]
    assert all(torch.equal(p, before[n]) or torch.isnan(p).any() for n, p in broken.named_parameters())


def without_room(monkeypatch: pytest.MonkeyPatch, *steps: int) -> list[int]:
    """The disk has no room for the first checkpoints of these steps; returns all that are tried."""
    tried: list[int] = []
    commit = CheckpointStore.commit

    def full(store: CheckpointStore, version: Any, figures: dict[str, float]) -> None:
        tried.append(version.step)
        if version.step in steps:
            raise DiskFull("no room")
        commit(store, version, figures)

    monkeypatch.setattr(CheckpointStore, "commit", full)
    return tried


def test_a_checkpoint_that_finds_no_room_is_tried_again_and_ends_nothing(tmp_path, monkeypatch):
    tried = without_room(monkeypatch, 2, 3)
    of = config(tmp_path, epochs=2)
    steps = run(of)[-1].step
    assert tried[:1] == [2]
    assert tried[-1] == steps
    assert Finetuner(model(), of, data(of)).restore() == steps
    assert not list(of.checkpoint_dir.glob(".saving-*"))


def test_the_last_checkpoint_that_finds_no_room_ends_it_and_leaves_nothing_half_written(tmp_path, monkeypatch):
    of = config(tmp_path, epochs=2)
    tuner = Finetuner(model(), of, data(of))
    without_room(monkeypatch, tuner.step_count)
    with pytest.raises(CheckpointFailed, match="no room"):
        run(of, tuner)
    assert not list(of.checkpoint_dir.glob(".saving-*"))
    assert Finetuner(model(), of, data(of)).restore() < tuner.step_count


def test_figures_that_find_no_room_end_nothing(tmp_path, monkeypatch, capsys):
    def full(file: AppendFile, record: bytes) -> None:
        raise DiskFull("no room")

    monkeypatch.setattr(AppendFile, "append", full)
    Reporter(config(tmp_path))(Progress(1, 1, {"validation_loss": 2.0}))
    assert "validation loss 2.0" in capsys.readouterr().out
