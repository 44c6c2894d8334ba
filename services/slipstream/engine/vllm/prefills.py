"""Prompts that vLLM computes for a decode engine, and holds until that has read them.

| task | does | waits for | ended by |
|---|---|---|---|
| one for each prefill | takes its outcome out of vLLM | vLLM's output | its end, or an abort |
"""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slipstream.common.errors import EngineFull, KvUnknown, RequestAborted, RequestIdReused
from slipstream.common.version import PolicyVersion
from slipstream.engine.base import KvReference, PrefillRequest, PrefillResult
from slipstream.engine.hashing import prompt_of
from slipstream.engine.vllm.calls import CoreEnded
from slipstream.engine.vllm.config import VllmConfig
from slipstream.engine.vllm.connector import Connector
from slipstream.engine.vllm.offload.front import Offload
from slipstream.engine.vllm.prompts import prompt_parameters
from slipstream.engine.vllm.rows import ROWS_FROM
from slipstream.engine.vllm.salts import SaltVersions

RELEASE_PAUSE_S = 0.01
OnRows = Callable[[PrefillRequest, np.ndarray], None]
OnPrompt = Callable[[int, int], None]


@dataclass(eq=False)
class _Prefill:
    """One prompt, from its call until its KV is given up."""

    request: PrefillRequest
    future: asyncio.Future[PrefillResult]
    oldest: PolicyVersion
    """Of the weights that compute it."""
    vllm_id: str = ""
    """Set once vLLM has it."""
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    """Frees what nobody took."""
    aborted: bool = False
    leased: bool = False


