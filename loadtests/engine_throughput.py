"""What our service costs on top of vLLM, and what capture, updates and time cost our service.

    python loadtests/engine_throughput.py
    python loadtests/engine_throughput.py --device cuda --dtype bfloat16 --layers 16 --experts 128 --hidden 2048 ...

One decode worker's process, with the gRPC servicers in front and a vLLM engine inside, serves a random model. The same
engine is called in its own process, by vLLM's interface, and through the service, in turns. Ratios of output tokens a
second at `--concurrent` samples: service / vLLM (0.97 on a GPU), an update every 2 s / none (0.95 on a GPU); and, of
two such workers beside each other, loaded in turns, capture of routes on / off (0.97 on a GPU). Then 2,000 requests,
over which the memory of the worker's process may rise by 0.1 MB per 100. On CPUs the ratios are only printed: worker,
vLLM and caller share the cores. Writes JSON where `--json` says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from math import prod
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "services"))
sys.path.insert(0, str(ROOT / "loadtests"))

from lending import lend  # noqa: E402 - beside this file

if TYPE_CHECKING:
    import torch

    from slipstream.engine.vllm.engine import VllmEngine

REQUIRED = {"service": 0.97, "capture": 0.97, "updates": 0.95}
ALLOWED_MB_PER_100 = 0.1
START_TIMEOUT_S = 400.0
ROUNDS = 3
CAPTURE_ROUNDS = 4
HALF_OF_A_GPU = 0.4
UPDATE_INTERVAL_S = 2.0
LEND_TIMEOUT_S = 60.0
MEMORY_SAMPLES = 20
KV_RELEASE_INTERVAL_S = 0.05


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="of the memory part")
    parser.add_argument("--parts", default="service,updates,memory,capture,large_update")
    parser.add_argument("--engine", type=json.loads, default={}, help="further settings of the engine, JSON")
    add_worker_arguments(parser)
    return parser.parse_args()


def add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the load, and what a worker's process is told by the one that starts it."""
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0, help="of one round of a ratio")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--expert-dim", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--transport", choices=("memory", "shm", "cuda_ipc"), default="memory")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)


# --- The worker's process ----------------------------------------------------------------------------


