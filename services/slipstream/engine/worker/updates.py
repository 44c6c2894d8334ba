"""A worker's weights: which it serves, and the one update that may be open at a time.

    STARTING --refit--> SERVING --begin, apply--> SERVING at the new version
                           |                         |
                           +--- failed check --------+--> STALE (old weights kept, unroutable) --begin, apply--> SERVING

An update is opened by a holder under a lease. Before the swap a lease that runs out drops it and the old version goes
on; after a verified swap it closes by itself. The swap runs to its end even if its caller goes away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import structlog

from slipstream.common.errors import (
    GroupVetoed,
    RequestIdReused,
    SlipstreamError,
    UpdateInProgress,
    UpdateNotOpen,
    VersionNotNewer,
    WeightsCorrupt,
    WeightVersionUnknown,
)
from slipstream.common.version import UNSET, PolicyVersion
from slipstream.engine.base import Engine, UpdateReport
from slipstream.engine.worker.ballot import Voice
from slipstream.engine.worker.verification import Verification
from slipstream.weights.adapter import Adapter, base_part, is_base, merge
from slipstream.weights.manifest import Manifest, check_model
from slipstream.weights.straight.received import Received
from slipstream.weights.transport import WeightTransport

log = structlog.get_logger()

RECONNECT_S = 0.5
REFIT_LEASE_S = 120.0


class WorkerState(Enum):
    """Whether the weights can be used."""

    STARTING = "starting"
    SERVING = "serving"
    STALE = "stale"


@dataclass(frozen=True)
class Weights:
    """A version in host memory, its bytes checked."""

    manifest: Manifest
    tensors: dict[str, Any] | Received
    """`Received`: in the engine's own memory, which `release` gives back."""
    fetched_bytes: int

    def release(self) -> None:
        """Nobody will apply them."""
        if isinstance(self.tensors, Received):
            self.tensors.release()


@dataclass(frozen=True)
class Applied:
    """A verified swap."""

    report: UpdateReport
    verify_s: float
    verified_slice_count: int
    probe_max_abs_error: float


@dataclass
class OpenUpdate:
    """An update epoch."""

    update_id: str
    holder: str
    version: PolicyVersion
    ttl_s: float
    expires_s: float = 0.0
    calls: int = 0
    weights: Weights | None = None
    fetched_bytes: int = 0
    swap: asyncio.Task[Applied] | None = None
    applied: Applied | None = None


