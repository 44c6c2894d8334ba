"""A teacher worker whose model vLLM computes, spread over two ranks: what it says is what our own model says."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest

from slipstream.api.inference.v1 import teacher_pb2, teacher_pb2_grpc
from slipstream.api.types.v1 import types_pb2
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.config import ListenConfig, dump_toml
from slipstream.engine.vllm.installed import find_vllm
from slipstream.engine.vllm.judge_config import VllmJudgeConfig
from slipstream.launcher.child import guarded
from slipstream.models.checkpoint import save_model
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.model import build_model, init_weights
from slipstream.models.registry import save_sizes
from slipstream.teacher.asked import Asked
from slipstream.teacher.config import TeacherConfig
from slipstream.teacher.scorer import Scorer
from tests.ports import free_ports

pytestmark = pytest.mark.timeout(400, func_only=False)

SIZES = MoeConfig(
    vocab_size=64, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, expert_dim=64, max_context_tokens=320
)
CHUNK_TOKENS = 64
TOLERANCE = 1e-5
START_TIMEOUT_S = 240.0


@dataclass
class Worker:
    """One that answers."""

    process: subprocess.Popen[bytes]
    address: str
    log: Path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("teacher")
    model = build_model(SIZES)
    init_weights(model, 3)
    save_model(model, directory)
    save_sizes(SIZES, directory)
    return directory


@pytest.fixture(scope="module")
def worker(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    find_vllm()
    directory = tmp_path_factory.mktemp("worker")
    (port,) = free_ports(1)
    config = TeacherConfig(
        run_dir=directory,
        listen=ListenConfig(port=port),
        teacher_model=checkpoint,
        engine=VllmJudgeConfig(dtype="float32", tensor_parallel_size=2, max_prefill_tokens=CHUNK_TOKENS),
        max_batch_tokens=1024,
    )
    file, log = directory / "teacher.toml", directory / "teacher.log"
    file.write_text(dump_toml(config))
    with log.open("ab") as output:
        words = guarded((sys.executable, "-m", "slipstream.teacher", "@", str(file)))
        process = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)
    try:
        yield Worker(process, f"127.0.0.1:{port}", log)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def said(worker: Worker, sequences: list[list[int]], temperature: float) -> list[list[float]]:
    """Of all tokens but each first."""
    asked = [
        teacher_pb2.TokenSequence(token_ids=ids, ranges=[types_pb2.RowRange(start=1, end=len(ids))])
        for ids in sequences
    ]
    request = teacher_pb2.ScoreTokensRequest(sequences=asked, temperature=temperature)
    async with asyncio.timeout(START_TIMEOUT_S), open_channel(worker.address, Access()) as channel:
        stub = teacher_pb2_grpc.TeacherServiceStub(channel)
        while True:
            try:
                answer = await stub.ScoreTokens(request, timeout=60)
                return [list(each.logprobs) for each in answer.sequences]
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
            assert worker.process.poll() is None, worker.log.read_text()[-3000:]
            await asyncio.sleep(0.2)


async def test_it_says_what_our_own_model_says_at_any_temperature_in_chunks_and_again(worker, checkpoint):
    own = Scorer(TeacherConfig(teacher_model=checkpoint))
    draw = np.random.default_rng(0)
    whole = draw.integers(0, 64, SIZES.max_context_tokens).tolist()
    # Of one prefix, and twice the same: what was computed before must not stand in for what is asked now.
    sequences = [whole, whole[:2], whole[:CHUNK_TOKENS], [*whole[:200], *whole[:60]], whole[7:140], whole]
    for temperature in (1.0, 0.6, 1.0, 1.7):
        answers = await said(worker, sequences, temperature)
        for ids, answer in zip(sequences, answers, strict=True):
            asked = Asked(np.array(ids, np.int32), np.arange(1, len(ids)), temperature)
            np.testing.assert_allclose(answer, own.score([asked])[0], atol=TOLERANCE)


async def test_a_worker_whose_vllm_is_gone_ends_with_a_reason(worker):
    await said(worker, [[1, 2, 3]], 1.0)
    children = Path(f"/proc/{worker.process.pid}/task/{worker.process.pid}/children").read_text().split()
    engines = [int(child) for child in children if "EngineCore" in Path(f"/proc/{child}/cmdline").read_text()]
    assert engines
    for engine in engines:
        os.kill(engine, signal.SIGKILL)
    assert await asyncio.to_thread(worker.process.wait, 60) == 1
    assert "vLLM's process was killed by SIGKILL" in worker.log.read_text()
    left = [each.name for each in Path("/dev/shm").iterdir() if f"-{worker.process.pid}-" in each.name]
    assert not left, "vLLM leaves behind what its ranks shared"
