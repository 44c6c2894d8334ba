"""A model without experts in the embedded engine: it decodes as its plain forward pass does, and has no routes."""

from __future__ import annotations

import pytest

from slipstream.engine.embedded.core import EngineCore
from slipstream.engine.embedded.outputs import Chunks, Recorded
from slipstream.models import llama, qwen3
from slipstream.models.llama.config import LlamaConfig
from slipstream.models.qwen3.config import Qwen3Config
from tests.unit.engine.helpers import CONFIG, PROMPT, V1, decode_request, greedy, tensors

SHAPE = {"vocab_size": 23, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "ffn_dim": 48}
SHAPE |= {"rope_theta": 100.0, "max_context_tokens": 64, "norm_eps": 1e-6, "tied_embeddings": True}


@pytest.mark.parametrize(("family", "config_class"), [(llama, LlamaConfig), (qwen3, Qwen3Config)])
def test_a_dense_model_decodes_as_its_plain_forward_pass_does(family, config_class):
    sizes = config_class(**SHAPE)
    model = family.build_model(sizes)
    family.init_weights(model, 1)
    core = EngineCore(sizes, CONFIG)
    core.update(V1, tensors(model.requires_grad_(False)), lambda paused: None)
    core.add_decode(decode_request("d", samples=2, temperature=0.0), 1.0)
    outputs = []
    while core.busy:
        core.step()
        outputs += core.take_outputs()
    tokens: dict[int, list[int]] = {}
    for chunk in (chunk for output in outputs if isinstance(output, Chunks) for chunk in output.chunks):
        tokens[chunk.sample_index] = [*tokens.get(chunk.sample_index, []), *chunk.token_ids]
    assert list(tokens.values()) == [greedy(model, PROMPT, 8)] * 2
    rows = [output.routes.rows for output in outputs if isinstance(output, Recorded)]
    assert all(each.shape[1:] == (0, 0) for each in rows)
