"""vLLM's `AsyncLLM` behind the engine protocol. It runs its own process; here are the requests, and the updates.

| task | does | waits for | ended by |
|---|---|---|---|
| one for each sample | takes its tokens out of vLLM | vLLM's output | its last token, or an abort |
| watch | ends the worker when vLLM's process is gone | its clock, 5 times a second | `stop` |
| pulse | asks vLLM's workers for a sign of life | their answer, which may never come | `stop` |
"""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from slipstream.api.broadcast.v1 import broadcast_pb2
from slipstream.common.errors import (
    EngineFull,
    KvTransferFailed,
    NoWeights,
    RequestAborted,
    RequestIdReused,
    SlipstreamError,
    Unsupported,
)
from slipstream.common.version import PolicyVersion
from slipstream.engine.base import (
    BusyInterval,
    DecodeRequest,
    EngineCapabilities,
    EngineLimits,
    EngineLoad,
    FinishReason,
    JointVerify,
    KvEvent,
    KvPayload,
    KvReference,
    PausedEngine,
    PrefillRequest,
    PrefillResult,
    SampleChunk,
    UpdateReport,
    each_chunk,
)
from slipstream.engine.checks import check_decode, check_prefill, check_prompt, no_connector, no_frames
from slipstream.engine.hashing import prompt_of
from slipstream.engine.pulse import Pulse
from slipstream.engine.routes import RouteRows, RouteStore
from slipstream.engine.vllm.calls import CoreEnded, death_of, told_of_death
from slipstream.engine.vllm.config import VllmConfig, kv_bytes_per_token
from slipstream.engine.vllm.connector import Connector, load_params
from slipstream.engine.vllm.counters import Counters
from slipstream.engine.vllm.direct import Direct, DirectSamples
from slipstream.engine.vllm.offload.front import Offload
from slipstream.engine.vllm.packing import unpack_what_comes
from slipstream.engine.vllm.parallel import DataParallelRank
from slipstream.engine.vllm.prefills import Prefills
from slipstream.engine.vllm.prompts import prompt_logprobs, prompt_parameters
from slipstream.engine.vllm.rows import ROWS_FROM, recomputed_from, routes_of
from slipstream.engine.vllm.salts import SaltVersions
from slipstream.engine.vllm.samples import GREEDY_BELOW, OpenRequest, Sample, sample_seed
from slipstream.models.base import Sizes
from slipstream.weights.manifest import Manifest
from slipstream.weights.straight.received import Received

WATCH_INTERVAL_S = 0.2
ABORT_TIMEOUT_S = 10.0
FORGET_TIMEOUT_S = 60.0
SHUTDOWN_TIMEOUT_S = 10.0
REPORT_INTERVAL_S = 0.1
"""A report may have been given while a step was under way, after which no other came."""

