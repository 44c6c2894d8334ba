"""A teacher worker over real gRPC: what it says of tokens, what it refuses, and how runners ask several of them."""

from __future__ import annotations

import asyncio
import copy
import math
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from slipstream.api.inference.v1 import teacher_pb2, teacher_pb2_grpc
from slipstream.api.types.v1 import types_pb2
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.config import ConfigError
from slipstream.common.errors import (
    ContextTooLong,
    EngineFull,
    InvalidRequest,
    SlipstreamError,
    TeacherAway,
    TeacherFailed,
    from_rpc_error,
)
from slipstream.common.runtime import build_server
from slipstream.models.checkpoint import save_model
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.model import MoeModel, build_model, init_weights
from slipstream.models.registry import save_sizes
from slipstream.runner.peers import Peers
from slipstream.runner.rollout import Rollout
from slipstream.runner.teacher import UNKNOWN, TeacherClient
from slipstream.teacher.__main__ import run
from slipstream.teacher.asked import Asked
from slipstream.teacher.config import TeacherConfig
from slipstream.teacher.desk import TRIES, Desk
from slipstream.teacher.engines import OnThread
from slipstream.teacher.scorer import Scorer
from slipstream.teacher.servicer import TeacherServicer
from slipstream.teacher.trial import check_teacher

SIZES = MoeConfig(
    vocab_size=24, dim=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, expert_dim=16, max_context_tokens=32
)
NOWHERE = "127.0.0.1:1"


@pytest.fixture(scope="module")
def model() -> MoeModel:
    made = build_model(SIZES)
    init_weights(made, 3)
    made.eval()
    return made


@pytest.fixture(scope="module")
def config(model: MoeModel, tmp_path_factory: pytest.TempPathFactory) -> TeacherConfig:
    directory: Path = tmp_path_factory.mktemp("teacher")
    save_model(model, directory)
    save_sizes(SIZES, directory)
    return TeacherConfig(teacher_model=directory, max_batch_tokens=24, max_waiting_tokens=64, logits_rows=3)


@dataclass
class Served:
    """A worker that is up."""

    address: str
    stub: teacher_pb2_grpc.TeacherServiceStub
    desk: Desk


@pytest.fixture(scope="module")
def scorer(config: TeacherConfig) -> Scorer:
    return Scorer(config)


@asynccontextmanager
async def serving(config: TeacherConfig, scorer: Scorer) -> AsyncIterator[Served]:
    engine = OnThread(scorer, ThreadPoolExecutor(1))
    desk = Desk(engine.score, config.max_batch_tokens, config.max_waiting_tokens)
    servicer = TeacherServicer(config, engine.bounds, desk)
    add = teacher_pb2_grpc.add_TeacherServiceServicer_to_server
    server, port = build_server(config, [(add, servicer, "slipstream.api.inference.v1.TeacherService")])
    await server.start()
    running = asyncio.create_task(desk.run())
    address = f"127.0.0.1:{port}"
    try:
        async with open_channel(address, Access()) as channel:
            yield Served(address, teacher_pb2_grpc.TeacherServiceStub(channel), desk)
    finally:
        running.cancel()
        await server.stop(0)
        await engine.stop()


def meant(model: MoeModel, token_ids: list[int], start: int, end: int, temperature: float = 1.0) -> list[float]:
    """One sequence alone, as the model sees it without any packing."""
    model.routes.begin()
    with torch.no_grad():
        logits = model.logits(model.hidden(torch.tensor([token_ids[:-1]]))[0]) / temperature
    logps = torch.log_softmax(logits.float(), -1)
    return [float(logps[position - 1, token_ids[position]]) for position in range(start, end)]


def sequence(token_ids: list[int], *ranges: tuple[int, int]) -> teacher_pb2.TokenSequence:
    asked = [types_pb2.RowRange(start=start, end=end) for start, end in ranges]
    return teacher_pb2.TokenSequence(token_ids=token_ids, ranges=asked)


async def refusal(call: Callable[[], Awaitable[object]]) -> SlipstreamError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call()
    return from_rpc_error(raised.value)


async def test_it_says_of_each_token_what_the_model_says_however_sequences_are_packed(model, config, scorer):
    draw = np.random.default_rng(0)
    tokens = [draw.integers(0, 24, length).tolist() for length in (9, 2, 30, 12)]
    asked = [sequence(tokens[0], (4, 9)), sequence(tokens[1], (1, 2)), sequence(tokens[2], (1, 3), (20, 30))]
    asked.append(sequence(tokens[3], (6, 12)))
    async with serving(config, scorer) as served:
        request = teacher_pb2.ScoreTokensRequest(sequences=asked, temperature=0.7)
        answer = await served.stub.ScoreTokens(request, timeout=30)
    for ids, each, told in zip(tokens, asked, answer.sequences, strict=True):
        expected = [logp for part in each.ranges for logp in meant(model, ids, part.start, part.end, 0.7)]
        assert list(told.logprobs) == pytest.approx(expected, abs=1e-5)


