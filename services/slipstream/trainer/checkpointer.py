"""When checkpoints are written: every so many steps beside the training, or when somebody asks. One at a time.

Copying the state takes the torch thread between two steps; writing the copy takes a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from slipstream.common.errors import CheckpointFailed, Unsupported
from slipstream.common.version import PolicyVersion
from slipstream.trainer import telemetry
from slipstream.trainer.asked_saves import AskedSaves
from slipstream.trainer.checkpoint_store import CheckpointStore, Saved
from slipstream.trainer.config import TrainerConfig
from slipstream.trainer.room import write_when_room
from slipstream.trainer.status import Status
from slipstream.trainer.torch_thread import TorchThread

if TYPE_CHECKING:
    from slipstream.trainer.checkpoint_state import Saving
    from slipstream.trainer.parallel.world import World
    from slipstream.trainer.step import Learner

log = structlog.get_logger()


@dataclass(frozen=True)
class _Made:
    """What a checkpoint would be of now."""

    learner: Learner
    version: PolicyVersion
    figures: dict[str, float]


class Checkpointer:
    """Owns the checkpoints of a run. The training loop says when weights change and what they have become."""

    def __init__(self, config: TrainerConfig, torch: TorchThread, status: Status) -> None:
        self._interval_steps = config.checkpoint.interval_steps
        self._first_incarnation = config.incarnation
        self._store = CheckpointStore(
            config.run_dir / "checkpoints", config.checkpoint.keep_last, config.checkpoint.keep_every_steps
        )
        self._torch = torch
        self._status = status
        self._at_rest = asyncio.Lock()
        self._one = asyncio.Lock()
        self._made: _Made | None = None
        self._begun_step = 0
        self._alone = config.group.rank_count == 1
        self._rank = config.group.rank
        self._asked = AskedSaves()
        self._group: Any = None
        self._grouped = False
        self.durable: PolicyVersion | None = None
        """Of the newest checkpoint that would be resumed from."""

    @property
    def enabled(self) -> bool:
        return self._interval_steps > 0

    @property
    def durable_step(self) -> int | None:
        """Of the newest checkpoint; None where none are written."""
        return self.durable.step if self.durable else None

    async def open_incarnation(self) -> int:
        """The incarnation of this process: the configured one, or with checkpoints one that no other has had.

        Rank 0 opens it, and tells the others once they have met.
        """
        if not self.enabled or self._rank:
            return self._first_incarnation
        opened: list[int] = []

        def write() -> None:
            opened.append(self._store.open_incarnation(self._first_incarnation))

        await self._torch.run(write_when_room, write, self._status)
        return opened[-1]

    async def newest(self) -> Saved | None:
        """What to resume from, at rank 0, which looks through it for all."""
        return await asyncio.to_thread(self._store.newest) if self.enabled and not self._rank else None

    def at(self, version: PolicyVersion) -> Saved:
        """What rank 0 has found. Raises `CheckpointFailed`."""
        return self._store.at(version)

    def resumed(self, saved: Saved) -> None:
        """The learner is to be brought to this one."""
        self.durable, self._begun_step = saved.version, saved.version.step

    @contextlib.asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """To be held while weights and optimizer change; `made` is called before it is let go."""
        async with self._at_rest:
            yield

    def made(self, learner: Learner, version: PolicyVersion, figures: dict[str, float]) -> None:
        """The learner has come to a version."""
        self._made = _Made(learner, version, figures)

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after `step`; while one is being written, the next step is asked again.

        Several ranks answer alike: they wait for the one that is being written.
        """
        due = self.enabled and step - self._begun_step >= self._interval_steps
        return due and not (self._alone and self._one.locked())

    def hasten(self, step: int) -> None:
        """Write one after `step`, before its interval, as others wait for it. Rank 0 hears that."""
        if self.enabled and not self._rank and step > self._begun_step and not self._one.locked():
            self._asked.soon()

    async def asked(self, world: World) -> bool:
        """Whether all ranks are to write one now, before they go on."""
        return self._made is not None and self.enabled and await self._asked.pending(world, self._made.version)

    def end(self) -> None:
        """The training has ended."""
        self._asked.end()

    async def save(self) -> PolicyVersion:
        """Write a checkpoint of the next moment at which nothing changes; returns its version when it is durable.

        Raises:
            Unsupported: none are written, or another rank is to be asked.
            CheckpointFailed: it could not be written; the one before stands.
        """
        if not self.enabled:
            raise Unsupported("trainer.checkpoint.interval_steps is 0: no checkpoints are written", field="checkpoint")
        if self._rank:
            raise Unsupported("rank 0 takes this call for all ranks", field="checkpoint")
        return await (self.first() if self._alone else self._asked.wait())

    async def begin_asked(self) -> Callable[[], Awaitable[PolicyVersion]]:
        """`begin` of all ranks at once, for those who asked."""
        waiting = self._asked.begin()
        finish = await self.begin()

        async def finish_and_tell() -> PolicyVersion:
            try:
                version = await finish()
            except CheckpointFailed as error:
                for future in waiting:
                    if not future.done():
                        future.set_exception(error)
                raise
            for future in waiting:
                if not future.done():
                    future.set_result(version)
            return version

        return finish_and_tell

    async def first(self) -> PolicyVersion:
        """The same, by all ranks at once."""
        return await (await self.begin())()

    async def begin(self) -> Callable[[], Awaitable[PolicyVersion]]:
        """Copy the state; what is returned waits until it is durable, and must be called."""
        await self._one.acquire()
        try:
            async with self._at_rest:
                return await self._begin()
        except BaseException:
            self._one.release()
            raise

    async def _begin(self) -> Callable[[], Awaitable[PolicyVersion]]:
        made, started_s = self._made, time.monotonic()
        assert made is not None, "weights change until there are some"
        version = made.version
        saving: Saving | None = None
        if version != self.durable:
            from slipstream.trainer.checkpoint_state import Target, own_group, save_async

            if not self._grouped:
                self._group, self._grouped = await self._torch.run(own_group), True
            self._begun_step = version.step
            learner = made.learner
            state = learner.model, learner.optimizer, learner.carried
            target = Target.of(self._store, version, made.figures)
            saving = await self._torch.run(save_async, *state, target, self._group)
        copy_s = time.monotonic() - started_s

        async def finish() -> PolicyVersion:
            try:
                if saving is not None:
                    await asyncio.to_thread(saving.wait)
                    self.durable = version
                    self._asked.note(version, failed=False)
                    telemetry.checkpoint_written(version.step, copy_s, time.monotonic() - started_s)
                    log.info("checkpoint_written", version=str(version), copy_s=round(copy_s, 3))
                return version
            except CheckpointFailed as error:
                if self._alone:
                    self._begun_step = self.durable.step if self.durable else 0
                else:  # ranks must not differ in when they try again
                    self._asked.note(version, failed=True)
                telemetry.checkpoints_failed.inc()
                log.error("checkpoint_failed", version=str(version), detail=error.message)
                raise
            finally:
                self._one.release()

        return finish

    async def finish_beside(self, finish: Callable[[], Awaitable[PolicyVersion]]) -> None:
        """Wait for one that nobody asked for: a failure is logged and counted, and the next step tries again."""
        with contextlib.suppress(CheckpointFailed):
            await finish()