class Host:
    """A decode worker, and the commands that its parent sends beside the calls of the service."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        from slipstream.engine.vllm.config import VllmConfig
        from slipstream.engine.vllm.engine import VllmEngine
        from slipstream.models.qwen3_moe.config import MoeConfig
        from slipstream.models.registry import save_sizes

        context = 2 * (options.prompt_tokens + options.output_tokens)
        sizes = MoeConfig(
            vocab_size=options.vocab,
            dim=options.hidden,
            n_layers=options.layers,
            n_heads=options.heads,
            n_kv_heads=max(options.heads // 8, 2),
            head_dim=max(options.hidden // options.heads, 32),
            n_experts=options.experts,
            top_k=options.top_k,
            expert_dim=options.expert_dim,
            max_context_tokens=context,
        )
        save_sizes(sizes, directory / "model")
        self.config = VllmConfig(
            device=options.device,
            dtype=options.dtype,
            quantization=options.quantization,
            capture_routes=options.serve["capture_routes"],
            connector=options.serve.get("connector", "none"),
            block_count=(options.concurrent + 4) * (context // 32 + 2),
            max_running_samples=options.concurrent,
            max_prefill_tokens=2048 if options.device == "cpu" else 8192,
            **options.serve.get("engine", {}),
        )
        self.options = options
        self.sizes = sizes
        self.engine: VllmEngine = VllmEngine(directory / "model", sizes, self.config)
        self.step = 0
        self.figures: list[dict[str, float]] = []
        """Of each update of a round."""
        self._lending: Connection | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._sums: dict[str, int] = {}

    async def lend(self) -> None:
        """Start the process that updates are read from, on the engine's card; `update` reads from it from then on."""
        if self.options.transport == "memory":
            return
        ours, theirs = get_context("spawn").Pipe()
        given = (theirs, self.options.device, self.options.transport, dict(self.engine.shapes), self.options.dtype)
        get_context("spawn").Process(target=lend, args=given, daemon=True).start()
        theirs.close()
        await self._told(ours)
        self._lending = ours

    async def _told(self, pipe: Connection) -> Any:
        if not await asyncio.to_thread(pipe.poll, LEND_TIMEOUT_S):
            raise TimeoutError("the process that lends weights says nothing")
        return pipe.recv()

    async def update(self) -> dict[str, float]:
        """The next version, of other random weights; returns what it cost."""
        if self._lending is not None:
            return await self._read_straight(self._lending)
        from slipstream.common.version import PolicyVersion

        self._tensors = random_weights(self.engine.shapes, self.options.dtype, self.step)
        self._sums = await asyncio.to_thread(self._sample)
        started_s = time.monotonic()
        report = await self.engine.update(PolicyVersion(1, self.step), self._tensors, self._verify)
        self.step += 1
        return {
            "bytes": report.size_bytes,
            "transfer_s": report.transfer_s,
            "pause_s": report.pause_s,
            "apply_s": report.apply_s,
            "end_to_end_s": time.monotonic() - started_s,
            "in_flight": report.in_flight_samples,
        }

    async def _read_straight(self, lending: Connection) -> dict[str, float]:
        """As a worker does where the broadcaster tells it of a trainer that lends: read, compare all sums, apply."""
        from slipstream.api.broadcast.v1 import broadcast_pb2
        from slipstream.common.version import PolicyVersion
        from slipstream.engine.worker.verification import Verification
        from slipstream.weights.manifest import Manifest, Source, WeightSlice

        version = PolicyVersion(1, self.step)
        lending.send(self.step)
        described, source, offer, keep_s = await self._told(lending)
        slices = tuple(WeightSlice.from_proto(broadcast_pb2.Slice.FromString(each)) for each in described)
        manifest = Manifest(version, slices, sources=(Source(len(slices), source),))
        loan = broadcast_pb2.BorrowShardResponse.FromString(offer)
        started_s = time.monotonic()
        received = await self.engine.receive(manifest, [loan], "reader", time.monotonic() + LEND_TIMEOUT_S)
        try:
            report = await self.engine.update(version, received, Verification(manifest, None, received))
        finally:
            received.release()
            lending.send("returned")
        self.step += 1
        return {
            "bytes": report.size_bytes,
            "keep_s": keep_s,
            "transfer_s": received.transfer_s,
            "check_s": received.check_s,
            "pause_s": report.pause_s,
            "apply_s": report.apply_s,
            "end_to_end_s": time.monotonic() - started_s,
            "in_flight": report.in_flight_samples,
        }

    def _sample(self) -> dict[str, int]:
        """Checksums of some parameters, of as many bytes as a worker compares in the pause."""
        from slipstream.engine.worker.verification import CHECKSUM_BYTES
        from slipstream.weights.checksum import tensor_checksum

        sums, left = {}, CHECKSUM_BYTES
        for name in random.Random(self.step).sample(list(self._tensors), len(self._tensors)):
            if 4 * self._tensors[name].numel() <= left:
                tensor = self._tensors[name].float()
                sums[name] = tensor_checksum(name, tensor.numpy())
                left -= tensor.nbytes
        return sums

    def _verify(self, paused: Any) -> None:
        """As a worker does: checksums, and a probe."""
        from slipstream.weights.checksum import tensor_checksum

        live = paused.parameters(self._sums)
        assert all(tensor_checksum(name, live[name]) == expected for name, expected in self._sums.items())
        assert all(value <= 0 for value in paused.probe(list(range(16))))

    async def update_for_ever(self) -> None:
        self.figures.clear()
        while True:
            started_s = time.monotonic()
            self.figures.append(await self.update())
            await asyncio.sleep(max(UPDATE_INTERVAL_S - (time.monotonic() - started_s), 0))

    async def direct(self, turns: int) -> float:
        """Output tokens a second of vLLM itself, called here."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        async def one(number: int, prompt: list[int]) -> int:
            parameters = SamplingParams(
                max_tokens=self.options.output_tokens,
                seed=number,
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                output_kind=RequestOutputKind.DELTA,
            )
            count = 0
            request = {"prompt_token_ids": prompt, "cache_salt": f"direct-{number}"}
            async for output in self.engine._llm.generate(request, parameters, f"direct-{number}-{time.monotonic()}"):
                count += len(output.outputs[0].token_ids)
            return count

        return (await throughput(one, self.options, turns)).per_s

    def memory_mb(self) -> tuple[float, float]:
        """Anonymous memory of this process, and of vLLM's."""
        from soak import children, memory_mb

        own = os.getpid()
        return memory_mb(own) or 0.0, sum(memory_mb(pid) or 0.0 for pid in children(own))


def medians(figures: list[dict[str, float]]) -> dict[str, float]:
    found = {name: statistics.median(each[name] for each in figures) for name in (figures[0] if figures else ())}
    return {**found, "updates": len(figures)}


