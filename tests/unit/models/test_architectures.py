"""Models from elsewhere: directories in Hugging Face's form, and architectures by import path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from doc_blocks import files_of
from safetensors.torch import save_file

from slipstream.common.config import ConfigError
from slipstream.environments.tokenizer import TextCodec, build_tokenizer
from slipstream.models.checkpoint import to_hf
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.model import build_model, init_weights
from slipstream.models.registry import find_architecture, load_sizes, read_config
from slipstream.trainer.config import ModelConfig, TrainerConfig
from slipstream.trainer.model_dir import prepare_model_dir, sizes_at_start
from slipstream.trainer.start import start
from slipstream.trainer.status import Status

SIZES = MoeConfig(
    vocab_size=104, dim=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, expert_dim=16, max_context_tokens=4096
)


def from_elsewhere(directory: Path, **changes: object) -> dict[str, torch.Tensor]:
    """A model as it is published: bfloat16, in two files with an index; returns its weights."""
    directory.mkdir()
    model = build_model(SIZES)
    init_weights(model, 0)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in to_hf(model).items()}
    names = sorted(tensors)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name].clone() for name in part}, directory / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {
        **SIZES.to_hf(),
        "torch_dtype": "bfloat16",
        "eos_token_id": [5, 7],
        "transformers_version": "5.0",
        **changes,
    }
    (directory / "config.json").write_text(json.dumps(config))
    build_tokenizer().save(str(directory / "tokenizer.json"))
    return tensors


def config(run_dir: Path, **fields: object) -> TrainerConfig:
    return TrainerConfig.model_validate({"run_dir": run_dir, "environments": [], **fields})


def test_training_starts_from_a_directory_in_hugging_faces_form(tmp_path):
    tensors = from_elsewhere(tmp_path / "hf")
    trainer = config(tmp_path / "run", initial_model=tmp_path / "hf", model=ModelConfig(max_context_tokens=256))
    sizes = prepare_model_dir(trainer)
    assert sizes == SIZES.model_copy(update={"max_context_tokens": 256, "eos_token_id": 5})
    assert load_sizes(trainer.model_dir) == sizes
    assert TextCodec.load(trainer.model_dir).stop_token_ids == [5]
    learner, _ = start(trainer, Status())
    loaded = to_hf(learner.model)
    assert all(torch.equal(loaded[name], tensor.float()) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "llama"}, 'model.architecture = "llama"'),
        ({"model_type": "mixtral"}, "model_type is 'mixtral'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"num_experts": 65537}, "n_experts"),
    ],
)
def test_what_is_not_built_is_refused_in_one_sentence(tmp_path, changes, said):
    from_elsewhere(tmp_path / "hf", **changes)
    with pytest.raises(ConfigError, match=said):
        sizes_at_start(config(tmp_path / "run", initial_model=tmp_path / "hf"))


def test_a_missing_key_is_named(tmp_path):
    from_elsewhere(tmp_path / "hf")
    kept = {key: value for key, value in read_config(tmp_path / "hf").items() if key != "head_dim"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(kept))
    with pytest.raises(ConfigError, match="has no 'head_dim'"):
        sizes_at_start(config(tmp_path / "run", initial_model=tmp_path / "hf"))


def test_an_architecture_is_found_by_import_path_and_kept_with_the_model(tmp_path, monkeypatch):
    (tmp_path / "gelu_moe.py").write_text(files_of("docs/your-model.md")["gelu_moe.py"])
    monkeypatch.syspath_prepend(tmp_path)
    trainer = config(tmp_path / "run", model={"architecture": "gelu_moe", "dim": 32, "extra": {"anything": 1}})
    prepare_model_dir(trainer)
    assert load_sizes(trainer.model_dir).architecture == "gelu_moe"
    tokens = torch.arange(9).unsqueeze(0)
    outputs = []
    for name in ("gelu_moe", "qwen3_moe"):
        model = find_architecture(name).build_model(SIZES)
        find_architecture(name).init_weights(model, 0)
        model.routes.begin()
        outputs.append(model.logits(model.hidden(tokens)))
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3


def test_a_model_from_elsewhere_names_no_code(tmp_path):
    from_elsewhere(tmp_path / "hf", slipstream_architecture="not.to.be.imported")
    sizes = sizes_at_start(config(tmp_path / "run", initial_model=tmp_path / "hf"))
    assert sizes.architecture == "qwen3_moe"


def test_a_family_that_the_sizes_of_a_run_are_not_for_starts_from_a_directory(tmp_path):
    with pytest.raises(ConfigError, match="starts from trainer"):
        sizes_at_start(config(tmp_path / "run", model={"architecture": "llama"}))


def test_a_module_that_is_no_architecture_is_said_to_lack_its_functions():
    with pytest.raises(ConfigError, match="json lacks read_sizes, build_model, init_weights"):
        find_architecture("json")
    with pytest.raises(ConfigError, match="no module 'nowhere'"):
        find_architecture("nowhere")
