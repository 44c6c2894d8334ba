"""What of the vLLM engine is ours alone: spans, seeds, salts, the checks before an update, and its configuration."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from slipstream.common.config import ConfigError
from slipstream.common.errors import WeightsCorrupt
from slipstream.common.version import UNSET, PolicyVersion
from slipstream.engine.base import DecodeRequest, Sampling
from slipstream.engine.embedded.config import EmbeddedConfig
from slipstream.engine.vllm import installed
from slipstream.engine.vllm.arena import Arena
from slipstream.engine.vllm.config import VllmConfig
from slipstream.engine.vllm.draws import PositionGenerator, position_seed
from slipstream.engine.vllm.installed import find_vllm
from slipstream.engine.vllm.layout import Layout, group
from slipstream.engine.vllm.live import LiveWeights
from slipstream.engine.vllm.process import SocketDirectory
from slipstream.engine.vllm.salts import SaltVersions
from slipstream.engine.vllm.samples import OpenRequest, Sample, sample_seed
from slipstream.engine.vllm.updates import LiveParameters, WeightArenas
from slipstream.engine.worker.config import EngineConfig
from tests.unit.engine.helpers import SIZES, tensors, weights

V1, V2, V3 = PolicyVersion(1, 0), PolicyVersion(1, 1), PolicyVersion(1, 2)
ENGINE = TypeAdapter(EngineConfig)


def sampled(count: int) -> Sample:
    sample = Sample(0, [(0, V1)])
    sample.token_ids, sample.logprobs = list(range(count)), [-1.0] * count
    return sample


def test_a_table_without_a_type_is_the_embedded_engines():
    assert ENGINE.validate_python({"block_size_tokens": 8}) == EmbeddedConfig(block_size_tokens=8)
    assert ENGINE.validate_python({"type": "vllm", "block_count": 64}) == VllmConfig(block_count=64)
    quantised = {"type": "vllm", "quantization": "fp8_per_tensor"}
    fitting = ENGINE.validate_python({**quantised, "dtype": "bfloat16"})
    assert isinstance(fitting, VllmConfig)
    assert fitting.device == "auto"
    for wrong in ({"type": "other"}, {"type": "vllm", "block_size_tokens": 8}, quantised):
        with pytest.raises(ValidationError):
            ENGINE.validate_python(wrong)


def test_versions_are_cut_where_the_weights_changed_whenever_chunks_are_taken():
    for taken_first in range(5):
        sample = sampled(taken_first)
        first = sample.take()
        sample.swapped(4, V2)
        sample.swapped(4, V3)  # no token between two updates
        sample.token_ids, sample.logprobs = list(range(10)), [-1.0] * 10
        sample.finish_reason = "length"
        last = sample.take()
        assert last is not None
        chunks = [chunk for chunk in (first, last) if chunk is not None]
        versions = [version for chunk in chunks for count, version in chunk.versions for _ in range(count)]
        assert versions == [V1] * 4 + [V3] * 6
        assert sample.take() is None


def test_a_sample_that_waits_through_an_update_is_of_the_new_version_alone():
    sample = sampled(0)
    sample.swapped(None, V2)
    sample.token_ids, sample.logprobs, sample.finish_reason = [1, 2], [-1.0, -1.0], "stop"
    chunk = sample.take()
    assert chunk is not None
    assert chunk.versions == [(2, V2)]


@pytest.mark.parametrize(("capture", "expected"), [(True, V1), (False, V2)])
def test_a_sample_that_begins_after_an_update_rests_on_the_prompts_rows_of_before(
    capture: bool, expected: PolicyVersion
):
    sampling = Sampling(max_new_tokens=4)
    decode = DecodeRequest("r", [1], "s", ("a", "b"), sampling, capture_routes=capture)
    request = OpenRequest(decode, V1, flush_s=30.0)
    one, other = request.samples
    request.begin(one, V1)
    one.token_ids, one.logprobs = [1], [-1.0]
    one.swapped(1, V2)
    other.swapped(None, V2)
    request.begin(other, V1)
    assert (one.kv_oldest, other.kv_oldest) == (V1, expected)
    other.cached_token_count = 8
    request.begin(other, V1)
    assert other.kv_oldest == V1, "it found KV of before"


async def test_chunks_come_at_a_samples_end_and_at_a_flush_and_then_no_more():
    sampling = Sampling(max_new_tokens=4)
    request = OpenRequest(DecodeRequest("r", [1], "s", ("a", "b"), sampling), V1, flush_s=30.0)
    one, other = request.samples
    one.token_ids, one.logprobs, one.finish_reason = [1], [-1.0], "stop"
    other.token_ids, other.logprobs = [2], [-1.0]
    async with asyncio.timeout(30):
        assert [chunk.sample_index for chunk in await request.next_chunks()] == [0]
        request.wake(flush=True)
        assert [chunk.sample_index for chunk in await request.next_chunks()] == [1]
        other.finish_reason = "length"
        request.wake(flush=False)
        (last,) = await request.next_chunks()
        assert (last.token_ids, last.finish_reason) == ([], "length")
        assert await request.next_chunks() == []


def test_seeds_fit_vllm_and_differ_by_sample_and_position():
    seeds = {sample_seed(seed, index) for seed in (0, -1, 5, 2**80 + 1) for index in range(50)}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({position_seed(seed, position) for seed in list(seeds)[:5] for position in range(50)}) == 250


def test_a_draw_depends_on_the_position_and_not_on_draws_taken_back():
    generator = PositionGenerator()

    def draw(position: int) -> float:
        generator.manual_seed(position_seed(7, position))
        return float(torch.empty(1).exponential_(generator=generator))

    first, second = draw(0), draw(1)
    generator.set_offset(generator.get_offset() - 4)
    assert (draw(1), draw(0)) == (second, first)


def test_a_salt_remembers_its_oldest_version():
    salts = SaltVersions(kept_count=2)
    salts.use("a", V1)
    salts.use("a", V2)
    assert (salts.oldest("a"), salts.oldest("b")) == (V1, UNSET)
    for name in ("b", "c"):
        salts.use(name, V3)
    assert salts.oldest("a") == UNSET


@pytest.mark.parametrize("fault", ["missing", "extra", "shape", "integer", "not a number", "infinite"])
def test_weights_that_are_not_the_models_are_refused_before_vllm_sees_them(fault):
    arenas, wrong = WeightArenas(SIZES, "float32"), tensors(weights(1))
    assert arenas.check(wrong).keys() == wrong.keys()
    name = "model.layers.0.mlp.experts.1.down_proj.weight"
    if fault == "missing":
        del wrong[name]
    elif fault == "extra":
        wrong["model.layers.9.weight"] = wrong[name]
    elif fault == "shape":
        wrong[name] = wrong[name][:-1]
    elif fault == "integer":
        wrong[name] = wrong[name].to(torch.int32)
    else:
        wrong[name][1, 2] = torch.nan if fault == "not a number" else -torch.inf
    with pytest.raises(WeightsCorrupt, match=name if fault not in ("missing", "extra") else "do not match"):
        arenas.check(wrong)
    large = tensors(weights(1))
    large[name][:] = 3e38  # their sum is too large for a float, and they are not
    assert arenas.check(large).keys() == large.keys()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_process_reads_the_weights_where_they_were_written(dtype):
    """And what becomes one parameter of vLLM lies together: experts in their order, however many digits they have."""
    arenas, written = WeightArenas(SIZES, dtype), tensors(weights(1))
    arena = arenas.fill(written)
    other = Arena(Layout.of(arena.layout.shapes(), dtype), arena.path)
    read = other.tensors()
    assert read.keys() == written.keys()
    assert all(torch.equal(read[name], tensor.to(getattr(torch, dtype))) for name, tensor in written.items())
    experts = next(g for g in other.layout.groups if g.parameter == "w13_weight")
    prefix = "model.layers.0.mlp.experts"
    in_order = [written[f"{prefix}.{e}.{part}_proj.weight"] for e in range(SIZES.n_experts) for part in ("gate", "up")]
    assert torch.equal(other.span(experts), torch.cat(in_order).flatten().to(getattr(torch, dtype)))
    other.close()
    arenas.keep(arena)
    arenas.close()


def test_groups_are_in_the_order_of_vllms_parameters():
    shapes = {f"m.experts.{e}.{part}_proj.weight": (2, 3) for e in range(12) for part in ("up", "down", "gate")}
    shapes |= {f"m.self_attn.{part}_proj.weight": (2, 3) for part in "vkq"} | {"m.norm.weight": (3,)}
    groups = {(each.module, each.parameter): [name.split(".", 2)[2] for name in each.names] for each in group(shapes)}
    gates = [f"{e}.{part}_proj.weight" for e in range(12) for part in ("gate", "up")]
    assert groups[("m.experts", "w13_weight")] == gates
    assert groups[("m.experts", "w2_weight")] == [f"{e}.down_proj.weight" for e in range(12)]
    assert groups[("m.self_attn.qkv_proj", "weight")] == [f"{part}_proj.weight" for part in "qkv"]
    assert groups[("m.norm", "weight")] == ["weight"]


def test_of_a_parameter_only_what_is_asked_for_is_read_and_what_equals_the_applied_keeps_its_zeros():
    class Plain(nn.Module):
        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight, requires_grad=False)

    applied = {f"m.self_attn.{part}_proj.weight": torch.randn(2, 3) for part in "qkv"} | {
        "m.norm.weight": -torch.zeros(3)
    }
    model, attention, layer = nn.Module(), nn.Module(), nn.Module()
    model.m, layer.self_attn, layer.norm = layer, attention, Plain(torch.zeros(3))
    attention.qkv_proj = Plain(torch.cat([applied[f"m.self_attn.{part}_proj.weight"] for part in "qkv"]))
    attention.qkv_proj.weight[5, 0] += 1  # of the values
    live = LiveWeights(model, group({name: tuple(tensor.shape) for name, tensor in applied.items()}), applied)
    names = {"m.self_attn.k_proj.weight", "m.self_attn.v_proj.weight", "m.norm.weight"}
    read = live.tensors(names)
    assert read.keys() == names
    assert read["m.self_attn.k_proj.weight"] is applied["m.self_attn.k_proj.weight"]
    assert torch.signbit(read["m.norm.weight"]).all()
    changed = read["m.self_attn.v_proj.weight"] - applied["m.self_attn.v_proj.weight"]
    assert torch.equal(changed != 0, torch.tensor([[False] * 3, [True, False, False]]))


def test_parameters_that_are_wanted_are_read_back_at_once_and_others_as_they_are_asked_for():
    asked: list[list[str]] = []

    def read(names: list[str]) -> dict[str, np.ndarray]:
        asked.append(names)
        return {name: np.zeros(1) for name in names}

    live = LiveParameters(["a", "b", "c"], ["b", "a", "of another rank"], read)
    assert list(live) == ["a", "b", "c"]
    assert (live["a"], live["b"], live["c"]) == (0, 0, 0)
    assert asked == [["b", "a"], ["c"]]
    with pytest.raises(KeyError):
        live["of another rank"]


def test_sockets_of_a_killed_engine_are_removed_by_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = subprocess.Popen(["true"])
    killed.wait()
    orphan, foreign = tmp_path / f"slipstream-vllm-{killed.pid}-x", tmp_path / "slipstream-vllm-own"
    orphan.mkdir()
    foreign.mkdir()
    first, second = SocketDirectory(), SocketDirectory()
    assert (orphan.exists(), foreign.exists()) == (False, True)
    assert len(list(tmp_path.iterdir())) == 3
    assert first.path.stat().st_mode & 0o077 == 0
    first.close()
    second.close()
    assert list(tmp_path.iterdir()) == [foreign]


def test_a_process_forked_while_an_engine_starts_dies_with_its_worker():
    code = """