class Prefills:
    """Running and held ones of one engine."""

    def __init__(
        self,
        config: VllmConfig,
        connector: Connector,
        salts: SaltVersions,
        offload: Offload,
        on_prompt: OnPrompt,
        on_rows: OnRows,
    ) -> None:
        self._config = config
        self._connector = connector
        self._salts = salts
        self._offload = offload
        self._on_prompt = on_prompt
        self._on_rows = on_rows
        self._entries: dict[str, _Prefill] = {}
        self._releases: set[asyncio.Task[None]] = set()
        self.version: PolicyVersion | None = None
        """Kept by the engine: what prompts are computed with now."""

    def start(self, llm: Any) -> None:
        self._llm = llm
        self._loop = asyncio.get_running_loop()

    @property
    def running_count(self) -> int:
        return sum(not entry.future.done() for entry in self._entries.values())

    @property
    def held_count(self) -> int:
        """Those computed and not given up, and those about to be given up."""
        return len(self._entries) - self.running_count + len(self._releases)

    def has(self, request_id: str) -> bool:
        """Whether it runs or is held."""
        return request_id in self._entries

    async def run(self, request: PrefillRequest, waiting_count: int) -> PrefillResult:
        """Compute a prompt's KV. A repeat of a request that is running or held answers the same."""
        entry = self._entries.get(request.request_id)
        if entry is None:
            limit = self._config.max_waiting_requests
            if waiting_count >= limit:
                raise EngineFull(
                    f"{limit} requests wait: max_waiting_requests", name="max_waiting_requests", limit=limit
                )
            assert self.version is not None
            entry = _Prefill(request, self._loop.create_future(), self.version)
            self._entries[request.request_id] = entry
            self._salts.use(request.salt, self.version)
            self._offload.use(request.salt, self.version)
            entry.task = self._loop.create_task(self._compute(entry))
        if entry.request != request:
            raise RequestIdReused("this request_id came with another prompt before", request_id=request.request_id)
        return await asyncio.shield(entry.future)

    def swapped(self, counts: dict[str, int], version: PolicyVersion) -> None:
        """Weights changed; `counts` has the requests that were begun."""
        self.version = version
        for entry in self._entries.values():
            if not entry.future.done() and entry.vllm_id not in counts:
                entry.oldest = version

    def lease(self, transfer_id: str) -> KvReference:
        entry = self._entries.get(transfer_id)
        if entry is None or not entry.future.done():
            raise KvUnknown("released, expired, or never held", transfer_id=transfer_id)
        if entry.leased:
            raise KvUnknown("another takes it already", transfer_id=transfer_id)
        entry.leased = True
        self._expire_later(entry)
        reference = entry.future.result().reference
        assert reference is not None
        return replace(reference, lease_s=self._config.transfer_ttl_s)

    def release(self, transfer_id: str) -> bool:
        """Free a prompt's KV, unless a taker's read freed it already."""
        entry = self._entries.get(transfer_id)
        if entry is None or not entry.future.done():
            return False
        self._drop(entry)
        task = self._loop.create_task(self._free([entry.vllm_id]))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)
        return True

    async def abort(self, request_id: str) -> int:
        """End or give up a prefill; returns 1 once its blocks are free or about to be, 0 if there is none."""
        entry = self._entries.get(request_id)
        if entry is None:
            return 0
        if self.release(request_id):
            await asyncio.gather(*self._releases)
            return 1
        self._drop(entry)
        entry.aborted = True
        entry.future.set_exception(RequestAborted("aborted"))
        entry.future.exception()  # seen, even if the caller is gone
        if entry.vllm_id:
            await self._llm.abort([entry.vllm_id], internal=True)
        assert entry.task is not None
        await asyncio.wait((entry.task,))
        # It may have come to its end before vLLM heard of the abort: then its KV is held, and nobody was told.
        if held := await self._llm.engine_core.call_utility_async("slipstream_held", [entry.vllm_id]):
            await self._free(held)
        return 1

    async def stop(self) -> None:
        """Give everything up: before vLLM ends."""
        for request_id in list(self._entries):
            await self.abort(request_id)

    def fail(self, error: Exception) -> None:
        """vLLM is gone."""
        for entry in list(self._entries.values()):
            self._drop(entry)
            if not entry.future.done():
                entry.future.set_exception(error)
                entry.future.exception()

    async def _compute(self, entry: _Prefill) -> None:
        request, held = entry.request, self._connector.hold()
        arguments = self._offload.extra_args(request.salt, held)
        if request.capture_routes:
            arguments = (arguments or {}) | {ROWS_FROM: request.first_route_position}
        parameters = prompt_parameters(arguments, logprobs=False)
        prompt = {"prompt_token_ids": list(request.token_ids), "cache_salt": request.salt}
        output: Any = None
        try:
            collector = await self._llm.add_request(f"prefill/{request.request_id}", prompt, parameters)
            entry.vllm_id = collector.request_id
            if entry.aborted:  # before vLLM had it
                await self._llm.abort([entry.vllm_id], internal=True)
            while output is None or not output.finished:
                output = collector.get_nowait() or await collector.get()
        except Exception as error:
            self._fail(entry, f"vLLM ended the request: {type(error).__name__}: {error}")
            return
        if output.outputs[0].finish_reason != "length":
            self._fail(entry, f"vLLM ended the request: {output.outputs[0].finish_reason}")
        elif entry.future.done():  # aborted while it ended by itself
            await self._free([entry.vllm_id])
        else:
            self._finish(entry, output, self._connector.take(held, output.kv_transfer_params))

    def _fail(self, entry: _Prefill, message: str) -> None:
        if not entry.future.done():
            self._drop(entry)
            entry.future.set_exception(RequestAborted(message))
            entry.future.exception()

    def _finish(self, entry: _Prefill, output: Any, params: bytes) -> None:
        assert self.version is not None
        request, count = entry.request, len(entry.request.token_ids) - 1
        cached = min(output.num_cached_tokens or 0, count)
        oldest = entry.oldest
        if cached:
            oldest = min(oldest, self._offload.oldest_of(request.salt, self._salts.oldest(request.salt)))
        self._on_prompt(count, cached)
        rows = output.outputs[0].routed_experts
        if request.capture_routes and rows is not None and len(rows) == count + 1:
            self._on_rows(request, rows[:count])
        reference = KvReference(
            transport=self._config.connector,
            params=params,
            transfer_id=request.request_id,
            token_count=count,
            salt=request.salt,
            prompt_hash=prompt_of(request),
            version=self.version,
            oldest_version=oldest,
        )
        self._expire_later(entry)
        entry.future.set_result(
            PrefillResult(request.request_id, count, cached, self.version, oldest, reference=reference)
        )

    def _expire_later(self, entry: _Prefill) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
        request_id = entry.request.request_id
        entry.timer = self._loop.call_later(self._config.transfer_ttl_s, self.release, request_id)

    def _drop(self, entry: _Prefill) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
        del self._entries[entry.request.request_id]

    async def _free(self, vllm_ids: Sequence[str]) -> None:
        """Tell vLLM's connector that nobody will read these any more."""
        with suppress(CoreEnded):  # it is free then
            await self._freed(set(vllm_ids))

    async def _freed(self, left: set[str]) -> None:
        async with asyncio.timeout(self._config.update_timeout_s):
            while left:
                answers = await self._llm.collective_rpc("slipstream_release_kv", args=(list(left),))
                left = {request_id for answer in answers for request_id in answer}
                await asyncio.sleep(RELEASE_PAUSE_S if left else 0)