_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class VllmEngine:
    """One vLLM engine, one rank. See `slipstream.engine.base.Engine`."""

    def __init__(
        self,
        model_dir: Path,
        sizes: Sizes,
        config: VllmConfig,
        run_id: str = "",
        rank: DataParallelRank | None = None,
    ) -> None:
        """`rank`: in a data-parallel group, whose ranks start, pause, swap and resume together."""
        self._model_dir = model_dir
        self._sizes = sizes
        self._config = config
        self._rank = rank
        self._direct = DirectSamples()
        self._counters = Counters(self._direct)
        self._routes = RouteStore(config.route_bytes)
        self._salts = SaltVersions(2 * config.block_count)
        self._offload = Offload(config.offload, run_id)
        self._open: dict[str, OpenRequest] = {}
        self._connector = Connector(config)
        self._prefills = Prefills(
            config, self._connector, self._salts, self._offload, self._count_prompt, self._keep_prompt_routes
        )
        self._swapping = asyncio.Lock()
        self._pulse = Pulse(self._sign, config.silence_s, self._swapping.locked, self._silent)
        self._version: PolicyVersion | None = None
        self._update_task: asyncio.Task[UpdateReport] | None = None
        self._forgetting: set[asyncio.Task[None]] = set()
        self._report_number = 0
        self._llm: Any = None
        self.limits = EngineLimits(
            block_size_tokens=config.block_size_tokens,
            block_count=config.block_count,
            max_context_tokens=sizes.max_context_tokens,
            max_running_samples=config.max_running_samples,
            max_waiting_requests=config.max_waiting_requests,
            kv_bytes_per_token=kv_bytes_per_token(sizes, config.dtype),
            moe_layers=sizes.moe_layers,
            top_k=sizes.top_k,
            expert_count=sizes.n_experts,
            vocab_size=sizes.vocab_size,
        )
        self.capabilities = EngineCapabilities(
            captures_routes=config.capture_routes,
            prefills=config.connector != "none",
            kv_transports=() if config.connector == "none" else (config.connector,),
            truncates_sampling=False,
            chunked_prefill=True,
            preempts=True,
            steps_in_group=rank is not None,
        )
        if (config.block_count - 1) * config.block_size_tokens < 2 * (sizes.max_context_tokens + 1):
            raise ValueError("block_count must hold two whole contexts, and the one block vLLM keeps for itself")

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._swapper.shapes

    @property
    def version(self) -> PolicyVersion | None:
        return self._version

    # --- Life ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start vLLM; the event loop stands still meanwhile, as nothing is served yet."""
        from slipstream.engine.vllm.launch import launch
        from slipstream.engine.vllm.process import SocketDirectory
        from slipstream.engine.vllm.starting import answered
        from slipstream.engine.vllm.updates import Swapper

        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sockets = SocketDirectory()
        self._offload.start()
        files = self._sockets.path
        try:
            self._llm = launch(
                self._model_dir, self._sizes, self._config, self._counters, files, self._connector, self._rank
            )
        except BaseException:
            self._sockets.close()
            self._offload.stop()
            raise
        unpack_what_comes(self._llm.engine_core, self._direct)
        self._swapper = Swapper(self._sizes, self._config, self._llm.collective_rpc, self._probe_paused)
        self._prefills.start(self._llm)
        self._watching = asyncio.create_task(self._watch())
        self._feeling = asyncio.create_task(self._pulse.run())
        try:
            began = self._llm.collective_rpc("slipstream_start", args=(os.getpid(),))
            await answered(began, self._config.start_timeout_s)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        for task in (self._watching, self._feeling, *self._forgetting):
            task.cancel()
        if self._update_task is not None:
            await asyncio.wait((self._update_task,))
        for request_id in list(self._open):
            await self.abort(request_id)
        if not self._llm.errored:
            with suppress(CoreEnded):
                await self._prefills.stop()
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # before its other end goes, which it would report as a failure
        await asyncio.to_thread(self._llm.shutdown, SHUTDOWN_TIMEOUT_S)
        await asyncio.sleep(0)  # sockets close on the loop; vLLM leaves their context open
        self._llm.engine_core.resources.ctx.destroy(linger=0)
        self._swapper.close()
        self._sockets.close()
        self._offload.stop()
        if not self._ended.done():
            self._ended.set_result(None)

    async def wait(self) -> None:
        """Return when the engine was stopped; raise what ended its process otherwise."""
        await asyncio.shield(self._ended)

    async def _watch(self) -> None:
        while not self._llm.errored:  # noqa: ASYNC110 vLLM tells by no event
            await asyncio.sleep(WATCH_INTERVAL_S)
        self._end(CoreEnded(death_of(self._llm)))

    @property
    def silent_s(self) -> float:
        return self._pulse.silent_s

    async def _sign(self) -> None:
        """Through vLLM's loop to all of its workers, and back."""
        await self._llm.collective_rpc("slipstream_alive")

    def _silent(self) -> None:
        """Nobody waits for what stands still; it hears of the aborts when it goes on."""
        for open_request in self._open.values():
            open_request.error = RequestAborted(f"vLLM has not moved for {self._config.silence_s:g} s")
            open_request.wake(flush=False)

    def _end(self, error: Exception) -> None:
        """Nothing can run any more: tell `wait` and every caller."""
        if self._ended.done():
            return
        self._ended.set_exception(error)
        self._ended.exception()  # seen: `wait` raises it, if anyone waits
        for open_request in self._open.values():
            open_request.error = RequestAborted(f"the engine has ended: {error}")
            open_request.wake(flush=False)
        self._prefills.fail(RequestAborted(f"the engine has ended: {error}"))

    # --- Prefill and KV ------------------------------------------------------------------------------

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        check_prefill(request, self._version, self.limits, self.capabilities)
        if request.capture_routes and not self._prefills.has(request.request_id):
            self._routes.check(request.request_id, (), lambda: prompt_of(request))
        return await self._prefills.run(request, self._waiting)

    def export_kv(self, transfer_id: str) -> KvPayload:
        raise no_frames()

    def lease_kv(self, transfer_id: str) -> KvReference:
        if not self.capabilities.prefills:
            raise no_connector()
        return self._prefills.lease(transfer_id)

    def release_kv(self, transfer_id: str) -> bool:
        return self._prefills.release(transfer_id)

    # --- Decode --------------------------------------------------------------------------------------

    def decode(self, request: DecodeRequest, flush_s: float = 1.0) -> AsyncGenerator[SampleChunk, None]:
        return each_chunk(self.decode_batches(request, flush_s))

    async def decode_batches(
        self, request: DecodeRequest, flush_s: float = 1.0
    ) -> AsyncGenerator[list[SampleChunk], None]:
        self.check(request)
        assert self._version is not None
        transfer = load_params(request.kv, self._config.transfer_timeout_s)
        open_request = OpenRequest(request, self._version, flush_s, transfer)
        self._open[request.request_id] = open_request
        self._routes.reserve(request.route_keys)
        oldest = request.kv.oldest_version if isinstance(request.kv, KvReference) else self._version
        oldest = min(oldest, self._version)
        self._salts.use(request.salt, oldest)
        self._offload.use(request.salt, oldest)
        for sample in open_request.samples:
            sample.task = asyncio.create_task(self._run(open_request, sample))
        try:
            while chunks := await open_request.next_chunks():
                yield chunks
        finally:
            if self._open.get(request.request_id) is open_request:
                del self._open[request.request_id]
            self._routes.unreserve(request.route_keys)
            await self._abort_samples(open_request)

    async def _run(self, open_request: OpenRequest, sample: Sample) -> None:
        """Take one sample's tokens out of vLLM."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        request, sampling = open_request.request, open_request.request.sampling
        if open_request.transfer and sample.index > 0:
            await open_request.prompt_ready.wait()  # one transfer; the others find it in the prefix cache
            if open_request.error is not None or sample.aborted:
                sample.finish_reason = "aborted"
                open_request.wake(flush=False)
                return
        parameters = SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=0.0 if sampling.temperature < GREEDY_BELOW else 1.0,
            seed=sample_seed(sampling.seed, request.draw_index(sample.index)),
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.DELTA,
            extra_args=self._offload.extra_args(request.salt),
        )
        if open_request.transfer and sample.index == 0:
            parameters.extra_args = self._offload.extra_args(request.salt, open_request.transfer)
        elif request.capture_routes and request.kv is None:  # else they are where the prompt was computed
            parameters.extra_args = (parameters.extra_args or {}) | {ROWS_FROM: request.first_route_position}
        if sampling.temperature >= GREEDY_BELOW:
            parameters.temperature = sampling.temperature  # vLLM rounds what is below 0.01 up, when it is built
        prompt = {"prompt_token_ids": list(request.token_ids), "cache_salt": request.salt}
        try:
            collector = await self._llm.add_request(f"{request.request_id}/{sample.index}", prompt, parameters)
            sample.vllm_id = collector.request_id
            if sample.aborted:  # before vLLM had it
                await self._llm.abort(sample.vllm_id, internal=True)
            while not sample.finish_reason:
                begun = bool(sample.token_ids)
                self._take(open_request, sample, collector.get_nowait() or await collector.get())
                if sample.token_ids and not begun and not sample.finish_reason:
                    self._take_directly(sample, collector)
        except SlipstreamError as error:
            open_request.error = error
        except Exception as error:
            open_request.error = RequestAborted(f"vLLM ended the request: {type(error).__name__}: {error}")
        finally:
            self._direct.settle(sample.vllm_id)
        open_request.prompt_ready.set()
        open_request.wake(flush=False)

    def _take(self, open_request: OpenRequest, sample: Sample, output: Any) -> None:
        assert self._version is not None
        (news,) = output.outputs
        if output.finished and news.finish_reason == "error":
            raise self._error_of(open_request.request)
        if news.token_ids and not sample.token_ids:
            sample.cached_token_count = min(output.num_cached_tokens or 0, len(open_request.request.token_ids) - 1)
            if not open_request.counted:  # once: vLLM computes the end of it anew for each further sample
                open_request.counted = True
                request = open_request.request
                self._count_prompt(len(request.token_ids) - 1, sample.cached_token_count)
            open_request.prompt_ready.set()
            open_request.begin(sample, self._oldest(open_request.request.salt))
        if news.token_ids:
            sample.add(news.token_ids, news.logprobs.logprobs)  # flat: none but the sampled is asked for
        if output.finished:
            if news.routed_experts is not None and open_request.request.capture_routes:
                self._keep_routes(open_request.request, sample, news.routed_experts, recomputed_from(output))
            sample.finish_reason = _FINISH.get(news.finish_reason, "aborted")
            open_request.wake(flush=False)

    def _take_directly(self, sample: Sample, collector: Any) -> None:
        """What comes from now on, but for the end."""
        state = self._llm.output_processor.request_states.get(sample.vllm_id)
        if state is not None:
            self._direct.add(sample.vllm_id, Direct(sample, state, collector))

    def _oldest(self, salt: str) -> PolicyVersion:
        """Of any KV under a salt, that of other workers included."""
        return self._offload.oldest_of(salt, self._salts.oldest(salt))

    def _error_of(self, request: DecodeRequest) -> SlipstreamError:
        if isinstance(request.kv, KvReference):
            return KvTransferFailed(
                f"KV of {request.kv.transfer_id} from {request.kv.address} did not come", address=request.kv.address
            )
        return RequestAborted("vLLM ended the request with an error")

    def _count_prompt(self, count: int, cached_count: int) -> None:
        """Count a prompt of as many positions whose KV is needed, and as many found."""
        self._counters.prefix_query_tokens += count
        self._counters.prefix_hit_tokens += cached_count
        self._counters.prefilled_tokens += count - cached_count

    def _keep_routes(
        self, request: DecodeRequest, sample: Sample, rows: np.ndarray, recomputed_from: int | None
    ) -> None:
        """Rows of the prompt but its last token go under the request, the rest under the sample.

        What a preempted sample computed once more has the rows of the first time.
        """
        first = len(request.token_ids) - 1
        if len(rows) != first + len(sample.token_ids):  # whose they are is not known
            self._routes.dropped_rows += first + len(sample.token_ids)
            return
        if request.kv is None:  # else they are where the prompt was computed
            self._keep_prompt_routes(request, rows[:first])
        own = routes_of(rows[first:], first, self.limits.route_dtype, self._sizes.moe_layers)
        own = replace(own, recomputed_from=recomputed_from)
        self._routes.put(request.sample_ids[sample.index], own)

    def _keep_prompt_routes(self, request: PrefillRequest | DecodeRequest, rows: np.ndarray) -> None:
        told = min(request.first_route_position, len(rows))
        routes = routes_of(rows[told:], told, self.limits.route_dtype, self._sizes.moe_layers)
        self._routes.put_prompt(request.request_id, routes, prompt_of(request))

    async def abort(self, request_id: str) -> int:
        await asyncio.sleep(0)  # an id that is unknown must not keep the loop to its caller
        open_request = self._open.pop(request_id, None)
        if open_request is not None:
            return await self._abort_samples(open_request)
        ended = await self._prefills.abort(request_id)
        if ended:
            await self._settle()
        return ended

    async def _abort_samples(self, open_request: OpenRequest) -> int:
        """End what runs; returns how many, once vLLM has freed their blocks."""
        samples = open_request.unfinished
        tasks = [sample.task for sample in samples if sample.task is not None]
        if not tasks or self._llm.errored or self._ended.done():
            return 0
        for sample in samples:
            sample.aborted = True
        open_request.prompt_ready.set()
        for sample in samples:
            self._direct.settle(sample.vllm_id)
        await self._llm.abort([sample.vllm_id for sample in samples if sample.vllm_id], internal=True)
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            await asyncio.wait(tasks)  # vLLM answers with what there is
        if not self.silent_s:
            await self._settle()
        return sum(sample.finish_reason == "aborted" for sample in samples)

    @property
    def _waiting(self) -> int:
        """Requests without a token: those that wait, and those whose prompts are computed now."""
        return sum(open_request.waiting for open_request in self._open.values()) + self._prefills.running_count

    async def _settle(self) -> None:
        """Return when all that was sent to vLLM has been taken in, and the counters are those of after it."""
        self._report_number += 1
        number = self._report_number
        with suppress(CoreEnded):  # nothing is left to settle then
            await self._reported(number)

    async def _reported(self, number: int) -> None:
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            while True:
                await self._llm.engine_core.call_utility_async("slipstream_report", number)
                with suppress(TimeoutError):
                    async with asyncio.timeout(REPORT_INTERVAL_S):
                        while self._counters.cache.report_number < number:
                            await self._counters.next_record()
                        return

    def check(self, request: DecodeRequest) -> None:
        check_decode(request, self._version, self.limits, self.capabilities)
        if request.request_id in self._open:
            raise RequestIdReused("this request is running", request_id=request.request_id)
        if request.capture_routes:
            self._routes.check(request.request_id, request.route_keys, lambda: prompt_of(request))
        limit = self._config.max_waiting_requests
        if self._waiting >= limit:
            raise EngineFull(
                f"{limit} requests wait already: max_waiting_requests", name="max_waiting_requests", limit=limit
            )

    # --- Weights -------------------------------------------------------------------------------------

    async def check_room(self, transport: str) -> None:
        await self._swapper.check_room(transport)

    async def receive(
        self, manifest: Manifest, loans: Sequence[broadcast_pb2.BorrowShardResponse], reader: str, deadline_s: float
    ) -> Received:
        """Read a version straight from those who lend it, in vLLM's own process (`weights/straight/transport.py`)."""
        offers = [loan.SerializeToString() for loan in loans]
        return await self._swapper.receive(manifest, offers, reader, max(deadline_s - time.monotonic(), 0.0))

    async def update(
        self, version: PolicyVersion, tensors: Mapping[str, Any] | Received, verify: Callable[[PausedEngine], None]
    ) -> UpdateReport:
        # A swap runs to its end even if its caller goes away: half of one is no model.
        self._update_task = asyncio.create_task(self._update(version, tensors, verify))
        return await asyncio.shield(self._update_task)

    async def _update(
        self, version: PolicyVersion, tensors: Mapping[str, Any] | Received, verify: Callable[[PausedEngine], None]
    ) -> UpdateReport:
        from slipstream.engine.vllm.updates import WeightsLost

        async with self._swapping:
            began_s = time.monotonic()
            arena = await self._swapper.prepare(tensors)
            joint = verify if isinstance(verify, JointVerify) else None
            if joint is not None:
                try:
                    await asyncio.to_thread(joint.prepared)
                except BaseException:
                    self._swapper.give_back(arena)
                    raise
            previous, started_s = self._version, time.monotonic()
            async with self._paused():
                try:
                    counts, apply_s = await self._swapper.swap(arena, tensors, verify)
                except WeightsLost as error:
                    self._end(error)
                    raise
                except Exception as error:
                    if joint is not None:  # before the resume, which waits for the other ranks
                        await asyncio.to_thread(joint.failed, error)
                    raise
                in_flight = self._mark_swap(counts, version)
                self._prefills.swapped(counts, version)
                self._version = version
            return UpdateReport(
                version,
                previous,
                time.monotonic() - started_s,
                apply_s,
                in_flight,
                tensors.transfer_s if isinstance(tensors, Received) else started_s - began_s,
                self._swapper.size_bytes,
            )

    def _mark_swap(self, counts: dict[str, int], version: PolicyVersion) -> int:
        """Note in every open sample where its new weights begin; returns how many have tokens or KV of old ones."""
        crossed = 0
        for open_request in self._open.values():
            for sample in open_request.unfinished:
                sampled_count = counts.get(sample.vllm_id)
                if sampled_count is None and sample.token_ids:  # preempted: vLLM's worker has forgotten it
                    sampled_count = len(sample.token_ids)
                sample.swapped(sampled_count, version)
                crossed += sampled_count is not None
            open_request.wake(flush=True)
        return crossed

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """No step runs within; requests stay where they are, with their KV."""
        async with asyncio.timeout(self._config.update_timeout_s):
            # As `pause_generation` does it, which then sleeps for 20 ms: tokens on their way may come in the pause.
            await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        try:
            yield
        finally:
            if not self._ended.done():
                async with asyncio.timeout(self._config.update_timeout_s):
                    await self._llm.resume_generation()

    async def checksums(self, reduce: Callable[[str, np.ndarray], int]) -> dict[str, int]:
        if self._rank is not None:
            raise Unsupported("a rank of a group does not pause alone", method="checksums", capability="steps_in_group")
        async with self._swapping:
            if self._version is None:
                raise NoWeights("the engine has no weights yet")
            async with self._paused():
                live = await self._swapper.read_back()
        return await asyncio.to_thread(lambda: {name: reduce(name, array) for name, array in live.items()})

    async def quantised(self) -> tuple[dict[str, str], dict[str, float]]:
        """Layers that are quantised, by what; and how far each is from what was applied, as a part of that."""
        async with self._swapping, self._paused():
            return await self._swapper.quantised()

    async def probe(self, token_ids: Sequence[int], salt: str = "") -> list[float]:
        check_prompt(token_ids, 0, self._version, self.limits)
        return await self._probe(token_ids, f"probe/{uuid4().hex}")

    async def _probe_paused(self, token_ids: Sequence[int]) -> list[float]:
        from slipstream.engine.vllm.scheduler import PROBE_PREFIX

        return await self._probe(token_ids, f"{PROBE_PREFIX}{uuid4().hex}")

    async def _probe(self, token_ids: Sequence[int], request_id: str) -> list[float]:
        parameters = prompt_parameters(self._offload.none_args(), logprobs=True)
        prompt = {"prompt_token_ids": list(token_ids), "cache_salt": request_id}
        try:
            with told_of_death(self._llm):
                async for output in self._llm.generate(prompt, parameters, request_id):
                    return prompt_logprobs(output, len(token_ids))
        finally:
            self.end_salt(request_id)
        raise RequestAborted("vLLM gave no answer to a probe")

    # --- Routes, load, events ------------------------------------------------------------------------

    def routes(self, key: str) -> RouteRows:
        return self._routes.get(key)

    def release_routes(self, key: str) -> bool:
        return self._routes.release(key)

    def end_salt(self, salt: str) -> None:
        if self._ended.done():
            return
        forgetting = asyncio.create_task(self._forget(salt))
        self._forgetting.add(forgetting)
        forgetting.add_done_callback(self._forgetting.discard)

    async def _forget(self, salt: str) -> None:
        """Let the scheduler evict what is cached under a salt."""
        with suppress(CoreEnded, TimeoutError):  # `wait` tells of an engine that ended or hangs
            async with asyncio.timeout(FORGET_TIMEOUT_S):
                await self._llm.engine_core.call_utility_async("slipstream_end_salt", salt)
        await self._offload.end(salt)

    def load(self) -> EngineLoad:
        counters = self._counters
        return EngineLoad(
            running_samples=counters.running,
            waiting_requests=min(self._waiting, counters.waiting),
            tokens_in_flight=sum(open_request.token_count for open_request in self._open.values()),
            blocks_used=round(counters.kv_usage * (self.limits.block_count - 1)),
            blocks_total=self.limits.block_count,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            prefix_query_tokens=counters.prefix_query_tokens,
            prefilled_tokens=counters.prefilled_tokens,
            decoded_tokens=counters.decoded_tokens,
            decode_steps=counters.decode_steps,
            preemptions=counters.preemptions,
            route_bytes=self._routes.size_bytes,
            routes_dropped=self._routes.dropped_rows,
            dead_kv_bytes=counters.cache.dead_blocks * self.limits.block_size_tokens * self.limits.kv_bytes_per_token,
            kv_transfers=self._prefills.held_count,
            offload=self._offload.load(counters.offload),
        )

    def drain_busy(self) -> list[BusyInterval]:
        return self._counters.busy_log.drain(time.time())

    def drain_kv_events(self) -> list[KvEvent]:
        return self._counters.cache.drain_events()