class WorkerUpdates:
    """Owns `state` and the engine's version; nobody else calls `engine.update`."""

    def __init__(
        self,
        engine: Engine,
        transport: WeightTransport,
        replica: str,
        serving_version: Callable[[], Awaitable[PolicyVersion]],
        clock: Callable[[], float] = time.monotonic,
        refits: bool = True,
    ) -> None:
        """`refits`: load weights at start without being told; ranks that step together cannot, each by itself."""
        self._engine = engine
        self._transport = transport
        self._replica = replica
        self._serving_version = serving_version
        self._clock = clock
        self._refits = refits
        self._open: OpenUpdate | None = None
        self._closed: OpenUpdate | None = None
        self._prefetched: Weights | None = None
        self._fetched: list[Weights] = []
        """All that was fetched and not released."""
        self._base: Weights | None = None
        """What adapters are added to."""
        self._fetching = asyncio.Lock()
        self._refitting = asyncio.Lock()
        self._changed = asyncio.Event()
        self.state = WorkerState.STARTING
        self.stale_reason = ""
        self.on_applied: Callable[[PolicyVersion, Applied], None] = lambda version, applied: None

    @property
    def version(self) -> PolicyVersion:
        """What the engine holds, `UNSET` before its first weights."""
        return self._engine.version or UNSET

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change of state or version; take it anew each time."""
        return self._changed

    # --- The calls of WorkerService ------------------------------------------------------------------

    async def begin(self, update_id: str, holder: str, version: PolicyVersion, ttl_s: float) -> int:
        """Open an update and have its bytes here, checked. Returns the bytes fetched for it."""
        async with self._refitting:  # at start: a version that comes in by itself needs no update
            return await self._begin(update_id, holder, version, ttl_s)

    async def apply(self, update_id: str, voice: Voice | None = None) -> Applied:
        """Swap and verify, in a group only if all its ranks can. A repeat answers the same."""
        if self._closed is not None and self._closed.update_id == update_id and self._closed.applied:
            return self._closed.applied
        update = self._find(update_id)
        with self._call(update):
            if update.swap is None:
                if update.weights is None:
                    raise UpdateNotOpen("BeginUpdate has not returned yet", update_id=update_id)
                update.swap = asyncio.get_running_loop().create_task(self._swap(update, update.weights, voice))
                update.swap.add_done_callback(_retrieve)
            return await asyncio.shield(update.swap)

    def finish(self, update_id: str) -> None:
        """Close an applied update. A repeat has no effect."""
        if self._closed is not None and self._closed.update_id == update_id:
            return
        update = self._find(update_id)
        if update.applied is None:
            raise UpdateNotOpen("the update is not applied", update_id=update_id)
        self._close(update)

    def abort(self, update_id: str) -> None:
        """Drop an update that was not applied; after the swap began it has no effect."""
        update = self._open
        if update is not None and update.update_id == update_id and update.swap is None:
            log.info("update_aborted", update_id=update_id, policy_version=str(update.version))
            self._open = None

    # --- Following the broadcaster -------------------------------------------------------------------

    async def follow(self) -> None:
        """Refit at start, then prefetch each version as it is published, for ever."""
        while True:
            try:
                async for version in self._transport.watch(self._engine.version):
                    await self._published(version)
            except SlipstreamError as error:
                log.debug("broadcaster_away", reason=error.reason, detail=error.message)
            await asyncio.sleep(RECONNECT_S)

    async def _published(self, version: PolicyVersion) -> None:
        try:
            if self._engine.version is None and self._refits:
                await self._refit(version)
            elif version > self.version:
                async with self._fetching:
                    await self._prefetch(version)
        except SlipstreamError as error:
            # Not a verdict: whoever updates this worker fetches again and hears of it.
            log.warning("prefetch_failed", policy_version=str(version), reason=error.reason, detail=error.message)

    async def _refit(self, newest: PolicyVersion) -> None:
        """Load what the run serves, so that KV is never newer than its sampler; the newest where that is unknown."""
        serving = await self._serving_version()
        async with self._refitting:
            if self._engine.version is not None or self._open is not None:
                return
            for version in dict.fromkeys((serving or newest, newest)):
                try:
                    await self._begin("refit", self._replica, version, REFIT_LEASE_S)
                except WeightVersionUnknown:
                    continue
                await self.apply("refit")
                self.finish("refit")
                return

    # --- Inside --------------------------------------------------------------------------------------

    async def _begin(self, update_id: str, holder: str, version: PolicyVersion, ttl_s: float) -> int:
        self._end_expired()
        update = self._open
        if update is not None and (update.holder != holder or (update.swap and not update.swap.done())):
            raise UpdateInProgress(
                f"{update.holder} updates this worker to {update.version}",
                holder=update.holder,
                version=update.version,
                update_id=update.update_id,
            )
        if update is None or update.update_id != update_id:
            if version < self.version or (version == self.version and self.state is not WorkerState.STALE):
                raise VersionNotNewer(f"{self.version} is served", newest=self.version)
            if update is not None and update.applied:
                self._close(update)
            update = self._open = OpenUpdate(update_id, holder, version, ttl_s)
        elif update.version != version:
            raise RequestIdReused(f"this update is to {update.version}", update_id=update_id)
        with self._call(update):
            async with self._fetching:
                if update.weights is None and update.swap is None:
                    await self._obtain(update)
        return update.fetched_bytes

    async def _obtain(self, update: OpenUpdate) -> None:
        try:
            if self._prefetched is None or self._prefetched.manifest.version != update.version:
                await self._prefetch(update.version)
                assert self._prefetched is not None
                update.fetched_bytes = self._prefetched.fetched_bytes
        except SlipstreamError as error:
            self._drop(update)
            if isinstance(error, WeightsCorrupt):
                self._fail(f"weights {update.version}: {error.message}")
            raise
        update.weights = self._prefetched

    async def _prefetch(self, version: PolicyVersion) -> None:
        """Fetch and check a version; only the last one fetched is kept."""
        if self._prefetched is not None and self._prefetched.manifest.version == version:
            return
        manifest = await self._transport.manifest(version)
        if manifest.adapter is not None:
            self._prefetched = await self._adapted(manifest, manifest.adapter)
            return
        check_model(manifest, self._engine.shapes)
        self._prefetched = None  # an engine that receives by itself has room for one that is not in use
        self._release_unused()
        self._prefetched = Weights(manifest, await self._transport.fetch(manifest), manifest.size_bytes)
        self._fetched.append(self._prefetched)
        self._base = None

    async def _adapted(self, manifest: Manifest, adapter: Adapter) -> Weights:
        """An adapter's version as whole weights. Its base stays in memory for the next one."""
        fetched_bytes = manifest.size_bytes
        whole = adapter.base_version == manifest.version
        if whole:
            check_model(base_part(manifest), self._engine.shapes)
        elif self._base is None or self._base.manifest.version != adapter.base_version:
            base = await self._transport.manifest(adapter.base_version)
            check_model(base_part(base), self._engine.shapes)
            self._keep_base(base, await self._transport.fetch(base))
            fetched_bytes += base.size_bytes
        tensors = await self._transport.fetch(manifest)
        if whole:
            self._keep_base(manifest, tensors)
        assert self._base is not None
        assert not isinstance(self._base.tensors, Received)
        merged = await asyncio.to_thread(merge, manifest, tensors, self._base.manifest, self._base.tensors)
        return Weights(*merged, fetched_bytes)

    def _keep_base(self, manifest: Manifest, tensors: dict[str, Any]) -> None:
        weights = {name: tensor for name, tensor in tensors.items() if is_base(name)}
        self._base = Weights(base_part(manifest), weights, 0)

    async def _swap(self, update: OpenUpdate, weights: Weights, voice: Voice | None) -> Applied:
        tensors = weights.tensors
        verification = Verification(weights.manifest, voice, tensors)
        try:
            report = await self._engine.update(update.version, tensors, verification)
        except Exception as error:  # whatever it was: the engine rolled back, and these weights are not to be trusted
            self._drop(update)
            if isinstance(error, GroupVetoed):  # these weights are good, and so are the old ones
                log.warning("update_vetoed", policy_version=str(update.version), detail=error.message)
                raise
            await asyncio.to_thread(verification.failed, error)
            self._forget(update.version)
            self._fail(f"update to {update.version}: {error}")
            if isinstance(error, SlipstreamError):
                raise
            log.error("update_failed", exc_info=error)
            raise WeightsCorrupt(f"weights {update.version} are not the model's", version=update.version) from error
        applied = Applied(report, verification.duration_s, verification.slice_count, verification.probe_max_abs_error)
        update.applied, update.weights = applied, None
        self._forget(update.version)
        self.state, self.stale_reason = WorkerState.SERVING, ""
        self._notify()
        self.on_applied(update.version, applied)
        log.info(
            "weights_applied",
            policy_version=str(update.version),
            pause_ms=round(report.pause_s * 1e3, 2),
            apply_ms=round(report.apply_s * 1e3, 2),
            verify_ms=round(applied.verify_s * 1e3, 2),
            in_flight_samples=report.in_flight_samples,
            probe_max_abs_error=applied.probe_max_abs_error,
        )
        return applied

    def _forget(self, version: PolicyVersion) -> None:
        """Drop prefetched bytes up to `version`; a newer version may be here already."""
        if self._prefetched is not None and self._prefetched.manifest.version <= version:
            self._prefetched = None
        self._release_unused()

    def _release_unused(self) -> None:
        """Give back what neither waits to be applied nor is being applied."""
        used = (self._prefetched, self._open and self._open.weights)
        for weights in self._fetched:
            if not any(weights is each for each in used):
                weights.release()
        self._fetched = [weights for weights in self._fetched if any(weights is each for each in used)]

    def _fail(self, reason: str) -> None:
        self.state, self.stale_reason = WorkerState.STALE, reason
        self._notify()
        log.error("worker_stale", detail=reason, policy_version=str(self.version))

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _find(self, update_id: str) -> OpenUpdate:
        self._end_expired()
        if self._open is None or self._open.update_id != update_id:
            raise UpdateNotOpen("no such update is open; it may have expired", update_id=update_id)
        return self._open

    @contextmanager
    def _call(self, update: OpenUpdate) -> Generator[None, None, None]:
        """A call of an update: its lease does not run out meanwhile and is renewed at the end."""
        update.calls += 1
        try:
            yield
        finally:
            update.calls -= 1
            update.expires_s = self._clock() + update.ttl_s

    def _end_expired(self) -> None:
        update = self._open
        if update is None or update.calls or self._clock() < update.expires_s:
            return
        if update.applied:
            self._close(update)  # a verified swap finishes by itself
        elif update.swap is None or update.swap.done():
            log.warning("update_expired", update_id=update.update_id, holder=update.holder)
            self._drop(update)

    def _close(self, update: OpenUpdate) -> None:
        self._open, self._closed = None, update

    def _drop(self, update: OpenUpdate) -> None:
        if self._open is update:
            self._open = None


def _retrieve(task: asyncio.Task[Applied]) -> None:
    """See a failed swap's exception even when its caller is gone."""
    if not task.cancelled():
        task.exception()