WITHOUT_VLLM = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "vllm" else find(name, *rest)
from slipstream.teacher.__main__ import main
main()
"""


def test_a_teacher_on_vllm_is_refused_with_the_way_to_install_it_where_there_is_none(config):
    words = ["--teacher-model", str(config.teacher_model), "--engine.type", "vllm"]
    command = [sys.executable, "-c", WITHOUT_VLLM, *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 2, ended.stderr
    assert 'engine.type is "vllm", which is not installed; install it with: make install-vllm' in ended.stderr


async def test_a_teacher_that_gives_no_log_probabilities_is_refused_before_it_serves(model, config, scorer, tmp_path):
    engine = OnThread(scorer, ThreadPoolExecutor(1))
    await check_teacher(engine.score, engine.bounds, config.teacher_model)
    await engine.stop()
    damaged = copy.deepcopy(model)
    with torch.no_grad():
        dict(damaged.named_parameters())["norm.weight"][0] = math.nan
    save_model(damaged, tmp_path)
    save_sizes(SIZES, tmp_path)
    with pytest.raises(ConfigError, match="gives no log-probability but nan"):
        await asyncio.wait_for(run(config.model_copy(update={"teacher_model": tmp_path})), 60)


class Passes:
    """What a desk has computed, pass by pass; it fails over a sequence that begins with a token that is bad."""

    def __init__(self, *bad: int, unknown: dict[int, float] | None = None) -> None:
        self.bad = set(bad)
        self.unknown = unknown or {}
        """What it says of those that begin with a token, in place of -1."""
        self.lengths: list[list[int]] = []

    async def score(self, asked: Sequence[Asked]) -> list[NDArray[np.float32]]:
        self.lengths.append([len(each.token_ids) for each in asked])
        await asyncio.sleep(0)
        if self.bad & {int(each.token_ids[0]) for each in asked}:
            raise RuntimeError("no memory for that")
        said = [self.unknown.get(int(each.token_ids[0]), -1) for each in asked]
        return [np.full(len(each.positions), value, np.float32) for each, value in zip(asked, said, strict=True)]


def ask_of(length: int, first: int = 1) -> Asked:
    return Asked(np.full(length, first, np.int32), np.array([1]), 1.0)


async def test_sequences_go_together_as_long_as_their_tokens_fit():
    passes = Passes()
    desk = Desk(passes.score, 24, 1000)
    running = asyncio.create_task(desk.run())
    await asyncio.wait_for(desk.ask([ask_of(n) for n in (9, 2, 30, 12, 12)]), 30)
    running.cancel()
    assert passes.lengths == [[9, 2], [30], [12, 12]]


async def test_a_sequence_over_which_the_teacher_fails_costs_its_own_call_alone():
    passes = Passes(7)
    desk = Desk(passes.score, 24, 1000)
    running = asyncio.create_task(desk.run())
    calls = [desk.ask([ask_of(5), ask_of(6)]), desk.ask([ask_of(4, first=7)]), desk.ask([ask_of(3)])]
    first, failed, last = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)
    assert isinstance(failed, TeacherFailed)
    assert isinstance(first, list)
    assert isinstance(last, list)
    assert [len(first), len(last)] == [2, 1]
    assert passes.lengths.count([4]) == TRIES, "no more often than that"
    assert len(await asyncio.wait_for(desk.ask([ask_of(8)]), 30)) == 1, "it goes on"
    assert not running.done()
    running.cancel()
    assert desk.token_count == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.5])
async def test_a_sequence_of_which_it_gives_no_log_probability_fails_and_the_others_do_not(value):
    passes = Passes(unknown={7: value})
    desk = Desk(passes.score, 24, 1000)
    running = asyncio.create_task(desk.run())
    calls = [desk.ask([ask_of(5)]), desk.ask([ask_of(4, first=7)]), desk.ask([ask_of(3)])]
    first, failed, last = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)
    assert isinstance(failed, TeacherFailed)
    assert isinstance(first, list)
    assert isinstance(last, list)
    assert not running.done()
    running.cancel()


async def test_a_teacher_that_gives_no_log_probability_of_anything_ends():
    desk = Desk(Passes(unknown={0: math.nan, 1: math.nan}).score, 24, 1000)
    asking = asyncio.create_task(desk.ask([ask_of(5)]))
    with pytest.raises(RuntimeError, match="no log-probability"):
        await asyncio.wait_for(desk.run(), 30)
    asking.cancel()


async def test_a_teacher_that_fails_over_everything_ends():
    passes = Passes(0, 1)  # what is checked is of zeros
    desk = Desk(passes.score, 24, 1000)
    asking = asyncio.create_task(desk.ask([ask_of(5)]))
    with pytest.raises(RuntimeError, match="no memory"):
        await asyncio.wait_for(desk.run(), 30)
    asking.cancel()


async def test_what_cannot_be_judged_is_refused(config, scorer):
    async with serving(config, scorer) as served:

        async def said(*sequences: teacher_pb2.TokenSequence) -> SlipstreamError:
            request = teacher_pb2.ScoreTokensRequest(sequences=sequences)
            return await refusal(lambda: served.stub.ScoreTokens(request, timeout=30))

        assert isinstance(await said(sequence([1] * 33, (1, 2))), ContextTooLong)
        for wrong in (sequence([1, 24], (1, 2)), sequence([1, 2], (0, 1)), sequence([1, 2], (1, 3))):
            assert isinstance(await said(wrong), InvalidRequest)
        told = await served.stub.GetTeacher(teacher_pb2.GetTeacherRequest(), timeout=30)
    assert (told.vocab_size, told.max_context_tokens) == (24, 32)


async def test_more_than_may_wait_is_refused_and_what_nobody_waits_for_is_dropped(config, scorer):
    engine = OnThread(scorer, ThreadPoolExecutor(1))
    desk = Desk(engine.score, 24, 64)  # nobody takes anything from it
    ask = Asked(np.zeros(30, np.int32), np.array([1]), 1.0)
    first = asyncio.create_task(desk.ask([ask, ask]))
    await asyncio.sleep(0)
    with pytest.raises(EngineFull):
        await desk.ask([ask])
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    running = asyncio.create_task(desk.run())
    async with asyncio.timeout(30):
        while desk.token_count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert len(await asyncio.wait_for(desk.ask([ask]), 30)) == 1, "there is room again"
    assert desk.token_count == 0
    running.cancel()
    await engine.stop()


async def test_runners_pass_by_a_worker_that_is_away_and_give_up_in_time(model, config, scorer):
    rollout = Rollout([3, 1, 2])
    rollout.token_ids += [5, 6, 7]
    rollout.sampled.append((3, 5))
    peers = Peers(NOWHERE, NOWHERE, Access())
    try:
        async with serving(config, scorer) as served:
            client = TeacherClient(peers, [NOWHERE, served.address], timeout_s=30)
            await client.judge([rollout], temperature=1.0)
        expected = meant(model, rollout.token_ids, 3, 5)
        assert rollout.teacher_logprobs == pytest.approx([UNKNOWN] * 3 + expected + [UNKNOWN], abs=1e-5)
        with pytest.raises(TeacherAway):
            await TeacherClient(peers, [NOWHERE], timeout_s=0.5).judge([rollout], temperature=1.0)
    finally:
        await peers.close()


async def test_no_request_whatever_is_in_it_gets_another_answer_than_the_contract_has(config, scorer):
    draw = random.Random(7)
    edges = [-(2**31), -1, 0, 1, 2, 23, 24, 33, 2**31 - 1]
    documented = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}

    def number(low: int, high: int) -> int:
        return draw.choice(edges) if draw.random() < 0.1 else draw.randint(low, high)

    def token() -> int:
        return draw.choice(edges) if draw.random() < 0.01 else draw.randint(0, 23)

    def request() -> bytes:
        made = teacher_pb2.ScoreTokensRequest(temperature=draw.choice([0.0, 0.5, 1.0, 1.0, -1.0, float("nan")]))
        for _ in range(draw.randint(0, 3)):
            each = made.sequences.add(token_ids=[token() for _ in range(draw.randint(0, 34))])
            for _ in range(draw.randint(0, 2)):
                start = number(0, 12)
                each.ranges.add(start=start, end=max(-(2**31), min(start + number(0, 9), 2**31 - 1)))
        data = bytearray(made.SerializeToString())
        if data and draw.random() < 0.3:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        return bytes(data)

    async with serving(config, scorer) as served, open_channel(served.address, Access()) as channel:
        score = channel.unary_unary("/slipstream.api.inference.v1.TeacherService/ScoreTokens")
        seen = set()
        for _ in range(250):
            call = score(request(), timeout=20)
            seen.add(await call.code())
        assert seen <= documented, seen
        assert {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT} <= seen
        assert served.desk.token_count == 0
