"""The training loop: start (warm-up included), then for each step plan, rows, optimizer step, publish, report.

Publishing version n and reporting it overlap the wait for plan n+1; version n is published before n+1 is.

With checkpoints, a process that finds one goes on from it, as the next incarnation: it publishes and reports that step
under its own name, and takes the steps after it once more, by the plans that were sealed for them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import grpc
import structlog

from slipstream.api.training.v1 import batch_pb2, batch_pb2_grpc
from slipstream.common import tracing
from slipstream.common.disk import replace_file
from slipstream.common.errors import (
    BroadcastStoreFull,
    DeadlineExceeded,
    DiskFull,
    Draining,
    SlipstreamError,
    Unreachable,
    from_rpc_error,
)
from slipstream.common.version import PolicyVersion
from slipstream.environments.tokenizer import TOKENIZER_FILE
from slipstream.trainer import telemetry
from slipstream.trainer.asked_saves import Move
from slipstream.trainer.checkpointer import Checkpointer
from slipstream.trainer.config import TrainerConfig
from slipstream.trainer.cost import peak_flops, speed
from slipstream.trainer.own_rows import own_rows
from slipstream.trainer.portions import PlanReader
from slipstream.trainer.probe import choose_probe, probe_prompts
from slipstream.trainer.publish import RankedPublisher
from slipstream.trainer.room import write_when_room
from slipstream.trainer.rows import RowForm
from slipstream.trainer.sequence import version_number
from slipstream.trainer.status import Status, request_id
from slipstream.trainer.timeline import Timeline
from slipstream.trainer.torch_thread import TorchThread
from slipstream.weights.adapter import Adapter, adapter_name
from slipstream.weights.manifest import Box, Probe
from slipstream.weights.straight.lending import Lending
from slipstream.weights.transport import WeightTransport

if TYPE_CHECKING:  # torch is imported on its thread, after the server has started
    from slipstream.trainer.checkpoint_store import Saved
    from slipstream.trainer.host_copies import Copying
    from slipstream.trainer.parallel.world import World
    from slipstream.trainer.step import Learner
    from slipstream.weights.straight.lender import KeptShard, Lender

log = structlog.get_logger()

T = TypeVar("T")

RETRY_PAUSE_S = 0.3
PEER_TIMEOUT_S = 60.0
"""How long a peer may be away (starting, restarting) before the trainer gives up."""

_WAITED_FOR = (Unreachable, Draining, DeadlineExceeded, BroadcastStoreFull)
"""What a repeat within that time may heal; the broadcaster's store, once older versions are pruned."""

CALL_TIMEOUT_S = 10.0
PLAN_ATTEMPTS = 3
"""How often a plan is asked for that is of another version than its step's."""
ROUTES_UNKNOWN_WARNING = 0.01


class Start(Protocol):
    """Makes the model that step 1 trains."""

    def __call__(self, config: TrainerConfig, status: Status, resumed: bool) -> tuple[Learner, dict[str, float]]:
        """Runs on the torch thread; returns the learner and figures of the warm-up.

        `resumed`: a checkpoint is loaded into it, so its weights do not matter.
        """
        ...


@dataclass(frozen=True)
class _Snapshot:
    """Weights of one version with their probe, on the way to the broadcaster."""

    probe: Probe
    copying: Copying | None = None
    """All of them, where one rank has all; on a card they are copied beside the next step."""
    adapter: Adapter | None = None
    boxes: Sequence[Box] = ()
    """Those of this rank, of several."""
    kept: KeptShard | None = None
    """In place of both, what readers fetch from this process."""

    @property
    def size_bytes(self) -> int:
        if self.kept is not None:
            return self.kept.size_bytes
        return (self.copying.size_bytes if self.copying else 0) + sum(box.values.nbytes for box in self.boxes)


@dataclass(frozen=True)
class _Step:
    """What is reported about one step."""

    version: PolicyVersion
    metrics: dict[str, float]
    started_s: float
    finished_s: float

    @property
    def skipped(self) -> bool:
        """Whether the version has the weights of the one before."""
        return bool(self.metrics.get("step_skipped"))