def random_weights(shapes: Any, dtype: str, seed: int) -> dict[str, torch.Tensor]:
    """Weights of any model, cut out of one stretch of random numbers: no memory to speak of, made in no time."""
    import torch

    largest = max(prod(shape) for shape in shapes.values())
    pool = torch.empty(largest + 4096).normal_(0, 0.02, generator=torch.Generator().manual_seed(seed % 2))
    pool = pool.to(getattr(torch, dtype))
    ones = torch.ones(largest if largest < 1 << 20 else 1 << 20, dtype=pool.dtype)
    tensors = {}
    for index, (name, shape) in enumerate(shapes.items()):
        count, start = prod(shape), index % 4096
        tensors[name] = ones[:count].view(shape) if len(shape) == 1 else pool[start : start + count].view(shape)
    return tensors


async def serve(options: argparse.Namespace) -> None:
    """The worker: its servicers on a port, its commands on the standard input, its answers on a descriptor."""
    from slipstream.api.inference.v1 import worker_pb2
    from slipstream.common.auth import Access
    from slipstream.common.runtime import build_server
    from slipstream.common.version import UNSET, PolicyVersion
    from slipstream.decode.config import DecodeConfig
    from slipstream.decode.kv_client import KvClient
    from slipstream.decode.servicer import decode_servicers
    from slipstream.engine.worker.updates import WorkerState
    from slipstream.engine.worker.worker import Worker
    from slipstream.prefill.servicer import prefill_servicers

    class Nothing:
        async def version(self, key: str) -> PolicyVersion:
            return UNSET

    directory = Path(options.serve["directory"])
    host = Host(options, directory)
    await host.engine.start()
    await host.update()
    await host.lend()
    prefills = options.serve.get("prefills", False)
    replica = "prefill-1" if prefills else "decode-1"
    config = DecodeConfig(run_dir=directory, run_id="load", replica=replica, engine=host.config)
    unused: Any = Nothing()  # versions come by command
    role = worker_pb2.WORKER_ROLE_PREFILL if prefills else worker_pb2.WORKER_ROLE_DECODE
    worker = Worker(config, role, host.engine, unused, unused)
    worker.updates.state = WorkerState.SERVING
    limits = host.engine.limits
    known: set[str] = set()
    """Prefill workers whose KV it takes."""
    kv = KvClient(Access(), known, 5.0, limits.max_context_tokens * limits.kv_bytes_per_token)
    both = [*prefill_servicers(worker, host.config.transfer_ttl_s), *decode_servicers(worker, kv)]
    server, port = build_server(config, [*worker.servicers(), *both])
    releasing = asyncio.create_task(kv.release_for_ever(KV_RELEASE_INTERVAL_S))
    await server.start()
    await worker.bound(port)

    answers = os.fdopen(options.serve["answers"], "w")
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    print(json.dumps({"address": worker.identity.address, "epoch": worker.identity.epoch}), file=answers, flush=True)
    updating: asyncio.Task[None] | None = None
    while line := await commands.readline():
        command: dict[str, Any] = json.loads(line)
        name, answer = command.pop("name"), None
        if name == "direct":
            answer = await host.direct(**command)
        elif name == "update":
            answer = await host.update(**command)
        elif name == "memory":
            answer = host.memory_mb()
        elif name == "know":
            known.add(command["address"])
        elif name == "updating":
            updating = asyncio.create_task(host.update_for_ever())
        elif name == "still":
            assert updating is not None
            updating.cancel()
            await asyncio.wait((updating,))
            if not updating.cancelled():
                updating.result()
            answer = medians(host.figures)
        print(json.dumps(answer), file=answers, flush=True)
    releasing.cancel()
    await server.stop(None)
    await kv.close()
    await host.engine.stop()


# --- The caller's process ----------------------------------------------------------------------------


