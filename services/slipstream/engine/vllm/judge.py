"""vLLM with a checkpoint's own weights, asked how likely it finds given tokens. Only `start` needs vLLM.

No prefix is shared: vLLM computes nothing for a prefix that it finds cached, so that its log-probabilities would be
whatever lay in that memory before (vllm-project/vllm#42019). What a request samples, one token, is thrown away.
"""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from slipstream.common.config import ENVIRONMENT
from slipstream.common.errors import RequestAborted
from slipstream.engine.vllm.calls import death_of, end_calls_with_core, told_of_death
from slipstream.engine.vllm.judge_config import VllmJudgeConfig
from slipstream.engine.vllm.prompts import prompt_logprobs, prompt_parameters
from slipstream.models.registry import read_config

EXTENSION = "slipstream.engine.vllm.judge_worker.JudgeExtension"
SHUTDOWN_TIMEOUT_S = 10.0


def longer_context(model_dir: Path, tokens: int) -> dict[str, Any]:
    """What of a model's configuration vLLM is to read otherwise.

    It samples a token after each prompt, so a sequence of the whole context needs a position more. A model that sees or
    hears, too, has its text's sizes one level down, and vLLM looks nowhere else.
    """
    changed = {"max_position_embeddings": tokens}
    return {"text_config": changed} if isinstance(read_config(model_dir).get("text_config"), dict) else changed


class VllmJudge:
    """A started vLLM."""

    def __init__(self, llm: Any, sockets: Any, timeout_s: float) -> None:
        self._llm = llm
        self._sockets = sockets
        self._timeout_s = timeout_s

    @classmethod
    async def start(
        cls, model_dir: Path, max_context_tokens: int, config: VllmJudgeConfig, torch_threads: int
    ) -> VllmJudge:
        """Load it; takes seconds to minutes, in which the event loop stands still.

        It forks, so nothing of this process may have begun that a fork would cut in half: above all no gRPC.
        """
        from slipstream.engine.vllm.inherited import set_up
        from slipstream.engine.vllm.launch import set_environment
        from slipstream.engine.vllm.process import SocketDirectory
        from slipstream.engine.vllm.starting import answered, starting

        sockets = SocketDirectory()
        # The newer runner reads the log-probabilities of prompts elsewhere.
        set_environment(sockets.path, {"OMP_NUM_THREADS": str(torch_threads), "VLLM_USE_V2_MODEL_RUNNER": "0"})
        from vllm import envs
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        envs.disable_envs_cache()  # of an engine that was started before in this process
        set_up(sockets.path, torch_threads, nixl=False)
        engine_config = AsyncEngineArgs(
            model=str(model_dir),
            dtype=config.dtype,
            skip_tokenizer_init=True,
            seed=0,
            max_model_len=max_context_tokens + 1,
            hf_overrides=longer_context(model_dir, max_context_tokens + 1),
            max_num_seqs=config.max_running_sequences,
            max_num_batched_tokens=max(config.max_prefill_tokens, config.max_running_sequences),
            enable_chunked_prefill=True,
            enable_prefix_caching=False,
            enforce_eager=True,
            gpu_memory_utilization=config.gpu_memory_fraction,
            tensor_parallel_size=config.tensor_parallel_size,
            enable_expert_parallel=config.expert_parallel,
            worker_extension_cls=EXTENSION,
        ).create_engine_config()
        # The platform of the CPU has just chosen "spawn", which takes 20 s more to start and does not end cleanly.
        ENVIRONMENT["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        with starting(torch_threads, config.start_timeout_s):
            llm = AsyncLLM.from_vllm_config(engine_config, enable_log_requests=False, disable_log_stats=True)
        end_calls_with_core(llm)
        judge = cls(llm, sockets, config.pass_timeout_s)
        try:
            await answered(llm.collective_rpc("slipstream_judge"), config.start_timeout_s)
        except BaseException:
            await judge.stop()
            raise
        return judge

    async def logprobs(
        self, token_ids: NDArray[np.int32], positions: NDArray[np.int64], temperature: float
    ) -> NDArray[np.float32]:
        """Of the tokens at `positions`, from 1, each after all tokens before it. Raises `TimeoutError` in time."""
        from slipstream.engine.vllm.judge_worker import TEMPERATURE

        parameters = prompt_parameters({TEMPERATURE: temperature}, logprobs=True)
        prompt = {"prompt_token_ids": token_ids.tolist()}
        async with asyncio.timeout(self._timeout_s):
            with told_of_death(self._llm):
                async for output in self._llm.generate(prompt, parameters, uuid4().hex):
                    return np.array(prompt_logprobs(output, len(token_ids)), np.float32)[positions - 1]
        raise RequestAborted("vLLM gave no answer")

    @property
    def ended(self) -> bool:
        """Whether vLLM's process is gone."""
        return bool(self._llm.errored)

    @property
    def death(self) -> str:
        """How it went."""
        return death_of(self._llm)

    async def stop(self) -> None:
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # before its other end goes, which it would report as a failure
        await asyncio.to_thread(self._llm.shutdown, SHUTDOWN_TIMEOUT_S)
        await asyncio.sleep(0)  # sockets close on the loop; vLLM leaves their context open
        self._llm.engine_core.resources.ctx.destroy(linger=0)
        self._sockets.close()