class TrainingLoop:
    """Owns the sequence of steps. Everything that computes runs on the torch thread."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        batches: batch_pb2_grpc.BatchServiceStub,
        transport: WeightTransport,
        rows: PlanReader,
        status: Status,
        torch: TorchThread,
        start: Start,
        checkpoints: Checkpointer,
        lending: Lending | None = None,
    ) -> None:
        """`lending`: weights go straight to the engines."""
        self._config = config
        self._lending = lending
        self._lender: Lender | None = None
        self._batches = batches
        self._transport = transport
        self._rows = rows
        self._status = status
        self._torch = torch
        self._start = start
        self._checkpoints = checkpoints
        self._incarnation = config.incarnation
        self.saved = asyncio.Event()
        """Cleared while the final weights are being written."""
        self.saved.set()
        self._base: PolicyVersion | None = None
        """The version whose weights adapters are added to."""
        self._world: World | None = None
        self._publisher: RankedPublisher | None = None
        self._timeline = Timeline(config.timeline_file, config.timeline_limit_bytes)

    async def run(self) -> None:
        """Train to the end of the run, write the final weights, then wait to be stopped."""
        await self.train()
        await asyncio.Event().wait()

    async def train(self) -> None:
        """Train to the end of the run and write the final weights."""
        async with self._checkpoints.changing():
            await self._torch.start()
            learner, first = await self._begin()
            self._join(learner.world)
        if self._checkpoints.enabled and self._checkpoints.durable is None:
            await self._checkpoints.first()  # from now on there is always one
        await self._publish(await self._snapshot(learner, first.version), first)
        last = await self._steps(learner, first.version.step)
        self._status.enter("saving")
        self.saved.clear()
        try:
            await self._torch.run(_save, learner, self._config, self._status)
        finally:
            self.saved.set()
        log.info("training_ended", step=last)
        self._status.enter("ended")

    def _join(self, world: World) -> None:
        """From now on this is one of several ranks, if it is not alone."""
        self._world = world
        self._torch.guard = world.watching
        if self._lending is not None:
            self._lender = self._lending.begin(world.device)
        if not world.alone:
            self._publisher = RankedPublisher(self._transport, world)

    async def _told_to_stop(self) -> bool:
        """Whether this rank, or any other, was. Whoever was tells the others, which may be waiting for plans."""
        world, stop = self._world, self._status.stop
        if world is not None and not world.alone:
            if stop.is_set():
                await asyncio.to_thread(world.board.put, "stop", "1")
            elif await asyncio.to_thread(world.board.read, "stop"):
                stop.set()
        return stop.is_set()

    async def _begin(self) -> tuple[Learner, _Step]:
        """The learner and the step that it stands at: 0, or that of the newest checkpoint."""
        self._incarnation = await self._checkpoints.open_incarnation()
        saved = await self._checkpoints.newest()
        learner, figures = await self._torch.run(self._start, self._config, self._status, saved is not None)
        if self._checkpoints.enabled and not learner.world.alone:
            saved = await self._torch.run(self._agree, learner.world, saved)
        if saved is not None:
            self._checkpoints.resumed(saved)
            from slipstream.trainer.checkpoint_state import load

            await self._torch.run(load, learner.model, learner.optimizer, learner.carried, saved.path)
            figures = saved.figures
            log.info("resumed", checkpoint=str(saved.version), incarnation=self._incarnation)
        now_s = time.time()
        step = _Step(PolicyVersion(self._incarnation, saved.version.step if saved else 0), figures, now_s, now_s)
        self._checkpoints.made(learner, step.version, figures)
        return learner, step

    def _agree(self, world: World, saved: Saved | None) -> Saved | None:
        """Take the incarnation that rank 0 has opened, and what it has found to resume from. On the torch thread."""
        if world.rank == 0:
            world.board.put("resumed", f"{self._incarnation}/{saved.version if saved else ''}")
            return saved
        said = world.board.wait_for("resumed", self._status.stop.is_set) or f"{self._incarnation}/"
        incarnation, _, version = said.partition("/")
        self._incarnation = int(incarnation)
        return self._checkpoints.at(PolicyVersion.parse(version)) if version else None

    async def _steps(self, learner: Learner, step: int) -> int:
        """All steps after `step`; returns the last one trained."""
        async with asyncio.TaskGroup() as group:
            publishing: asyncio.Task[None] | None = None
            while True:
                self._status.enter("waiting")
                waited_s = time.monotonic()
                plan = await self._agreed_plan(learner.world, step + 1, group)
                if plan is None:
                    break
                step += 1
                wait_s = time.monotonic() - waited_s
                async with self._checkpoints.changing():
                    snapshot, result = await self._train(learner, plan, wait_s)
                    self._checkpoints.made(learner, result.version, result.metrics)
                if self._checkpoints.due(step):
                    finish = await self._checkpoints.begin()
                    group.create_task(self._checkpoints.finish_beside(finish), name=f"checkpoint-{step}")
                if publishing is not None:
                    await publishing
                publishing = group.create_task(self._publish(snapshot, result), name=f"publish-{step}")
                if plan.last:
                    self._checkpoints.end()
                    break
        return step

    async def _agreed_plan(self, world: World, step: int, group: asyncio.TaskGroup) -> batch_pb2.Plan | None:
        """The plan of `step` once all ranks have theirs, None when the run is over. Checkpoints asked for are first."""
        plan: batch_pb2.Plan | None = None
        while True:
            move, plan = await self._next_move(world, step, plan)
            agreed = await self._torch.run(world.least, move)
            if agreed == Move.END:
                self._checkpoints.end()
                return None
            if agreed == Move.TRAIN:
                return plan
            writing = self._checkpoints.finish_beside(await self._checkpoints.begin_asked())
            if plan is None:
                await writing
            else:
                group.create_task(writing, name=f"checkpoint-before-{step}")

    async def _next_move(
        self, world: World, step: int, plan: batch_pb2.Plan | None
    ) -> tuple[Move, batch_pb2.Plan | None]:
        """What this rank is ready for; with the plan of `step`, once it is there."""
        wait_ms = int(self._config.plan_wait_s * 1000)
        timeout_s = self._config.plan_wait_s + CALL_TIMEOUT_S
        expected = PolicyVersion(self._incarnation, step)
        refused = 0
        while not await self._told_to_stop():
            if await self._checkpoints.asked(world):
                return Move.SAVE, plan
            if plan is not None:
                return Move.TRAIN, plan
            request = batch_pb2.GetPlanRequest(
                incarnation=self._incarnation,
                step=step,
                wait_ms=wait_ms,
                rank=world.data_rank,
                checkpoint_step=self._checkpoints.durable_step,
            )
            response: batch_pb2.GetPlanResponse = await self._retry(
                partial(self._batches.GetPlan, request, timeout=timeout_s)
            )
            if response.checkpoint_asked or response.pending.checkpoint_due:
                self._checkpoints.hasten(step - 1)
            kind = response.WhichOneof("result")
            if kind == "ended":
                log.info("run_over", reason=response.ended.reason, next_step=step)
                break
            if kind == "plan":
                version = PolicyVersion.from_proto(response.plan.version)
                if version == expected:
                    plan = response.plan
                    continue
                refused += 1
                log.warning("plan_refused", field="version", version=str(version), expected=str(expected))
                if refused >= PLAN_ATTEMPTS:
                    raise ValueError(f"version: the plan of step {step} is for {version}, not for {expected}")
                await asyncio.sleep(RETRY_PAUSE_S)
        return Move.END, None

    async def _train(self, learner: Learner, plan: batch_pb2.Plan, wait_s: float) -> tuple[_Snapshot, _Step]:
        """Fetch and train one plan; returns the new weights and the report."""
        version = PolicyVersion.from_proto(plan.version)
        started_s, began_s = time.time(), time.monotonic()
        metrics, fetch_s = await self._optimizer_step(learner, plan)
        step_s = time.monotonic() - began_s
        finished_s = started_s + step_s
        metrics |= {
            "tokens": float(plan.token_count),
            "wait_s": wait_s,
            "fetch_s": fetch_s,
            "train_s": step_s - fetch_s,
            "step_s": step_s,
        }
        peak = peak_flops(learner.device, self._config.peak_flops)
        ranks = learner.world.layout.rank_count
        metrics |= speed(metrics.get("model_flops", 0.0), metrics["tokens"], step_s, peak, ranks)
        if metrics.get("routes_unknown_fraction", 0.0) > ROUTES_UNKNOWN_WARNING:
            log.warning("routes_unknown", fraction=round(metrics["routes_unknown_fraction"], 4), step=version.step)
        if metrics["step_skipped"]:
            unknown = "no log-probability of any token is known"
            detail = unknown if metrics.get("nothing_known") else "the loss or its gradient is not finite"
            log.error("step_skipped", step=version.step, detail=detail)
        exported_s = time.monotonic()
        snapshot = await self._snapshot(learner, version)
        metrics["export_s"] = time.monotonic() - exported_s
        self._status.metrics = metrics
        if learner.world.rank == 0:  # who has the figures of all
            telemetry.step_trained(metrics)
        return snapshot, _Step(version, metrics, started_s, finished_s)

    async def _optimizer_step(self, learner: Learner, plan: batch_pb2.Plan) -> tuple[dict[str, float], float]:
        """Train a plan as its rows come; returns the step's figures and the seconds spent waiting for rows."""
        version = PolicyVersion.from_proto(plan.version)
        lengths = [planned.token_count - 1 for batch in plan.micro_batches for planned in batch.sequences]
        interval, checked = self._config.replay_check_interval_steps, None
        if interval and (version.step - 1) % interval == 0 and plan.micro_batches:
            checked = version.step % len(plan.micro_batches)
        trained = PolicyVersion(version.incarnation, version.step - 1)
        counts = plan.loss_token_count, plan.sequence_count, sum(lengths)
        await self._torch.run(learner.begin, *counts, version_number(trained), checked)
        refused, begun = 0, False
        fetch_s = 0.0
        with ExitStack() as training:
            async with asyncio.TaskGroup() as group:
                asked_s = self._fetching()
                own = own_rows(plan, learner.world.layout.context, learner.world.context_rank)
                async for portion in self._rows.read(own, RowForm.of(learner.model, trained), group):
                    fetch_s += time.monotonic() - asked_s
                    if not begun:
                        training.enter_context(self._interval("train_step", learner, plan))
                    begun = True
                    refused += portion.refused
                    self._status.enter("training")
                    await self._torch.run(learner.add, portion.micro_batches)
                    portion.micro_batches.clear()
                    asked_s = self._fetching()
            self._status.enter("training")
            metrics = await self._torch.run(learner.finish, version.step, refused)
        if metrics["sequences_lost"]:
            log.warning("sequences_lost", count=int(metrics["sequences_lost"]), step=version.step)
        return metrics, fetch_s

    def _interval(self, kind: str, learner: Learner, plan: batch_pb2.Plan) -> AbstractContextManager[None]:
        """Of the timeline: the first span of the step's trace, which links those of the rollouts that it trains."""
        version = PolicyVersion.from_proto(plan.version)
        of, first = tracing.step_trace(str(version)), learner.world.rank == 0
        traces = (tracing.rollout_trace(*rollout) for rollout in tracing.planned_rollouts([plan]))
        links = [trace for trace in traces if trace is not None]
        return self._timeline.interval(kind, of, root=first, links=links, step=version.step)

    def _fetching(self) -> float:
        self._status.enter("fetching")
        return time.monotonic()

    async def _snapshot(self, learner: Learner, version: PolicyVersion) -> _Snapshot:
        """Copies of the weights, or of the adapter alone once the rest is published, and what they say of the probe."""
        config = self._config
        prompts = probe_prompts(learner.model.sizes.vocab_size, config.probe_tokens, config.seed)
        adapter, copying, boxes, kept = None, None, [], None
        if self._lender is not None and (config.lora is None or config.lora.publish == "merged"):
            kept = await self._torch.run(learner.keep, self._lender, version)
        elif not learner.world.alone:
            boxes = await self._torch.run(learner.export_boxes)
        elif config.lora is None or config.lora.publish == "merged":
            copying = await self._torch.run(learner.begin_export)
        else:
            whole, self._base = self._base is None, self._base or version
            copying = await self._torch.run(partial(learner.begin_adapter_export, with_base=whole))
            name = adapter_name(config.run_dir.name, version)
            adapter = Adapter(name, self._base, config.lora.rank, config.lora.alpha)
        prompt, logps = await self._torch.run(choose_probe, prompts, learner.probe)
        return _Snapshot(Probe(prompt, tuple(logps), config.probe_tolerance), copying, adapter, boxes, kept)

    async def _publish(self, snapshot: _Snapshot, step: _Step) -> None:
        """Seal the version at the broadcaster, then report its step."""
        started_s = time.monotonic()
        of = tracing.step_trace(str(step.version)) if step.version.step else None
        with self._timeline.interval("publish", of, step=step.version.step):
            await self._retry(partial(self._send, step.version, snapshot))
        self._status.version = step.version
        if self._world is not None and self._world.rank:
            return  # rank 0 reports
        telemetry.phase_seconds.labels("publish").observe(time.monotonic() - started_s)
        request = batch_pb2.ReportStepRequest(
            request_id=request_id("step"),
            version=step.version.to_proto(),
            metrics={
                **step.metrics,
                "publish_s": time.monotonic() - started_s,
                "published_bytes": float(snapshot.size_bytes),
            },
            started_unix_ms=int(step.started_s * 1000),
            finished_unix_ms=int(step.finished_s * 1000),
            skipped=step.skipped,
        )
        await self._retry(lambda: self._batches.ReportStep(request, timeout=CALL_TIMEOUT_S))
        log.info("step_published", version=str(step.version), loss=step.metrics.get("loss"))

    async def _send(self, version: PolicyVersion, snapshot: _Snapshot) -> None:
        if self._publisher is not None:
            await self._publisher.publish(version, snapshot.boxes, snapshot.probe, snapshot.kept)
        elif snapshot.kept is not None:
            kept = snapshot.kept
            await self._transport.publish_slices(version, kept.slices, [], snapshot.probe, source=kept.source)
        else:
            tensors = await asyncio.to_thread(snapshot.copying.arrays) if snapshot.copying else {}
            await self._transport.publish(version, tensors, snapshot.probe, snapshot.adapter)

    async def _retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call that is safe to repeat while its peer is away (starting, restarting) or has no room.

        A full disk is waited for without end: the run is paused meanwhile, and says so. So is a full store that is not
        pruned as long as Redis is away.
        """
        deadline_s = time.monotonic() + PEER_TIMEOUT_S
        waiter = object()
        try:
            while True:
                try:
                    return await call()
                except (grpc.aio.AioRpcError, SlipstreamError) as raised:
                    error = from_rpc_error(raised) if isinstance(raised, grpc.aio.AioRpcError) else raised
                    if isinstance(error, DiskFull) or error.metadata.get("waits_for"):
                        deadline_s = time.monotonic() + PEER_TIMEOUT_S
                        self._status.waiting_for_room.add(waiter)
                    elif not isinstance(error, _WAITED_FOR) or time.monotonic() > deadline_s:
                        raise error from raised
                    log.info("peer_away", reason=error.reason, detail=error.message)
                await asyncio.sleep(RETRY_PAUSE_S)
        finally:
            self._status.waiting_for_room.discard(waiter)


def _save(learner: Learner, config: TrainerConfig, status: Status) -> None:
    """Write the final weights as a model directory that another run can start from, and adapters by themselves.

    The former only where the configuration has `save_weights`.
    """
    from slipstream.models.checkpoint import save_model, save_tensors
    from slipstream.models.lora.adapters import adapters_of
    from slipstream.models.lora.peft import save_adapters

    final = config.run_dir / "checkpoints" / "final"
    adapters = adapters_of(learner.model)
    halves = {} if adapters is None else adapters.tensors()  # all ranks take part
    tensors = learner.whole_tensors() if config.save_weights and not learner.world.alone else {}
    if learner.world.rank:
        return

    def save() -> None:
        if tensors:
            save_tensors(learner.model.sizes, tensors, final)
        elif config.save_weights:
            save_model(learner.model, final)
        if adapters is not None:  # beside it: in it, transformers would add them once more
            base_model = str(config.model_dir.resolve())
            save_adapters(adapters, halves, base_model, config.run_dir / "checkpoints" / "adapter")
        if config.save_weights and (config.model_dir / TOKENIZER_FILE).exists():
            replace_file(final / TOKENIZER_FILE, (config.model_dir / TOKENIZER_FILE).read_bytes())

    write_when_room(save, status)
