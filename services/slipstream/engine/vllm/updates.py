"""Weight updates of a vLLM engine: pause, swap, read back, verify with a probe, resume; or all the way back.

Tensors travel in memory that the worker reads too (`arena.py`); the version in use is kept there to go back to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Generator, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from slipstream.common.errors import DeadlineExceeded, WeightsCorrupt
from slipstream.engine.base import PausedEngine
from slipstream.engine.tensors import check_tensors
from slipstream.engine.vllm.arena import Arena
from slipstream.engine.vllm.config import VllmConfig
from slipstream.engine.vllm.layout import Layout
from slipstream.engine.vllm.staging import Staged, Stages, check_room, error_of
from slipstream.models.base import Sizes
from slipstream.models.checkpoint import expected_shapes
from slipstream.weights.manifest import Manifest
from slipstream.weights.straight.received import Received

ATTACH_POLL_S = 0.02
RECEIVE_POLL_S = 0.01
RECEIVE_GRACE_S = 30.0
"""vLLM's process ends what it reads by itself at the deadline; after so much longer the place is given up."""

Prepared = Arena | Staged
"""Where vLLM's process takes a version from."""

Rpc = Callable[..., Awaitable[Any]]
Probe = Callable[[Sequence[int]], Awaitable[list[float]]]


class WeightsLost(Exception):
    """Nobody knows which weights the engine holds: it must not go on."""


