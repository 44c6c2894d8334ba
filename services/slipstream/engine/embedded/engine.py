"""The embedded engine as asyncio sees it: one thread runs `EngineCore`, the event loop only waits for it.

| side | does | waits for | woken by |
|---|---|---|---|
| event loop | checks requests, keeps routes, hands results out | futures and queues of its callers | `_deliver` |
| engine thread | runs commands between steps, then a step | its inbox, when nothing can run | `_post` |

Commands go through a thread-safe inbox; outputs of a step come back in one `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import torch

from slipstream.common.errors import EngineFull, KvMismatch, KvUnknown, RequestAborted, RequestIdReused
from slipstream.common.exits import ServiceFailed
from slipstream.common.version import PolicyVersion
from slipstream.engine.base import (
    BusyInterval,
    DecodeRequest,
    EngineCapabilities,
    EngineLimits,
    EngineLoad,
    KvEvent,
    KvHeader,
    KvPayload,
    KvReference,
    PausedEngine,
    PrefillRequest,
    PrefillResult,
    SampleChunk,
    UpdateReport,
    each_chunk,
)
from slipstream.engine.checks import check_decode, check_prefill, check_prompt, no_connector
from slipstream.engine.embedded.batch import MAX_STOP_TOKENS
from slipstream.engine.embedded.config import EmbeddedConfig
from slipstream.engine.embedded.core import EngineCore
from slipstream.engine.embedded.outputs import Chunks, Output, PrefillDone, Recorded, Transfer
from slipstream.engine.hashing import prompt_of
from slipstream.engine.pulse import Pulse
from slipstream.engine.routes import RouteRows, RouteStore
from slipstream.engine.tensors import check_tensors
from slipstream.models.base import Sizes
from slipstream.models.checkpoint import expected_shapes

T = TypeVar("T")
Reply = tuple["asyncio.Future[Any]", Any, BaseException | None]

# The interpreter's default of 5 ms lets the event loop hold the lock for that long after each tensor operation.
SWITCH_INTERVAL_S = 0.0005
STOP_TIMEOUT_S = 30.0
"""For a step that has begun to end."""


class EmbeddedEngine:
    """One replica of the model on one thread. See `slipstream.engine.base.Engine`."""

    def __init__(self, sizes: Sizes, config: EmbeddedConfig) -> None:
        self._core = EngineCore(sizes, config)
        self.shapes = expected_shapes(sizes)
        self._config = config
        self._inbox: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any] | None] | None]
        self._inbox = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._routes = RouteStore(config.route_bytes)
        self._prefills: dict[str, tuple[PrefillRequest, asyncio.Future[Transfer]]] = {}
        """Running and held ones."""
        self._transfers: dict[str, tuple[Transfer, asyncio.TimerHandle]] = {}
        self._streams: dict[str, asyncio.Queue[Chunks]] = {}
        self._updating = 0
        self._pulse = Pulse(
            lambda: self._call(lambda: None), config.silence_s, lambda: self._updating > 0, self._silent
        )
        self.limits = EngineLimits(
            block_size_tokens=config.block_size_tokens,
            block_count=config.block_count,
            max_context_tokens=sizes.max_context_tokens,
            max_running_samples=config.max_running_samples,
            max_waiting_requests=config.max_waiting_requests,
            kv_bytes_per_token=sizes.n_layers * 2 * sizes.n_kv_heads * sizes.head_dim * 4,
            moe_layers=sizes.moe_layers,
            top_k=sizes.top_k,
            expert_count=sizes.n_experts,
            vocab_size=sizes.vocab_size,
            max_stop_token_ids=MAX_STOP_TOKENS,
        )
        self.capabilities = EngineCapabilities(chunked_prefill=True)
        if config.block_count < 2 * self._core.blocks_a_table:
            raise ValueError("block_count must hold two whole contexts: one prompt and one sample")

    @property
    def version(self) -> PolicyVersion | None:
        return self._core.version

    # --- Life ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        self._feeling = asyncio.create_task(self._pulse.run())

    @property
    def silent_s(self) -> float:
        return self._pulse.silent_s

    async def stop(self) -> None:
        """Raises `ServiceFailed` if its thread stands still; the process can end all the same."""
        self._feeling.cancel()
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)
        for _, timer in self._transfers.values():
            timer.cancel()
        if self._thread.is_alive():
            raise ServiceFailed(f"the engine's thread did not end within {STOP_TIMEOUT_S:g} s")

    async def wait(self) -> None:
        """Return when the engine was stopped; raise what ended its thread otherwise."""
        await asyncio.shield(self._ended)

    def _run(self) -> None:
        error: BaseException | None = None
        torch.set_num_threads(self._config.torch_threads)
        try:
            with torch.inference_mode():
                self._work()
        except Exception as failure:  # ends the engine; `wait` and every caller get it
            error = failure
        finally:
            with suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._finish, error)

    def _work(self) -> None:
        core, runnable = self._core, False
        while True:
            replies: list[Reply] = []
            while True:
                try:
                    command = self._inbox.get(block=not runnable)
                except queue.Empty:
                    break
                if command is None:
                    return
                runnable = True
                function, future = command
                try:
                    result, failure = function(), None
                except Exception as caught:  # the caller's to handle
                    result, failure = None, caught
                if future is not None:
                    replies.append((future, result, failure))
            runnable = core.step() if core.busy else False
            outputs = core.take_outputs()
            if replies or outputs:
                self._loop.call_soon_threadsafe(self._deliver, replies, outputs)

    def _post(self, function: Callable[[], Any]) -> None:
        self._inbox.put((function, None))

    async def _call(self, function: Callable[[], T]) -> T:
        """Run `function` on the engine's thread between two steps."""
        if self._ended.done():
            raise RequestAborted("the engine has ended")
        future: asyncio.Future[T] = self._loop.create_future()
        self._inbox.put((function, future))
        await asyncio.wait((future, self._ended), return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            raise RequestAborted("the engine has ended")
        return future.result()

    def _deliver(self, replies: list[Reply], outputs: list[Output]) -> None:
        """On the event loop: hand out what a step produced; a sample's routes come before its last chunk."""
        for output in outputs:
            if isinstance(output, Recorded) and output.prompt is not None:
                self._routes.put_prompt(output.key, output.routes, output.prompt)
            elif isinstance(output, Recorded):
                self._routes.put(output.key, output.routes)
            elif isinstance(output, PrefillDone):
                self._finish_prefill(output)
            elif (stream := self._streams.get(output.request_id)) is not None:
                stream.put_nowait(output)
        for future, result, failure in replies:
            if future.cancelled():
                continue
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)

    def _silent(self) -> None:
        """The thread does not move: nobody waits for it."""
        for request_id, stream in self._streams.items():
            stream.put_nowait(Chunks(request_id, [], ended=False))

    def _finish(self, error: BaseException | None) -> None:
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)
            self._ended.exception()  # seen: `wait` raises it, if anyone waits
        for _, future in self._prefills.values():
            if not future.done():
                future.set_exception(RequestAborted("the engine has ended"))
                future.exception()
        for request_id, stream in self._streams.items():
            stream.put_nowait(Chunks(request_id, [], ended=True))

    # --- Prefill and KV ------------------------------------------------------------------------------

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        """Compute a prompt's KV. A repeat of a request that is running or held answers the same."""
        check_prefill(request, self.version, self.limits, self.capabilities)
        there = self._prefills.get(request.request_id)
        if there is None:
            self._check_room()
            if request.capture_routes:
                self._routes.check(request.request_id, (), lambda: prompt_of(request))
            there = self._prefills[request.request_id] = (request, self._loop.create_future())
            self._post(lambda: self._core.add_prefill(request))
        first, future = there
        if first != request:
            raise RequestIdReused("this request_id came with another prompt before", request_id=request.request_id)
        return (await asyncio.shield(future)).result

    def _finish_prefill(self, output: PrefillDone) -> None:
        _, future = self._prefills[output.request_id]
        if isinstance(output.outcome, Transfer):
            timer = self._loop.call_later(self._config.transfer_ttl_s, self.release_kv, output.request_id)
            self._transfers[output.request_id] = (output.outcome, timer)
            future.set_result(output.outcome)
        else:
            del self._prefills[output.request_id]
            future.set_exception(output.outcome)
            future.exception()  # seen, even if the caller is gone

    def export_kv(self, transfer_id: str) -> KvPayload:
        if transfer_id not in self._transfers:
            raise KvUnknown("released, expired, or never held", transfer_id=transfer_id)
        transfer, _ = self._transfers[transfer_id]
        request, _ = self._prefills[transfer_id]
        count = transfer.result.token_count
        # Read here, beside the engine's thread: it never writes to blocks that are held.
        with torch.inference_mode():
            kv = self._core.kv.read(self._core.kv.slots_of(transfer.blocks, 0, count)).numpy()
        header = KvHeader(
            dtype="float32",
            shape=tuple(kv.shape),
            token_count=count,
            salt=request.salt,
            prompt_hash=prompt_of(request),
            version=transfer.result.version,
            oldest_version=transfer.result.kv_oldest_version,
        )
        return KvPayload(header, kv.astype("<f4", copy=False).data.cast("B") if count else b"")

    def lease_kv(self, transfer_id: str) -> KvReference:
        raise no_connector()

    def release_kv(self, transfer_id: str) -> bool:
        entry = self._transfers.pop(transfer_id, None)
        if entry is None:
            return False
        entry[1].cancel()
        del self._prefills[transfer_id]
        self._post(lambda: self._core.release_transfer(transfer_id))
        return True

    # --- Decode --------------------------------------------------------------------------------------

    def decode(self, request: DecodeRequest, flush_s: float = 1.0) -> AsyncGenerator[SampleChunk, None]:
        return each_chunk(self.decode_batches(request, flush_s))

    async def decode_batches(
        self, request: DecodeRequest, flush_s: float = 1.0
    ) -> AsyncGenerator[list[SampleChunk], None]:
        self.check(request)
        self._routes.reserve(request.route_keys)
        stream = self._streams[request.request_id] = asyncio.Queue()
        self._post(lambda: self._core.add_decode(request, flush_s))
        ended = False
        try:
            while not ended:
                news = await stream.get()
                chunks, ended = news.chunks, news.ended
                while not stream.empty():
                    news = stream.get_nowait()
                    chunks, ended = chunks + news.chunks, news.ended
                if self._ended.done():
                    raise RequestAborted("the engine has ended")
                if self.silent_s:
                    ended = False  # it is to free what it holds when it goes on
                    raise RequestAborted(f"the engine has not moved for {self._config.silence_s:g} s")
                yield chunks
        finally:
            del self._streams[request.request_id]
            self._routes.unreserve(request.route_keys)
            if not ended:
                self._post(lambda: self._core.abort(request.request_id))

    async def abort(self, request_id: str) -> int:
        ended = await self._call(lambda: self._core.abort(request_id))
        if (entry := self._transfers.pop(request_id, None)) is not None:
            entry[1].cancel()
            del self._prefills[request_id]
        return ended

    def check(self, request: DecodeRequest) -> None:
        check_decode(request, self.version, self.limits, self.capabilities)
        if request.request_id in self._streams:
            raise RequestIdReused("this request is running", request_id=request.request_id)
        if isinstance(request.kv, KvPayload):
            self._check_kv(request.kv, len(request.token_ids) - 1)
        if request.capture_routes:
            self._routes.check(request.request_id, request.route_keys, lambda: prompt_of(request))
        self._check_room()

    def _check_kv(self, kv: KvPayload, token_count: int) -> None:
        sizes = self._core.sizes
        shape = (sizes.n_layers, 2, token_count, sizes.n_kv_heads, sizes.head_dim)
        if kv.header.dtype != "float32" or kv.header.shape != shape:
            raise KvMismatch(f"KV is {kv.header.dtype} {kv.header.shape}, not float32 {shape}", field="shape")
        if memoryview(kv.data).nbytes != token_count * self.limits.kv_bytes_per_token:
            raise KvMismatch("KV bytes do not fill the shape", field="data")

    def _check_room(self) -> None:
        if len(self._core.waiting) + self._inbox.qsize() >= self._config.max_waiting_requests:
            limit = self._config.max_waiting_requests
            raise EngineFull(
                f"{limit} requests wait already: max_waiting_requests", name="max_waiting_requests", limit=limit
            )

    # --- Weights -------------------------------------------------------------------------------------

    async def update(
        self, version: PolicyVersion, tensors: Mapping[str, Any], verify: Callable[[PausedEngine], None]
    ) -> UpdateReport:
        checked = await asyncio.to_thread(check_tensors, tensors, self.shapes)
        self._updating += 1
        try:
            return await self._call(lambda: self._core.update(version, checked, verify))
        finally:
            self._updating -= 1

    async def checksums(self, reduce: Callable[[str, np.ndarray], int]) -> dict[str, int]:
        arrays = self._core.parameters
        return await self._call(lambda: {name: reduce(name, array) for name, array in arrays().items()})

    async def probe(self, token_ids: Sequence[int], salt: str = "") -> list[float]:
        check_prompt(token_ids, 0, self.version, self.limits)
        return await self._call(lambda: self._core.probe(token_ids))

    # --- Routes, load, events ------------------------------------------------------------------------

    def routes(self, key: str) -> RouteRows:
        return self._routes.get(key)

    def release_routes(self, key: str) -> bool:
        return self._routes.release(key)

    def end_salt(self, salt: str) -> None:
        for transfer_id in [held for held in self._transfers if self._prefills[held][0].salt == salt]:
            self.release_kv(transfer_id)  # nobody comes for it any more
        self._post(lambda: self._core.blocks.end_salt(salt))

    def load(self) -> EngineLoad:
        core = self._core
        return EngineLoad(
            running_samples=core.batch.count,
            waiting_requests=len(core.waiting) + len(core.partial) + (core.unfinished is not None),
            tokens_in_flight=core.batch.token_count,
            blocks_used=core.blocks.used,
            blocks_total=core.blocks.block_count,
            prefix_hit_tokens=core.prefix_hit_tokens,
            prefix_query_tokens=core.prefix_query_tokens,
            prefilled_tokens=core.prefilled_tokens,
            decoded_tokens=core.decoded_tokens,
            decode_steps=core.decode_steps,
            route_bytes=self._routes.size_bytes,
            routes_dropped=self._routes.dropped_rows,
            kv_transfers=len(self._transfers),
            dead_kv_bytes=core.blocks.dead_count * self.limits.block_size_tokens * self.limits.kv_bytes_per_token,
        )

    def drain_busy(self) -> list[BusyInterval]:
        return self._core.busy_log.drain(time.time())

    def drain_kv_events(self) -> list[KvEvent]:
        return self._core.blocks.drain_events()
