"""A program: loads model directories in vLLM, by its own loader, and prints its log-probabilities of a prompt, in JSON.

    python -m tests.parity.vllm_logprobs '[token ids]' directory ...

A process of its own, as vLLM keeps state; one process, as importing it takes longer than loading all of them. Models
with experts come first: vLLM makes their groups of ranks at the first model or never.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

from slipstream.common.config import ENVIRONMENT
from slipstream.engine.vllm.installed import find_vllm

SETTINGS = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
}


def main() -> None:
    for name, value in SETTINGS.items():
        ENVIRONMENT.setdefault(name, value)
    find_vllm()
    from vllm import LLM, SamplingParams

    token_ids = json.loads(sys.argv[1])
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    for directory in sys.argv[2:]:
        llm: Any = LLM(
            model=directory,
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_num_seqs=2,
            disable_log_stats=True,
        )
        (output,) = llm.generate([{"prompt_token_ids": token_ids}], asked, use_tqdm=False)
        after = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        print(json.dumps([places[token].logprob for token, places in after]), flush=True)
        del llm, output
        gc.collect()


if __name__ == "__main__":
    main()
