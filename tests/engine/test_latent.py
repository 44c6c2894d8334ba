"""DeepSeek-V3 on vLLM: a weight update with requests in flight, and back when it is refused.

vLLM keeps latents of earlier tokens, and makes keys and values of them by the weights of now; so what a sample says
after an update is nobody's forward pass, and requests of after it are compared.
"""

from __future__ import annotations

import ast
import asyncio
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.common.version import PolicyVersion
from slipstream.engine.base import DecodeRequest, PausedEngine
from slipstream.engine.vllm.latent import GPU_WIDTHS
from slipstream.models.checkpoint import save_model, to_hf
from slipstream.models.deepseek_v3.config import DeepseekV3Config
from slipstream.models.deepseek_v3.model import DeepseekModel, build_model
from slipstream.models.registry import find_architecture
from slipstream.models.rope_config import RopeScaling
from tests.engine.bench import Bench, Finished, prompt_of, until
from tests.engine.engines import Limits, Vllm
from tests.engine.oracle import SIZES as PROMPT_SIZES

pytestmark = pytest.mark.asyncio(loop_scope="session")

EXPERTS: dict[str, Any] = {"expert_dim": 32, "n_experts": 8, "n_shared_experts": 1, "top_k": 2, "n_groups": 2}
# vLLM on the CPU takes latents of 512 + 64 alone, and yarn; on a GPU heads of few widths.
HEADS: dict[str, Any] = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
SIZES = DeepseekV3Config(
    **{"vocab_size": PROMPT_SIZES.vocab_size, "dim": 64, "n_layers": 3, "n_heads": 4, "max_context_tokens": 1024},
    **{"ffn_dim": 96, "rope_theta": 1e4, "norm_eps": 1e-6, "q_lora_rank": 48, "n_dense_layers": 1},
    **{**EXPERTS, **HEADS, "top_k_groups": 1},
    rope_scaling=RopeScaling(
        rope_type="yarn", factor=16.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0
    ),
)
NEW_TOKENS = {"cpu": 300, "cuda": 900}
"""More than are sampled before an update has come and gone."""


@cache
def weights(seed: int, dtype: torch.dtype) -> DeepseekModel:
    """Rounded to what the engine holds; the bias of the choice is not nothing."""
    model = build_model(SIZES)
    find_architecture(SIZES.architecture).init_weights(model, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("expert_bias_E"):
                parameter.uniform_(-0.3, 0.3, generator=torch.Generator().manual_seed(seed))
    model.to(dtype).to(torch.float32)
    return model.requires_grad_(False)


def logprobs(model: DeepseekModel, tokens: list[int], routes: np.ndarray | None = None) -> torch.Tensor:
    """Of all tokens but the first, on recorded routes where there are any."""
    replay = known = None
    if routes is not None:
        padded = np.zeros((len(tokens), *routes.shape[1:]), routes.dtype)
        padded[: len(routes)] = routes
        replay, known = torch.from_numpy(padded), torch.arange(len(tokens)) < len(routes)
    model.routes.begin(replay_TLK=replay, known_T=known)
    logps_TV = torch.log_softmax(model(torch.tensor([tokens]))[0], -1)
    return logps_TV[:-1].gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)


def checksum(name: str, array: np.ndarray) -> int:
    return zlib.crc32(array.tobytes())


async def test_heads_that_are_taken_on_a_gpu_are_those_that_vllm_has_a_kernel_for():
    """Read in its source, as its build for the CPU cannot import it. Those of which nothing turns are not for ours."""
    import vllm

    source = Path(vllm.__file__).parent / "v1/attention/backends/mla/prefill/flash_attn.py"
    named = (each for each in ast.walk(ast.parse(source.read_text())) if isinstance(each, ast.Call))
    known = [each for each in named if isinstance(each.func, ast.Name) and each.func.id == "MLADimensions"]
    found = [{word.arg: ast.literal_eval(word.value) for word in each.keywords} for each in known]
    widths = {(each["qk_nope_head_dim"], each["qk_rope_head_dim"], each["v_head_dim"]) for each in found}
    assert {each for each in widths if each[1]} == set(GPU_WIDTHS)


async def test_latent_attention_is_updated_in_flight(request: pytest.FixtureRequest, tmp_path):
    options = request.config.option
    kind = Vllm(options.device, "float32" if options.device == "cpu" else "bfloat16", "none")
    dtype = getattr(torch, kind.dtype)

    def tensors(seed: int) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in to_hf(weights(seed, dtype)).items()}

    save_model(weights(1, dtype), tmp_path)
    engine = await kind.build(tmp_path, Limits(), tensors(1))
    try:
        bench = Bench(kind, engine, 1)
        prompt, first, second = prompt_of(20), bench.version, PolicyVersion(1, 1)

        def error(asked: DecodeRequest, index: int, sample: Finished, seed: int, count: int) -> float:
            """Of the first tokens of a sample, on its own routes."""
            rows = [engine.routes(key).rows for key in (asked.request_id, asked.sample_ids[index])]
            assert {each.shape[1:] for each in rows} == {(SIZES.moe_layers, SIZES.top_k)}
            tokens, routes = [*prompt, *sample.token_ids[:count]], np.concatenate(rows)
            expected = logprobs(weights(seed, dtype), tokens, routes[: len(tokens) - 1])[len(prompt) - 1 :]
            return float((torch.tensor(sample.logprobs[:count]) - expected).abs().max())

        before = await engine.checksums(checksum)
        assert before.keys() == tensors(1).keys()
        refused, taken = tensors(3), tensors(2)  # made before anything is sampled
        asked = [bench.request(prompt, samples=2, max_new_tokens=NEW_TOKENS[options.device]) for _ in range(2)]
        running = [asyncio.create_task(bench.run(each)) for each in asked]
        await until(lambda: engine.load().decoded_tokens > 60, "some tokens of each")

        def reject(paused: PausedEngine) -> None:
            expected = logprobs(weights(3, dtype), prompt)
            assert paused.probe(prompt) == pytest.approx(expected.tolist(), abs=kind.tolerance)
            raise ValueError("refused")

        with pytest.raises(ValueError, match="refused"):
            await engine.update(PolicyVersion(1, 9), refused, reject)
        assert await engine.checksums(checksum) == before
        report = await engine.update(second, taken, lambda paused: None)
        assert report.in_flight_samples == 4
        after = await engine.checksums(checksum)
        assert all(after[name] != before[name] for name in after if "norm" not in name)
        for each, samples in zip(asked, await asyncio.gather(*running), strict=True):
            for index, sample in enumerate(samples):
                assert set(sample.versions) == {first, second}
                assert error(each, index, sample, 1, sample.versions.index(second)) <= kind.tolerance
        later = bench.request(prompt, samples=2, max_new_tokens=40)
        for index, sample in enumerate(await bench.run(later)):
            assert error(later, index, sample, 2, 40) <= kind.tolerance
    finally:
        await engine.stop()
