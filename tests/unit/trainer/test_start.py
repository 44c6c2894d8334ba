"""What training starts from."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
from safetensors.torch import load_file

from slipstream.common.config import ConfigError
from slipstream.environments.config import ExpressionConfig
from slipstream.models.checkpoint import to_hf
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.registry import load_sizes
from slipstream.trainer.config import ModelConfig, SftConfig, TrainerConfig
from slipstream.trainer.model_dir import prepare_model_dir
from slipstream.trainer.start import Stopped, start
from slipstream.trainer.status import Status

SFT = SftConfig(batch_size=4, max_steps=2, decay_steps=1)
MODEL = ModelConfig(dim=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, expert_dim=16)


def config(run_dir, **fields) -> TrainerConfig:
    return TrainerConfig(run_dir=run_dir, model=MODEL, sft=SFT, environments=[ExpressionConfig()], **fields)


def test_sizes_and_tokenizer_are_there_before_anything_is_trained(tmp_path):
    sizes = prepare_model_dir(config(tmp_path))
    assert sizes.vocab_size > 90
    assert isinstance(sizes, MoeConfig)
    assert sizes.dim == 32
    assert {file.name for file in (tmp_path / "model").iterdir()} == {"config.json", "tokenizer.json"}
    assert load_sizes(tmp_path / "model") == sizes


def test_the_warm_up_leaves_a_model_directory_that_another_run_starts_from(tmp_path):
    first = config(tmp_path / "a")
    prepare_model_dir(first)
    status = Status()
    learner, figures = start(first, status)
    assert figures["sft_step"] == 3
    assert status.activity == "sft"
    assert status.fraction_done == 1.0
    assert status.parameter_count == sum(p.numel() for p in learner.model.parameters())
    (line,) = (tmp_path / "a" / "timeline" / "trainer.jsonl").read_text().splitlines()
    assert json.loads(line)["kind"] == "sft"

    second = config(tmp_path / "b", initial_model=first.model_dir)
    prepare_model_dir(second)
    loaded, figures = start(second, Status())
    assert figures == {}
    saved = load_file(tmp_path / "b" / "model" / "model.safetensors")
    for name, tensor in to_hf(learner.model).items():
        assert torch.equal(tensor, to_hf(loaded.model)[name])
        assert torch.equal(tensor, saved[name])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("null", "config.json is damaged"),
        ("", "config.json is damaged"),
        ('{"max_position_embeddings": "x"}', "max_position_embeddings is 'x', not a number"),
        ('{"rope_scaling": 5}', "config.json"),
        ('{"model_type": ["a"]}', "config.json"),
    ],
)
def test_a_start_with_a_damaged_config_json_is_refused(tmp_path, content, said):
    first = config(tmp_path / "a")
    prepare_model_dir(first)
    start(first, Status())
    file = first.model_dir / "config.json"
    changed = json.loads(content) if content.startswith("{") else None
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}) if changed else content)
    with pytest.raises(ConfigError, match=r"^trainer\.initial_model ") as caught:
        prepare_model_dir(config(tmp_path / "b", initial_model=first.model_dir))
    assert said in str(caught.value)


def test_the_same_seed_starts_the_same(tmp_path):
    learners = []
    for name in ("a", "b"):
        prepare_model_dir(config(tmp_path / name, seed=7))
        learners.append(start(config(tmp_path / name, seed=7), Status())[0])
    first, second = (to_hf(learner.model) for learner in learners)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"lora": {"targets": ["nope"]}}, r"trainer\.lora\.targets: the model has no 'nope'"),
        ({"fp8": {"targets": ["nope"]}}, r"trainer\.fp8\.targets: the model has no 'nope'"),
        ({"optim": {"groups": [{"pattern": "nope"}]}}, r"trainer\.optim\.groups\.0\.pattern: 'nope' matches none of"),
        (
            {"parallel": {"expert": 3}, "group": {"rank_count": 3}},
            r"trainer\.parallel\.expert: 3 ranks cannot share 4 experts",
        ),
        (
            {"parallel": {"context": 3}, "group": {"rank_count": 3}},
            r"trainer\.parallel\.context: 3 ranks cannot share 2 heads",
        ),
    ],
)
def test_what_the_model_does_not_have_is_refused_before_there_is_one(tmp_path, fields, says):
    given = TrainerConfig.model_validate({**config(tmp_path).model_dump(), **fields})
    prepare_model_dir(given)
    status = Status()
    with pytest.raises(ConfigError, match=says):
        start(given, status)
    assert status.activity != "sft"
    assert not (tmp_path / "model" / "model.safetensors").exists()


async def test_a_stop_ends_the_warm_up(tmp_path):
    status = Status()
    status.stop.set()
    prepare_model_dir(config(tmp_path))
    with pytest.raises(Stopped):
        start(config(tmp_path), status)


async def test_a_model_that_finds_no_room_is_written_when_there_is_some(small_disk):
    disk = small_disk(1 << 20)
    status = Status()
    prepare_model_dir(config(disk.path))
    disk.fill()
    starting = asyncio.create_task(asyncio.to_thread(start, config(disk.path), status))
    async with asyncio.timeout(60):
        while not status.disk_full:  # noqa: ASYNC110 another thread sets it
            await asyncio.sleep(0.01)
        assert status.shown_activity == "disk_full"
        assert not (disk.path / "model" / "model.safetensors").exists()
        disk.free()
        learner, _ = await starting
    assert not status.disk_full
    saved = load_file(disk.path / "model" / "model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in to_hf(learner.model).items())


async def test_a_stop_ends_the_wait_for_room(small_disk):
    disk = small_disk(1 << 20)
    status = Status()
    prepare_model_dir(config(disk.path))
    disk.fill()
    starting = asyncio.create_task(asyncio.to_thread(start, config(disk.path), status))
    async with asyncio.timeout(60):
        while not status.disk_full:  # noqa: ASYNC110 another thread sets it
            await asyncio.sleep(0.01)
        status.stop.set()
        with pytest.raises(Stopped):
            await starting
    assert {file.name for file in (disk.path / "model").iterdir()} <= {"config.json", "tokenizer.json", ".new"}


def test_a_large_model_s_weights_need_not_be_written(tmp_path):
    given = config(tmp_path, save_weights=False).model_copy(update={"sft": SftConfig(enabled=False)})
    prepare_model_dir(given)
    learner, _ = start(given, Status())
    assert {file.name for file in (tmp_path / "model").iterdir()} == {"config.json", "tokenizer.json"}
    assert all(parameter.isfinite().all() for parameter in learner.model.parameters())


def test_a_loss_with_a_reference_needs_the_weights_written(tmp_path):
    with pytest.raises(ValueError, match="save_weights: loss"):
        config(tmp_path, save_weights=False, loss={"type": "clipped", "reference_kl_coefficient": 0.1})