class Client:
    """Starts a worker and calls it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self._number = 0

    async def start(self, stack: AsyncExitStack, capture_routes: bool, cards: str = "", **more: Any) -> None:
        """`cards`: those that the worker sees, its own first. `more`: what else `serve` looks at."""
        from slipstream.api.inference.v1 import decode_pb2_grpc
        from slipstream.api.rollout.v1 import rows_pb2_grpc
        from slipstream.common.auth import Access
        from slipstream.common.channel import open_channel

        directory = stack.enter_context(tempfile.TemporaryDirectory())
        read, write = os.pipe()
        told = {"directory": directory, "answers": write, "capture_routes": capture_routes, **more}
        command = [sys.executable, sys.argv[0], *sys.argv[1:], "--serve", json.dumps(told)]
        path = os.pathsep.join([str(ROOT / "services"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path}
        if cards:
            environment |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": cards}
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, pass_fds=(write,), env=environment
        )
        stack.push_async_callback(self._stop)
        os.close(write)
        self._answers = asyncio.StreamReader()
        pipe = os.fdopen(read)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(self._answers), pipe)
        place = await self._answer()
        self.epoch, self.address = place["epoch"], place["address"]
        channel = open_channel(self.address, Access())
        self.channel = channel
        stack.push_async_callback(channel.close)
        self._stub = decode_pb2_grpc.DecodeServiceStub(channel)
        self._rows = rows_pb2_grpc.RowsServiceStub(channel)
        self._held: list[str] = []

    async def ask(self, name: str, **values: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"name": name, **values}).encode() + b"\n")
        return await self._answer()

    async def one(self, number: int, prompt: list[int], salt: str = "") -> int:
        """A decode call as the runner makes it; without a salt it hits nothing of any other."""
        from slipstream.api.inference.v1 import decode_pb2, prefill_pb2
        from slipstream.api.types.v1 import types_pb2

        self._number += 1
        name = f"load-{self._number}"
        request = decode_pb2.DecodeRequest(
            request_id=name,
            worker_epoch=self.epoch,
            salt=salt or name,
            prompt=prefill_pb2.Prompt(new_token_ids=prompt),
            sample_ids=[f"{name}/0"],
            sampling=types_pb2.Sampling(max_new_tokens=self.options.output_tokens, seed=number, temperature=1.0),
            capture_routes=self.capture_routes,
            for_training=True,
        )
        count = 0
        async for message in self._stub.Decode(request, timeout=120):
            count += sum(len(chunk.token_ids) for chunk in message.chunks)
        self._held += [f"d/{name}", f"d/{name}/0"]  # as the worker calls them
        return count

    async def release(self) -> None:
        """Give up the routes of all requests, as who trains on them does once they are fetched."""
        from slipstream.api.rollout.v1 import rows_pb2

        held, self._held = self._held, []
        for at in range(0, len(held), 10_000):
            await self._rows.ReleaseRows(rows_pb2.ReleaseRowsRequest(request_id="load", keys=held[at : at + 10_000]))

    capture_routes = True

    async def _answer(self) -> Any:
        async with asyncio.timeout(START_TIMEOUT_S):
            line = await self._answers.readline()
        if not line:
            raise RuntimeError("the worker has ended")
        return json.loads(line)

    async def _stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(30):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()


@dataclass(frozen=True)
class Rate:
    """Output tokens of requests that all ran to their end, and the seconds that took."""

    tokens: int
    seconds: float

    @property
    def per_s(self) -> float:
        return self.tokens / self.seconds


async def throughput(one: Callable[[int, list[int]], Awaitable[int]], options: argparse.Namespace, turns: int) -> Rate:
    """A request in each of the places, and when it is done another, `turns` times."""

    async def place(index: int) -> int:
        total = 0
        for turn in range(turns):
            number = index + options.concurrent * turn
            total += await one(number, [(7 * number + 13 * at) % options.vocab for at in range(options.prompt_tokens)])
        return total

    started_s = time.monotonic()
    tokens = sum(await asyncio.gather(*(place(index) for index in range(options.concurrent))))
    return Rate(tokens, time.monotonic() - started_s)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items() if k not in ("serve", "json")}}
    parts = set(options.parts.split(","))

    def note(name: str, value: Any) -> None:
        results[name] = value
        print(f"{name}: {value}", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1))

    if parts != {"capture"}:
        await of_one_worker(options, parts, note)
    if "capture" in parts:
        await capture(options, note)
    return results


async def of_one_worker(options: argparse.Namespace, parts: set[str], note: Callable[[str, Any], None]) -> None:
    """All but what capture costs."""
    async with AsyncExitStack() as stack:
        client = Client(options)
        started_s = time.monotonic()
        await client.start(stack, capture_routes=True, engine=options.engine)
        note("start_s", round(time.monotonic() - started_s, 1))
        turns = await turns_of_a_round(client, options)
        if "service" in parts:
            direct, served = 0.0, 0.0
            for _ in range(ROUNDS):
                direct = max(direct, await client.ask("direct", turns=turns))
                served = max(served, (await throughput(client.one, options, turns)).per_s)
            note("vllm_tokens_per_s", direct)
            note("service_tokens_per_s", served)
            note("service_ratio", served / direct)
        if "updates" in parts:
            still, moving = 0.0, 0.0
            for _ in range(2):
                still = max(still, (await throughput(client.one, options, 2 * turns)).per_s)
                await client.ask("updating")
                moving = max(moving, (await throughput(client.one, options, 2 * turns)).per_s)
                note("update", await client.ask("still"))
                note("updates_ratio", moving / still)  # of the first round already: there may be no time for another
        if "large_update" in parts:
            note("large_update", await large_update(client, options, 2 * turns))
        if "memory" in parts:
            own, others = await memory(client, options)
            note("memory_mb_per_100", own)
            note("memory_mb_per_100_of_vllm", others)


async def turns_of_a_round(client: Client, options: argparse.Namespace) -> int:
    """How often each place is filled in a round of `--seconds`; the engine is warm afterwards."""
    await throughput(client.one, options, 1)
    once = await throughput(client.one, options, 1)
    return max(round(options.seconds / once.seconds), 2)


async def capture(options: argparse.Namespace, note: Callable[[str, Any], None]) -> None:
    """Two workers beside each other, one of them capturing; the one is loaded, then the other, in turns."""
    clients: dict[bool, Client] = {}
    async with AsyncExitStack() as stack:
        for captures in (True, False):
            clients[captures] = client = Client(options)
            client.capture_routes = captures
            engine = {"gpu_memory_fraction": HALF_OF_A_GPU, **options.engine}
            await client.start(stack, capture_routes=captures, engine=engine)
        turns = await turns_of_a_round(clients[False], options)
        await turns_of_a_round(clients[True], options)
        rates: dict[bool, list[float]] = {True: [], False: []}
        for number in range(2 * CAPTURE_ROUNDS):
            captures = number % 4 in (0, 3)  # on, off, off, on: neither is always the later one
            rates[captures].append((await throughput(clients[captures].one, options, turns)).per_s)
            await clients[captures].release()
    note("capture_tokens_per_s", rates[True])
    note("without_capture_tokens_per_s", rates[False])
    note("capture_ratio", statistics.median(rates[True]) / statistics.median(rates[False]))


async def large_update(client: Client, options: argparse.Namespace, turns: int) -> dict[str, Any]:
    """One update under load: what it took, and the tokens that were not sampled for it."""
    for _ in range(2):  # both places in memory are ready
        await client.ask("update")
    without = await throughput(client.one, options, turns)
    load = asyncio.create_task(throughput(client.one, options, turns))
    await asyncio.sleep(without.seconds / 4)
    found: dict[str, Any] = await client.ask("update")
    moved = await load
    found["pause_ms_per_gb"] = found["pause_s"] * 1e3 / (found["bytes"] / 1e9)
    found["apply_ms_per_gb"] = found["apply_s"] * 1e3 / (found["bytes"] / 1e9)
    found["tokens_per_s_without"], found["tokens_per_s_with_one_update"] = without.per_s, moved.per_s
    found["lost_at_one_a_minute_computed"] = found["pause_s"] / 60
    found["lost_at_one_a_minute_measured"] = (moved.seconds - without.seconds) / 60
    return found


async def memory(client: Client, options: argparse.Namespace) -> tuple[float, float]:
    """Slopes of the memory of the worker's process and of vLLM's, after as many requests that fill tables and caches.

    vLLM's goes on for some thousands, as the operators on the CPU keep what they made for each new size of a batch.
    """
    from soak import slope

    points: list[tuple[int, float, float]] = []
    batch = max(options.requests // MEMORY_SAMPLES, 1)
    for done in range(-options.requests, options.requests, batch):
        await asyncio.gather(
            *(client.one(abs(done) + at, [at % options.vocab] * 8, "one version") for at in range(batch))
        )
        await client.release()
        if done >= 0:
            points.append((done + batch, *await client.ask("memory")))
    return 100 * slope([point[:2] for point in points]), 100 * slope([(at, of_vllm) for at, _, of_vllm in points])


def report(results: dict[str, Any], device: str) -> int:
    failures = []
    print(f"{'ratio':<12}{'measured':>10}{'required':>10}")
    for name, required in REQUIRED.items():
        ratio = results.get(f"{name}_ratio")
        if ratio is None:
            continue
        print(f"{name:<12}{ratio:>10.3f}{required if device == 'cuda' else 'printed':>10}")
        if device == "cuda" and ratio < required:
            failures.append(f"{name}: {ratio:.3f} < {required}")
    rise = results.get("memory_mb_per_100")
    if rise is not None:
        print(f"{'MB per 100':<12}{rise:>10.3f}{ALLOWED_MB_PER_100:>10}")
        if rise >= ALLOWED_MB_PER_100:
            failures.append(f"memory rises by {rise:.3f} MB per 100 requests")
    for failure in failures:
        print(f"over budget: {failure}")
    return len(failures)


def main() -> int:
    options = arguments()
    if options.serve is not None:
        asyncio.run(serve(options))
        return 0
    return int(report(asyncio.run(measure(options)), options.device) > 0)


if __name__ == "__main__":
    sys.exit(main())
