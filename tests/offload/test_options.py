"""`[engine.offload]`: what is taken, what is refused with which words, and what vLLM is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from slipstream.common.config import ConfigError
from slipstream.engine.vllm.offload.options import offload_options
from slipstream.engine.worker.config import EngineConfig
from tests.engine.oracle import SIZES

MIB = 2**20


def read(**engine: Any) -> Any:
    return TypeAdapter(EngineConfig).validate_python(engine)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_memory_and_disk_as_vllms_own_options(model_dir: Path):
    config = read(
        type="vllm",
        offload={"memory_bytes": 8 * MIB, "disk_bytes": 64 * MIB, "directory": "cache/kv", "generated_tokens": False},
    )
    options = offload_options(config, model_dir, SIZES)
    extra = options.pop("kv_connector_extra_config")
    engine_id = options.pop("engine_id")
    assert engine_id.startswith("slipstream-")
    assert options == {
        "kv_connector": "OffloadConnector",
        "kv_connector_module_path": "slipstream.engine.vllm.offload.connector",
        "kv_role": "kv_both",
    }
    assert extra["cpu_bytes_to_use"] == 8 * MIB
    assert extra["offload_prompt_only"] is True
    assert extra["disk"] == {"directory": str(Path("cache/kv").absolute()), "disk_bytes": 64 * MIB, "io_threads": 2}
    assert extra["route_bytes_per_block"] == 32 * SIZES.n_layers * SIZES.top_k
    assert (extra["hash_algorithm"], extra["blocks_per_chunk"]) == ("sha256_cbor", 1)
    again = offload_options(config, model_dir, SIZES)
    assert again["engine_id"] != engine_id
    (model_dir / "config.json").write_text('{"another": "model"}')
    other = offload_options(config, model_dir, SIZES)
    assert other["kv_connector_extra_config"]["model_digest"] != extra["model_digest"]


def test_memory_alone_has_no_disk(model_dir: Path):
    extra = offload_options(read(type="vllm", offload={}), model_dir, SIZES)["kv_connector_extra_config"]
    assert "disk" not in extra
    assert extra["cpu_bytes_to_use"] == 2**30


def test_memory_that_holds_no_context_is_refused_with_the_bytes_it_needs(model_dir: Path):
    context = SIZES.max_context_tokens * SIZES.n_layers * 2 * SIZES.n_kv_heads * SIZES.head_dim * 4
    config = read(type="vllm", offload={"memory_bytes": context - 1})
    with pytest.raises(ConfigError, match=f"memory_bytes is {context - 1}; one whole context needs {context}"):
        offload_options(config, model_dir, SIZES)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"type": "vllm", "offload": {"disk_bytes": MIB}}, "directory and disk_bytes go together"),
        ({"type": "vllm", "offload": {"directory": "kv"}}, "directory and disk_bytes go together"),
        ({"type": "vllm", "offload": {"memory_bytes": 0}}, "memory_bytes"),
        ({"type": "vllm", "offload": {"disk": 1}}, "disk"),
        ({"type": "vllm", "offload": {}, "connector": "mooncake"}, "offload and connector = 'mooncake' exclude each"),
        ({"type": "embedded", "offload": {}}, "the embedded engine offloads no KV"),
        ({"offload": {"memory_bytes": MIB}}, "the embedded engine offloads no KV"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(engine: dict[str, Any], words: str):
    with pytest.raises(ValidationError) as caught:
        read(**engine)
    (error,) = caught.value.errors()
    assert words in str(error["msg"]) + str(error["loc"])
