"""What vLLM makes of an exported adapter, in a process of its own: JSON.

python tests/parity/vllm_adapters.py served|loaded DIRECTORY
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}

import torch
from families import MOE, ours, theirs, tokens, trained

from slipstream.models.lora.adapters import PREFIX
from slipstream.models.lora.peft import save_adapters

IDS = tokens(20)[0].tolist()


def export(kind: str, changes: dict[str, Any], directory: Path) -> Any:
    """A model whose adapters are as after some steps, and the directories of both."""
    theirs(kind, changes).save_pretrained(directory / "base")
    model = ours(directory / "base")
    adapters = trained(model)
    save_adapters(adapters, adapters.tensors(), str(directory / "base"), directory / "adapter")
    return model


@torch.no_grad()
def logprobs(model: Any) -> list[float]:
    logp = torch.log_softmax(model.logits(model.hidden(torch.tensor([IDS])))[0], -1)
    return [float(logp[at, token]) for at, token in enumerate(IDS[1:])]


def start(directory: Path) -> Any:
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    return LLM(
        str(directory / "base"),
        skip_tokenizer_init=True,
        enable_lora=True,
        max_lora_rank=8,
        max_loras=2,
        enforce_eager=True,
        max_model_len=64,
        dtype="float32",
        num_gpu_blocks_override=64,
        block_size=32,
    )


def served(directory: Path) -> dict[str, float]:
    """Largest difference of log-probabilities with the adapter, and without it once it was there."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    model = export("llama", {"head_dim": 32, "hidden_size": 64}, directory)
    engine = start(directory)
    found = {}
    for name, request, expected in (
        ("adapter", LoRARequest("run-1-1", 1, str(directory / "adapter")), logprobs(model)),
        ("base", None, logprobs(ours(directory / "base"))),
    ):
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        (answer,) = engine.generate({"prompt_token_ids": IDS}, sampling, lora_request=request, use_tqdm=False)
        given = [each[token].logprob for token, each in zip(IDS[1:], answer.prompt_logprobs[1:], strict=True)]
        found[name] = max(abs(ours - its) for ours, its in zip(expected, given, strict=True))
    return found


def loaded(directory: Path) -> dict[str, float]:
    """Largest difference of what vLLM has stacked for its kernel of experts, which a CPU has none of."""
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    model = export("qwen3_moe", {**MOE, "head_dim": 32, "decoder_sparse_step": 1}, directory)
    engine = start(directory)
    assert engine.llm_engine.add_lora(LoRARequest("run-1-1", 1, str(directory / "adapter")))
    (stacks,) = engine.collective_rpc(_stacks)
    halves, config, found = model.adapters.tensors(), model.adapters.config, {}
    for layer, parts in stacks.items():
        for projection, (a, b) in parts.items():
            for expert in range(MOE["num_experts"]):
                name = f"{PREFIX}model.layers.{layer}.mlp.experts.{expert}.{projection}"
                ours_a, ours_b = halves[f"{name}.lora_A.weight"], halves[f"{name}.lora_B.weight"] * config.scale
                difference = max(
                    float((a[expert][: config.rank] - ours_a).abs().max()),
                    float((b[expert][:, : config.rank] - ours_b).abs().max()),
                )
                found[projection] = max(found.get(projection, 0.0), difference)
    return found


def _stacks(worker: Any) -> dict[int, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """By layer and projection, of the first place for adapters."""
    found = {}
    for layer, block in enumerate(worker.get_model().model.layers):
        experts = block.mlp.experts
        gate_a, up_a = (each[0].clone() for each in experts.w13_lora_a_stacked)
        gate_b, up_b = (each[0].clone() for each in experts.w13_lora_b_stacked)
        down = experts.w2_lora_a_stacked[0][0].clone(), experts.w2_lora_b_stacked[0][0].clone()
        found[layer] = {"gate_proj": (gate_a, gate_b), "up_proj": (up_a, up_b), "down_proj": down}
    return found


if __name__ == "__main__":
    found = {"served": served, "loaded": loaded}[sys.argv[1]](Path(sys.argv[2]))
    print(json.dumps(found), flush=True)
    os._exit(0)  # vLLM's own end takes seconds, and says what its compiler leaked
