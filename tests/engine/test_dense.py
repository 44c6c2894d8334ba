"""Dense families on vLLM: a weight update with requests in flight, and back when it is refused."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from slipstream.common.errors import RoutesUnknown
from slipstream.common.version import PolicyVersion
from slipstream.engine.base import PausedEngine
from slipstream.models.base import Model, Sizes
from slipstream.models.checkpoint import save_model, to_hf
from slipstream.models.llama.config import LlamaConfig
from slipstream.models.qwen3.config import Qwen3Config
from slipstream.models.registry import find_architecture
from tests.engine.bench import Bench, prompt_of, until
from tests.engine.engines import Limits, Vllm
from tests.engine.oracle import SIZES, KeptKv

pytestmark = pytest.mark.asyncio(loop_scope="session")

COMMON: dict[str, Any] = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "ffn_dim": 96}
COMMON |= {"vocab_size": SIZES.vocab_size, "rope_theta": 1e4, "max_context_tokens": 1024, "norm_eps": 1e-6}
NEW_TOKENS = {"cpu": 190, "cuda": 900}
"""More than are sampled before an update has come and gone."""
FAMILIES = [LlamaConfig(**COMMON, tied_embeddings=True, attention_bias=True), Qwen3Config(**COMMON)]


@cache
def weights(sizes: Sizes, seed: int) -> Model:
    architecture = find_architecture(sizes.architecture)
    model = architecture.build_model(sizes)
    architecture.init_weights(model, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-0.3, 0.3, generator=torch.Generator().manual_seed(seed))
    return model.requires_grad_(False)


def tensors(sizes: Sizes, seed: int) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in to_hf(weights(sizes, seed)).items()}


def logprobs(sizes: Sizes, tokens: list[int], first: int, bounds: list[tuple[int, int]]) -> torch.Tensor:
    """Of `tokens[first:]`, by a model whose weights were swapped at the bounds (end position, seed), with KV kept."""
    kv, start, parts = KeptKv(), 0, []
    for end, seed in bounds:
        model = weights(sizes, seed)
        model.routes.begin()
        span, positions = torch.tensor([tokens[start:end]]), torch.arange(start, end).unsqueeze(0)
        parts.append(torch.log_softmax(model.logits(model.hidden(span, positions, kv)[0]), -1))
        start = end
    return torch.cat(parts)[first - 1 :].gather(1, torch.tensor(tokens[first:])[:, None]).squeeze(1)


def checksum(name: str, array: np.ndarray) -> int:
    return zlib.crc32(array.tobytes())


@asynccontextmanager
async def serving(sizes: Sizes, directory: Path, device: Literal["cpu", "cuda"]) -> AsyncIterator[Bench]:
    save_model(weights(sizes, 1), directory)
    kind = Vllm(connector="none", device=device)
    engine = await kind.build(directory, Limits(), tensors(sizes, 1))
    try:
        yield Bench(kind, engine, 1)
    finally:
        await engine.stop()


@pytest.mark.parametrize("sizes", FAMILIES, ids=lambda sizes: sizes.architecture)
async def test_a_dense_family_is_updated_in_flight(sizes, tmp_path, request):
    device: Literal["cpu", "cuda"] = request.config.getoption("--device")
    async with serving(sizes, tmp_path, device) as bench:
        engine, prompt = bench.engine, prompt_of(20)
        before = await engine.checksums(checksum)
        assert before.keys() == tensors(sizes, 1).keys()
        refused, taken = tensors(sizes, 3), tensors(sizes, 2)  # made before anything is sampled
        requests = [bench.request(prompt, samples=2, max_new_tokens=NEW_TOKENS[device]) for _ in range(2)]
        running = [asyncio.create_task(bench.run(request)) for request in requests]
        await until(lambda: engine.load().decoded_tokens > 60, "some tokens of each")

        def reject(paused: PausedEngine) -> None:
            expected = logprobs(sizes, prompt, 1, [(len(prompt) - 1, 3)])
            assert paused.probe(prompt) == pytest.approx(expected.tolist(), abs=bench.kind.tolerance)
            raise ValueError("refused")

        with pytest.raises(ValueError, match="refused"):
            await engine.update(PolicyVersion(1, 9), refused, reject)
        assert await engine.checksums(checksum) == before
        second = PolicyVersion(1, 1)
        report = await engine.update(second, taken, lambda paused: None)
        assert report.in_flight_samples == 4
        live = await engine.checksums(checksum)
        assert live != before
        for each, samples in zip(requests, await asyncio.gather(*running), strict=True):
            for index, sample in enumerate(samples):
                assert set(sample.versions) == {bench.version, second}
                swapped = len(prompt) - 1 + sample.versions.index(second)
                tokens = [*prompt, *sample.token_ids]
                expected = logprobs(sizes, tokens, len(prompt), [(swapped, 1), (len(tokens) - 1, 2)])
                assert float((torch.tensor(sample.logprobs) - expected).abs().max()) <= bench.kind.tolerance
                with pytest.raises(RoutesUnknown):  # so that no worker refers to rows of no bytes
                    engine.routes(each.sample_ids[index])
