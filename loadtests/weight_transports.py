"""How fast weights get from a trainer's card into an engine's, by each transport.

    python loadtests/weight_transports.py --device cuda --gigabytes 4 --out figures.jsonl
    python loadtests/weight_transports.py --device cpu --gigabytes 0.05 --updates 3     # a rehearsal

A process on card 0 keeps versions as a trainer does, one on card 1 reads them as vLLM's worker does: into memory beside
the weights, each slice's sum compared, and then, which is the pause of an engine, from there into the parameters. A
plain copy between the two cards of as many bytes is timed in the same run. No engine runs: what its pause takes beyond
is in the figures of the engines' own load tests. Each transport has a time limit, which is what it costs if it fails.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lending import lend

ALL = ("grpc", "shm", "cuda_ipc", "nccl", "nixl")
GRPC_BYTES = 100_000_000
"""Of a version by grpc at most: it takes a hundred times as long for as many."""
LEAST_FRACTION = 0.8
"""Of the plain copy's rate, that a transport between cards is to reach."""
START_S = 120.0
LONGEST_PAUSE_S = 0.1
"""For a gigabyte."""


def shapes_of(size_bytes: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a mixture of experts, as Qwen3-30B-A3B has them, of so many bfloat16 bytes or a little more."""
    small = size_bytes < 1 << 29
    hidden, inter, experts, heads = (256, 96, 16, 256) if small else (2048, 768, 128, 4096)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (1024 if small else 151936, hidden)}
    layer = 0
    while sum(2 * _size(shape) for shape in shapes.values()) < size_bytes:
        prefix = f"model.layers.{layer}."
        for name, shape in (
            ("self_attn.q_proj.weight", (heads, hidden)),
            ("self_attn.k_proj.weight", (heads // 8, hidden)),
            ("self_attn.v_proj.weight", (heads // 8, hidden)),
            ("self_attn.o_proj.weight", (hidden, heads)),
            ("mlp.gate.weight", (experts, hidden)),
            ("input_layernorm.weight", (hidden,)),
        ):
            shapes[prefix + name] = shape
        for expert in range(experts):
            for name, shape in (("gate", (inter, hidden)), ("up", (inter, hidden)), ("down", (hidden, inter))):
                shapes[f"{prefix}mlp.experts.{expert}.{name}_proj.weight"] = shape
        layer += 1
    return shapes


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for each in shape:
        size *= each
    return size


def lend_by_grpc(pipe: Connection, device_name: str, size_bytes: int) -> None:
    """The trainer's side of the broadcaster, which runs here too: copies to the host, sums, and sends."""
    import asyncio
    import tempfile

    import torch

    from slipstream.api.broadcast.v1 import broadcast_pb2_grpc
    from slipstream.broadcaster.config import BroadcasterConfig
    from slipstream.broadcaster.publications import Publications
    from slipstream.broadcaster.servicer import BroadcastServicer
    from slipstream.broadcaster.store import VersionStore
    from slipstream.common.auth import Access
    from slipstream.common.channel import open_channel
    from slipstream.common.config import ListenConfig
    from slipstream.common.runtime import build_server
    from slipstream.common.state import State
    from slipstream.common.version import PolicyVersion
    from slipstream.trainer.host_copies import HostCopies
    from slipstream.weights.manifest import Probe
    from slipstream.weights.transport import GrpcWeightTransport

    device = torch.device(device_name)
    weights = {name: torch.randn(shape, device=device) for name, shape in shapes_of(size_bytes // 2).items()}
    copies = HostCopies(device)

    async def serve() -> None:
        with tempfile.TemporaryDirectory() as directory:
            config = BroadcasterConfig(listen=ListenConfig(port=0), run_dir=Path(directory))
            store = VersionStore(config.run_dir / "versions", config.max_store_bytes)
            publications = Publications(store, State("redis://127.0.0.1:1", "load"), 1, 1.0)
            add = broadcast_pb2_grpc.add_BroadcastServiceServicer_to_server
            service = (add, BroadcastServicer(store, publications), "slipstream.api.broadcast.v1.BroadcastService")
            server, port = build_server(config, [service])
            await server.start()
            async with open_channel(f"127.0.0.1:{port}", Access()) as channel:
                transport = GrpcWeightTransport(channel)
                pipe.send("ready")
                while (step := await asyncio.to_thread(pipe.recv)) is not None:
                    weights["model.embed_tokens.weight"].fill_(step)
                    began_s = time.monotonic()
                    version, probe = PolicyVersion(1, step), Probe((1, 2), (-0.5,), 0.1)
                    tensors = await asyncio.to_thread(lambda: copies.begin(weights).arrays())
                    manifest = await transport.publish(version, tensors, probe)
                    pipe.send(([], f"127.0.0.1:{port}", manifest.size_bytes, time.monotonic() - began_s))
                    await asyncio.to_thread(pipe.recv)
                    store.prune(1, ())
            await server.stop(None)

    asyncio.run(serve())


def read_by_grpc(pipe: Connection, device_name: str) -> None:
    """The engine's side: from the broadcaster into memory of the host, and from there, in the pause, to the card."""
    import asyncio

    import torch

    from slipstream.common.auth import Access
    from slipstream.common.channel import open_channel
    from slipstream.weights.transport import GrpcWeightTransport

    device = torch.device(device_name)

    async def fetch() -> None:
        pipe.send("ready")
        while (told := await asyncio.to_thread(pipe.recv)) is not None:
            _, address, size_bytes, timeout_s = told
            async with open_channel(address, Access()) as channel:
                transport = GrpcWeightTransport(channel, timeout_s)
                began_s = time.monotonic()
                tensors = await transport.fetch(await transport.manifest())
                transfer_s = time.monotonic() - began_s
            began_s = time.monotonic()
            placed = {name: torch.from_numpy(each).to(device, torch.bfloat16) for name, each in tensors.items()}
            first = float(placed["model.embed_tokens.weight"].flatten()[0])
            figures = {"transfer_s": transfer_s, "check_s": 0.0, "pause_s": time.monotonic() - began_s}
            pipe.send({**figures, "first": first, "size_bytes": size_bytes})

    asyncio.run(fetch())


def read(pipe: Connection, device_name: str, other_name: str, size_bytes: int, plain_only: bool) -> None:
    """The engine's side: reads what it is told of, applies it, and times a plain copy."""
    import torch

    from slipstream.api.broadcast.v1 import broadcast_pb2
    from slipstream.common.version import PolicyVersion
    from slipstream.engine.vllm.layout import Layout
    from slipstream.weights.manifest import Manifest, Source, WeightSlice
    from slipstream.weights.straight.receiver import Receiver

    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    layout = Layout.of(shapes_of(size_bytes), "bfloat16")
    pipe.send("ready")
    if plain_only:
        pipe.send(_plain_copy_s(device, torch.device(other_name), layout.size_bytes))
        return
    stage = torch.zeros(layout.size_bytes, dtype=torch.uint8, device=device)
    parameters = torch.zeros(layout.size_bytes, dtype=torch.uint8, device=device)
    spans = [
        (layout.places[group.names[0]].offset_bytes, sum(2 * _size(layout.places[n].shape) for n in group.names))
        for group in layout.groups
    ]
    places = {name: place.offset_bytes for name, place in layout.places.items()}
    receiver = Receiver(device)
    while (told := pipe.recv()) is not None:
        described, source, offer, timeout_s = told
        slices = tuple(WeightSlice.from_proto(broadcast_pb2.Slice.FromString(each)) for each in described)
        manifest = Manifest(PolicyVersion(1, 1), slices, sources=(Source(len(slices), source),))
        loan = broadcast_pb2.BorrowShardResponse.FromString(offer)
        try:
            figures = receiver.receive(manifest, [loan], stage, places, "reader", time.monotonic() + timeout_s)
        except Exception as error:
            pipe.send({"error": f"{type(error).__name__}: {error}"})
            continue
        began_s = time.monotonic()
        for offset, size in spans:
            parameters[offset : offset + size].copy_(stage[offset : offset + size], non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        pause_s = time.monotonic() - began_s
        first = float(parameters[places["model.embed_tokens.weight"] :][:2].view(torch.bfloat16)[0])
        pipe.send({"transfer_s": figures.transfer_s, "check_s": figures.check_s, "pause_s": pause_s, "first": first})
    receiver.close()


def _plain_copy_s(device: Any, other: Any, size_bytes: int) -> list[float]:
    import torch

    source = torch.ones(size_bytes, dtype=torch.uint8, device=other)
    target = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.synchronize(other)
        began_s = time.monotonic()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.synchronize(other)
        seconds.append(time.monotonic() - began_s)
    return seconds[1:]


class Measurement:
    """One transport, in two processes that end with it, whatever becomes of them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._context = multiprocessing.get_context("spawn")
        cuda = arguments.device == "cuda"
        self._trainer = "cuda:0" if cuda else "cpu"
        self._engine = f"cuda:{arguments.engine_card}" if cuda else "cpu"

    def plain(self) -> float:
        """Bytes a second of a copy from the one device to the other."""
        seconds = self._run(lambda lender, reader: self._answer(reader), "", plain_only=True)
        size_bytes = _layout_bytes(self._arguments.size_bytes)
        return size_bytes / statistics.median(seconds)

    def updates(self, transport: str) -> list[dict[str, Any]]:
        """Figures of each update after the first, which opens what the others use."""
        return self._run(lambda lender, reader: self._updates(transport, lender, reader), transport)

    def _updates(self, transport: str, lender: Connection, reader: Connection) -> list[dict[str, Any]]:
        found = []
        for step in range(1, self._arguments.updates + 2):
            began_s = time.monotonic()
            lender.send(step)
            slices, source, offer, keep_s = self._answer(lender)
            reader.send((slices, source, offer, self._arguments.limit_s))
            figures = self._answer(reader)
            lender.send("returned")
            if "error" in figures:
                raise RuntimeError(figures["error"])
            if figures.pop("first") != step:
                raise RuntimeError(f"update {step} did not arrive")
            figures |= {"keep_s": keep_s, "end_to_end_s": time.monotonic() - began_s, "update": step - 1}
            write(self._arguments, {"transport": transport, **figures})
            if step > 1:
                found.append(figures)
        lender.send(None)
        reader.send(None)
        return found

    def _answer(self, pipe: Connection) -> Any:
        if not pipe.poll(max(self._deadline_s - time.monotonic(), 0.0)):
            raise TimeoutError("the time limit is over")
        return pipe.recv()

    def _run(self, talk: Any, transport: str, plain_only: bool = False) -> Any:
        self._deadline_s = time.monotonic() + START_S
        size_bytes = self._arguments.size_bytes
        ours, theirs = zip(*(self._context.Pipe() for _ in range(2)), strict=True)
        if transport == "grpc":
            sides: list[tuple[Any, tuple[Any, ...]]] = [
                (read_by_grpc, (theirs[1], self._engine)),
                (lend_by_grpc, (theirs[0], self._trainer, min(size_bytes, GRPC_BYTES))),
            ]
        else:
            sides = [
                (read, (theirs[1], self._engine, self._trainer, size_bytes, plain_only)),
                (lend, (theirs[0], self._trainer, transport, shapes_of(size_bytes), "bfloat16")),
            ]
        jobs = [self._context.Process(target=side, args=given) for side, given in sides[: 1 if plain_only else 2]]
        for job in jobs:
            job.start()
        for pipe in theirs:
            pipe.close()
        try:
            for pipe in ours[1:] if plain_only else ours:
                self._answer(pipe)  # imports take long, and are nobody's transfer
            self._deadline_s = time.monotonic() + self._arguments.limit_s
            result = talk(*ours)
            for job in jobs:
                job.join(10)
            return result
        finally:
            for job in jobs:
                if job.is_alive():
                    job.kill()
                job.join(10)
            for pipe in ours:
                pipe.close()


def _layout_bytes(size_bytes: int) -> int:
    return sum(2 * _size(shape) for shape in shapes_of(size_bytes).values())


def write(arguments: argparse.Namespace, record: Mapping[str, Any]) -> None:
    """As it comes, so that a run that is cut off has not been for nothing."""
    line = json.dumps({key: round(value, 6) if isinstance(value, float) else value for key, value in record.items()})
    print(line, flush=True)
    if arguments.out is not None:
        with arguments.out.open("a") as file:
            file.write(line + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--engine-card", type=int, default=1)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--transports", nargs="+", choices=ALL, default=None)
    parser.add_argument("--limit-s", type=float, default=60.0, help="of each transport")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--check", action="store_true", help="fail below the goals")
    arguments = parser.parse_args()
    arguments.size_bytes = int(arguments.gigabytes * 1e9)
    measurement = Measurement(arguments)
    total_bytes = _layout_bytes(arguments.size_bytes)
    plain = measurement.plain()
    write(arguments, {"transport": "plain copy", "bytes": total_bytes, "gb_per_s": plain / 1e9})
    rows, failed = [("plain copy", total_bytes, total_bytes / plain, 0.0, 0.0, 0.0, 0.0, plain / 1e9, 1.0)], False
    for transport in arguments.transports or [t for t in ALL if t != "cuda_ipc" or arguments.device == "cuda"]:
        try:
            found = measurement.updates(transport)
        except (RuntimeError, TimeoutError, EOFError, OSError) as error:
            write(arguments, {"transport": transport, "error": f"{type(error).__name__}: {error}"})
            failed = True
            continue
        middle = {key: statistics.median(each[key] for each in found) for key in found[0]}
        moved = int(middle.pop("size_bytes", total_bytes))
        rate = moved / middle["transfer_s"]
        summary = {"transport": transport, "bytes": moved, "updates": len(found), **middle}
        write(arguments, {**summary, "gb_per_s": rate / 1e9, "of_plain": rate / plain})
        seconds = (middle[key] for key in ("transfer_s", "check_s", "pause_s", "keep_s", "end_to_end_s"))
        rows.append((transport, moved, *seconds, rate / 1e9, rate / plain))
        between_cards = arguments.device == "cuda" and transport not in ("grpc", "shm")
        slow = rate < LEAST_FRACTION * plain or middle["pause_s"] > LONGEST_PAUSE_S * total_bytes / 1e9
        failed |= arguments.check and between_cards and slow
    heads = ("", "bytes", "transfer s", "check s", "pause s", "keep s", "end to end s", "GB/s", "of plain")
    print(" | ".join(heads))
    for name, size_bytes, *rest in rows:
        print(" | ".join([name, str(size_bytes), *(f"{value:.4f}" for value in rest)]))
    return int(failed)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