class WeightArenas:
    """Versions in memory that vLLM's worker reads: the one in use, and the one that is tried."""

    def __init__(self, sizes: Sizes, dtype: str) -> None:
        self.shapes = expected_shapes(sizes)
        self.layout = Layout.of(self.shapes, dtype)
        self.stages = Stages(self.layout)
        self._spare: list[Arena] = []
        self.current: Prepared | None = None

    def check(self, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors as vLLM takes them. vLLM itself takes a checkpoint that lacks a layer without a word."""
        return check_tensors(tensors, self.shapes)

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> Arena:
        """Tensors in an arena that is not in use; its memory is used again by the version after the next."""
        arena = self._spare.pop() if self._spare else Arena(self.layout)
        arena.fill(tensors)
        return arena

    def keep(self, arena: Prepared) -> None:
        """`arena` holds the version in use from now on."""
        before, self.current = self.current, arena
        if isinstance(arena, Staged):
            self.stages.use(arena, True)
        if before is not None:
            self.drop(before)

    def drop(self, arena: Prepared) -> None:
        """`arena` is not in use; a stage is its holder's until he releases it."""
        if isinstance(arena, Staged):
            self.stages.use(arena, False)
        else:
            self._spare.append(arena)

    def close(self) -> None:
        for arena in (*self._spare, *([self.current] if self.current else [])):
            if isinstance(arena, Arena):
                arena.close()
        self._spare, self.current = [], None


class LiveParameters(Mapping[str, np.ndarray]):
    """The parameters in use by name, read from the worker: those wanted at once, any other when it is asked for."""

    def __init__(
        self, names: Collection[str], wanted: Collection[str], read: Callable[[list[str]], dict[str, np.ndarray]]
    ) -> None:
        self._names = dict.fromkeys(names)
        self._wanted = [name for name in dict.fromkeys(wanted) if name in self._names]
        self._read = read
        self._known: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._known:
            self._known = self._read(self._wanted if name in self._wanted else [name])
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Paused(PausedEngine):
    """The engine in the pause, as `verify` sees it; used on a thread of its own, while the loop goes on."""

    def __init__(
        self,
        live: Callable[[Callable[[Awaitable[Any]], Any], Collection[str]], LiveParameters],
        unchanged: Callable[[Collection[str]], Awaitable[Collection[str]]],
        probe: Probe,
        loop: asyncio.AbstractEventLoop,
        timeout_s: float,
    ) -> None:
        self._live = live
        self._unchanged = unchanged
        self._probe = probe
        self._loop = loop
        self._timeout_s = timeout_s

    def parameters(self, wanted: Collection[str] = ()) -> LiveParameters:
        return self._live(self._call, wanted)

    def unchanged(self, names: Collection[str]) -> Collection[str]:
        return self._call(self._unchanged(names))

    def probe(self, token_ids: Sequence[int]) -> list[float]:
        return self._call(self._probe(token_ids))

    def _call(self, work: Awaitable[Any]) -> Any:
        """Let the loop do something, and wait for it here."""

        async def bounded() -> Any:
            async with asyncio.timeout(self._timeout_s):
                return await work

        return asyncio.run_coroutine_threadsafe(bounded(), self._loop).result(self._timeout_s + 1)


class Swapper:
    """Does the swaps of one engine, inside a pause that its caller makes."""

    def __init__(self, sizes: Sizes, config: VllmConfig, rpc: Rpc, probe: Probe) -> None:
        self._arenas = WeightArenas(sizes, config.dtype)
        self._config = config
        self._spread = config.parallel.data_parallel_size > 1
        self._rpc = rpc
        self._probe = probe

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the tensors of a version, by name."""
        return self._arenas.shapes

    @property
    def size_bytes(self) -> int:
        """Of one version, as the engine takes it."""
        return self._arenas.layout.size_bytes

    async def check_room(self, transport: str) -> None:
        """Raise `ConfigError` where `receive` would not have the memory; with several ranks, at any of them."""
        check_room(self.size_bytes, min(await self._rpc("slipstream_room")), transport)

    async def receive(self, manifest: Manifest, loans: Sequence[bytes], reader: str, timeout_s: float) -> Received:
        """Have vLLM's process read a version by itself, into memory beside its weights, while steps go on."""
        arenas = self._arenas
        stage = await arenas.stages.take(time.monotonic() + timeout_s)
        reading = asyncio.create_task(self._receive(stage, manifest, loans, reader, timeout_s))
        reading.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            transfer_s, check_s = await asyncio.shield(reading)
        except asyncio.CancelledError:  # it still writes there
            reading.add_done_callback(lambda task: arenas.stages.release(stage))
            raise
        except BaseException:
            arenas.stages.release(stage)
            raise
        return Received(manifest, stage, lambda: arenas.stages.release(stage), transfer_s, check_s)

    async def _receive(
        self, stage: Staged, manifest: Manifest, loans: Sequence[bytes], reader: str, timeout_s: float
    ) -> tuple[float, float]:
        shapes = {name: list(shape) for name, shape in stage.layout.shapes().items()}
        described = await asyncio.to_thread(lambda: manifest.to_proto().SerializeToString())
        arguments = (stage.path, shapes, stage.layout.dtype, described, list(loans), reader, timeout_s)
        if not await self._call("slipstream_receive", *arguments):
            raise DeadlineExceeded("what was read before it has not come to its end")
        async with asyncio.timeout(timeout_s + RECEIVE_GRACE_S):
            while (outcome := await self._call("slipstream_received", stage.path)) is None:  # noqa: ASYNC110 a thread
                await asyncio.sleep(RECEIVE_POLL_S)
        reason, message, transfer_s, check_s = outcome
        if reason:
            raise error_of(reason, message)
        return transfer_s, check_s

    async def prepare(self, tensors: Mapping[str, Any] | Received) -> Prepared:
        """Check a version and write it where the worker reads it: before the pause."""
        if isinstance(tensors, Received):
            return tensors.handle
        arena = await asyncio.to_thread(lambda: self._arenas.fill(self._arenas.check(tensors)))
        shapes = {name: list(shape) for name, shape in arena.layout.shapes().items()}
        await self._call("slipstream_attach", arena.path, shapes, arena.layout.dtype)
        async with asyncio.timeout(self._config.update_timeout_s):
            while not await self._call("slipstream_attached", arena.path):  # noqa: ASYNC110 a thread of the worker
                await asyncio.sleep(ATTACH_POLL_S)
        return arena

    def give_back(self, arena: Prepared) -> None:
        """What was prepared is not put in."""
        self._arenas.drop(arena)

    async def swap(
        self, arena: Prepared, tensors: Mapping[str, Any] | Received, verify: Callable[[PausedEngine], None]
    ) -> tuple[dict[str, int], float]:
        """Put a prepared version in. Returns tokens sampled so far by vLLM's ids, and the seconds of the swap.

        Raises `WeightsLost` if it is unknown which weights are in now; after any other error it is the old ones.
        """
        started_s = time.monotonic()
        previous = self._arenas.current
        try:
            counts = await self._replace(arena, previous)
            apply_s = time.monotonic() - started_s
            try:
                await self._verify(arena, {} if isinstance(tensors, Received) else tensors, verify)
            except Exception:
                if previous is not None:
                    await self._replace(previous, None)
                raise
        except BaseException:
            self._arenas.drop(arena)
            raise
        self._arenas.keep(arena)
        return counts, apply_s

    async def _verify(
        self, arena: Prepared, tensors: Mapping[str, Any], verify: Callable[[PausedEngine], None]
    ) -> None:
        held = (
            arena.layout.places.keys()
            if not self._spread
            else set(await self._call("slipstream_own_names", arena.path))
        )

        def live(call: Callable[[Awaitable[Any]], Any], wanted: Collection[str]) -> LiveParameters:
            def read(names: list[str]) -> dict[str, np.ndarray]:
                return call(self._read(arena, names, tensors))

            return LiveParameters(held, wanted, read)

        async def unchanged(names: Collection[str]) -> Collection[str]:
            return await self._equal(arena, [name for name in names if name in held])

        paused = Paused(live, unchanged, self._probe, asyncio.get_running_loop(), self._config.update_timeout_s)
        await asyncio.to_thread(verify, paused)

    async def _replace(self, arena: Prepared, previous: Prepared | None) -> dict[str, int]:
        try:
            error, counts = await self._call("slipstream_swap", arena.path, previous.path if previous else None)
        except Exception as failure:  # vLLM's, or a timeout: the swap may still be going on
            raise WeightsLost(f"a weight update did not come back: {type(failure).__name__}: {failure}") from failure
        if error:
            raise WeightsCorrupt(f"vLLM could not load the weights: {error}")
        return counts

    async def read_back(self) -> dict[str, np.ndarray]:
        """All parameters in use, read from the worker."""
        assert self._arenas.current is not None
        return await self._read(self._arenas.current, list(self._arenas.layout.places), {})

    async def quantised(self) -> tuple[dict[str, str], dict[str, float]]:
        """Modules that are quantised, by what; and how far each is from what was applied."""
        current = self._arenas.current
        assert current is not None
        with _scratch(current.layout, list(current.layout.places)) as target:
            names = list(current.layout.places)
            _, errors = await self._call("slipstream_read_back", current.path, names, target.path, False)
        return await self._call("slipstream_quantised", current.path), errors

    async def _equal(self, arena: Prepared, names: list[str]) -> list[str]:
        """Those in use that are equal to what was applied."""
        with _scratch(arena.layout, names) as target:
            equal, _ = await self._call("slipstream_read_back", arena.path, names, target.path, False)
            return equal

    async def _read(self, arena: Prepared, names: list[str], given: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Parameters in use. What is equal to what was applied comes as it was given, of whatever dtype."""
        with _scratch(arena.layout, names) as target:
            staged = isinstance(arena, Staged)  # what was applied is there alone
            equal, _ = await self._call("slipstream_read_back", arena.path, names, target.path, staged)
            applied = {} if isinstance(arena, Staged) else arena.tensors()
            return await asyncio.to_thread(_named, target.tensors(), applied, set() if staged else set(equal), given)

    def close(self) -> None:
        self._arenas.close()

    async def _call(self, method: str, *arguments: Any) -> Any:
        async with asyncio.timeout(self._config.update_timeout_s):
            (answer,) = await self._rpc(method, args=arguments)
            return answer


@contextmanager
def _scratch(layout: Layout, names: list[str]) -> Generator[Arena, None, None]:
    arena = Arena(Layout.of({name: layout.places[name].shape for name in names}, layout.dtype))
    try:
        yield arena
    finally:
        arena.close()


def _named(
    live: dict[str, torch.Tensor], applied: dict[str, torch.Tensor], equal: Set[str], given: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Arrays of what was read back; what the worker found equal to what was applied was not moved."""
    found: dict[str, np.ndarray] = {}
    for name, tensor in live.items():
        if name in equal and name in given:
            value = given[name]
            if isinstance(value, torch.Tensor):  # numpy has no bfloat16
                value = (value.float() if value.dtype == torch.bfloat16 else value).detach().numpy()
            found[name] = np.asarray(value)
        else:
            found[name] = (applied[name] if name in equal else tensor).to(torch.float32, copy=True).numpy()
    return found