import os, time
from slipstream.engine.vllm.process import dying_with_us
with dying_with_us():
    child = os.fork()
    if not child:
        time.sleep(60)
other = os.fork()
if not other:
    time.sleep(60)
print(child, other, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        child, other = map(int, worker.stdout.readline().split())
        worker.kill()
        worker.wait()
        try:
            deadline_s = time.monotonic() + 30
            while alive(child):
                assert time.monotonic() < deadline_s, "it outlived its worker"
                time.sleep(0.02)
            assert alive(other)  # forked after the start: none of the engine's
        finally:
            os.kill(other, signal.SIGKILL)


def test_what_starts_in_time_lives_on_and_its_garbage_is_not_collected_by_what_is_forked():
    code = """
import gc, multiprocessing, sys, time
from slipstream.engine.vllm.starting import starting

class Connection:
    def __init__(self):
        self.itself = self
    def __del__(self):
        print("closed in", multiprocessing.current_process().name, flush=True)

def child():
    gc.collect()
    time.sleep(3)

context = multiprocessing.get_context("fork")
gc.disable()
Connection()
with starting(1, limit_s=2.0):
    core = context.Process(target=child, name="child")
    core.start()
gc.collect()
core.join()
print(core.exitcode)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n") == ["closed in MainProcess", "0", ""], done.stderr


def test_what_is_not_up_in_time_is_killed_with_all_of_its_own():
    code = """
import multiprocessing, time
from slipstream.common.exits import ServiceFailed
from slipstream.engine.vllm.starting import starting

def rank():
    time.sleep(60)

def core(pipe):
    child = context.Process(target=rank)
    child.start()
    pipe.send(child.pid)
    child.join()

context = multiprocessing.get_context("fork")
try:
    with starting(1, limit_s=3.0):
        ours, theirs = context.Pipe()
        process = context.Process(target=core, args=(theirs,))
        process.start()
        print(process.pid, ours.recv(), flush=True)
        process.join(30)
        raise RuntimeError("vLLM saw it end")
except ServiceFailed as error:
    print(process.exitcode, error, flush=True)
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        assert worker.stderr is not None
        begun = [int(pid) for pid in worker.stdout.readline().split()]
        said = worker.stdout.readline()
        assert said.startswith("-9 vLLM was not up within engine.start_timeout_s = 3 s"), said
        deadline_s = time.monotonic() + 30
        while any(alive(pid) for pid in begun):
            assert time.monotonic() < deadline_s, "it lives on"
            time.sleep(0.02)
        worker.kill()
        where = worker.stderr.read()
    assert "in core" in where, where
    assert "in rank" in where, where


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_where_vllm_is_missing_the_refusal_names_the_command():
    with pytest.raises(ConfigError, match="make install-vllm"):
        find_vllm("a_module_that_is_not_there")


def test_a_version_of_vllm_that_was_not_tested_is_refused(monkeypatch):
    monkeypatch.setattr(installed, "_version", lambda: "0.1.0")
    with pytest.raises(ConfigError, match=r"decode.engine.type is .* 0\.1\.0 is installed"):
        find_vllm("json", "decode.engine.type")
    monkeypatch.setattr(installed, "_version", lambda: f"{installed.SUPPORTED[0]}+cpu")
    assert find_vllm("json") == f"{installed.SUPPORTED[0]}+cpu"


def test_mooncake_is_refused_beside_a_version_that_it_was_not_tried_with(monkeypatch):
    monkeypatch.setattr(installed, "_version", lambda: "0.32.0+cpu")
    monkeypatch.setattr(installed, "_PACKAGES", {"mooncake": "json", "nixl": "json"})
    with pytest.raises(ConfigError, match=r'engine.connector is "mooncake".* 0\.30\.0 only; 0\.32\.0 is installed'):
        installed.check_connector(VllmConfig(connector="mooncake"))
    installed.check_connector(VllmConfig(connector="nixl"))
    monkeypatch.setattr(installed, "_version", lambda: "0.30.0+cpu")
    installed.check_connector(VllmConfig(connector="mooncake"))
