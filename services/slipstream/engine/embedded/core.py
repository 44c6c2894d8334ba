"""The engine without threads: requests in, one `step` at a time, outputs out. Everything here runs on one thread.

Requests wait in one queue. A request is started when its prompt's blocks and one whole sample's blocks (all tokens it
may sample) are free; so what runs can always finish, and nothing is ever preempted. Samples of a request share the
prompt's full blocks; the last, partly filled one is copied for each. More samples are admitted as rows and blocks come
free, before any later request starts.

A step computes at most `max_prefill_tokens` prompt positions, so that running samples never wait longer: the last
prompt of a step may be cut, and is the first of the next one (`unfinished`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from slipstream.common.errors import RequestAborted
from slipstream.common.version import UNSET, PolicyVersion
from slipstream.engine.base import (
    BusyInterval,
    DecodeRequest,
    FinishReason,
    KvPayload,
    PausedEngine,
    PrefillRequest,
    PrefillResult,
    SampleChunk,
    UpdateReport,
)
from slipstream.engine.embedded import sampler
from slipstream.engine.embedded.batch import ActiveDecode, RunningBatch, RunningSample
from slipstream.engine.embedded.blocks import BlockPool
from slipstream.engine.embedded.busy import BusyLog
from slipstream.engine.embedded.config import EmbeddedConfig
from slipstream.engine.embedded.kv import KvPool
from slipstream.engine.embedded.outputs import Chunks, Output, PrefillDone, Recorded, Transfer
from slipstream.engine.embedded.weights import LiveWeights
from slipstream.engine.hashing import block_hashes, prompt_hash
from slipstream.models.base import Model, Sizes
from slipstream.models.fp8.config import Fp8Config
from slipstream.models.fp8.modules import convert
from slipstream.models.registry import find_architecture

Waiting = PrefillRequest | ActiveDecode


@dataclass
class _PromptJob:
    """A prompt whose positions from `start` to `end - 1` are to be computed, over one step or several."""

    owner: Waiting
    hashes: list[int]
    blocks: list[int]
    start: int
    end: int
    done: int
    """Positions with KV."""
    oldest: PolicyVersion = UNSET
    """Weights that computed the first part."""

    @property
    def request(self) -> PrefillRequest | DecodeRequest:
        return self.owner.request if isinstance(self.owner, ActiveDecode) else self.owner

    @property
    def left(self) -> int:
        return self.end - self.done


class EngineCore:
    """Scheduler and executor of one engine."""

    def __init__(self, sizes: Sizes, config: EmbeddedConfig) -> None:
        self.sizes = sizes
        self.config = config
        self.version: PolicyVersion | None = None
        self.model: Model = find_architecture(sizes.architecture).build_model(sizes)
        self.model.eval()
        self.model.requires_grad_(False)
        if config.quantization == "fp8_per_block":
            convert(self.model, Fp8Config())
        self.weights = LiveWeights(self.model)
        self.blocks_a_table = -(-sizes.max_context_tokens // config.block_size_tokens)
        self.blocks = BlockPool(config.block_count)
        self.kv = KvPool(sizes, config.block_count, config.block_size_tokens, self.blocks_a_table)
        self.batch = RunningBatch(
            config.max_running_samples, sizes.max_context_tokens, self.blocks_a_table, self.kv.padding_block
        )
        self.waiting: deque[Waiting] = deque()
        self.partial: deque[ActiveDecode] = deque()
        """Started decode requests with samples still to admit, in order."""
        self.unfinished: _PromptJob | None = None
        """A prompt of which a part is computed. It is found by nobody until it is whole."""
        self.transfers: dict[str, Transfer] = {}
        self.busy_log = BusyLog()
        self._outputs: list[Output] = []
        self._news: dict[int, tuple[ActiveDecode, list[SampleChunk]]] = {}
        """Chunks by request since outputs were taken: they go out as one message."""
        self.prefix_hit_tokens = self.prefix_query_tokens = 0
        self.prefilled_tokens = self.decoded_tokens = self.decode_steps = 0
        self._next_flush = float("inf")

    # --- Requests ------------------------------------------------------------------------------------

    def add_prefill(self, request: PrefillRequest) -> None:
        self.waiting.append(request)

    def add_decode(self, request: DecodeRequest, flush_s: float) -> None:
        active = ActiveDecode(request, flush_s, pending=deque(range(len(request.sample_ids))))
        self.waiting.append(active)

    def release_transfer(self, transfer_id: str) -> bool:
        """Free a prefill's blocks."""
        transfer = self.transfers.pop(transfer_id, None)
        if transfer is not None:
            self.blocks.release(transfer.blocks)
        return transfer is not None

    def abort(self, request_id: str) -> int:
        """End a request in whatever phase and free its blocks; returns samples (or prefills) ended."""
        ended = int(self.release_transfer(request_id))
        for item in list(self.waiting):
            if isinstance(item, PrefillRequest):
                if item.request_id == request_id:
                    self.waiting.remove(item)
                    self._outputs.append(PrefillDone(request_id, RequestAborted("aborted while waiting")))
                    ended += 1
            elif item.request.request_id == request_id:
                self.waiting.remove(item)
                ended += self._end_unadmitted(item)
        if (job := self.unfinished) is not None and job.request.request_id == request_id:
            self.unfinished = None
            self.blocks.release(job.blocks)
            if isinstance(job.owner, PrefillRequest):
                self._outputs.append(PrefillDone(request_id, RequestAborted("aborted while computed")))
                ended += 1
            else:
                ended += self._end_unadmitted(job.owner)
        for row in range(self.batch.count - 1, -1, -1):
            if self.batch.samples[row].owner.request.request_id == request_id:
                self._end_row(row, "aborted")
                ended += 1
        for active in list(self.partial):
            if active.request.request_id == request_id:
                self.partial.remove(active)
                ended += self._end_unadmitted(active)
        return ended

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self.waiting or self.unfinished or self.partial or self.batch.count)

    def take_outputs(self) -> list[Output]:
        """What happened since the last call: routes before the chunks that end their samples."""
        outputs, news = self._outputs, self._news
        self._outputs, self._news = [], {}
        for active, chunks in news.values():
            ended = not active.pending and not active.running
            outputs.append(Chunks(active.request.request_id, chunks, ended))
        return outputs

    # --- Steps ---------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Admit what fits, compute its prompts, decode one token of every running sample. False: nothing could run."""
        started_s, began_s = time.time(), time.perf_counter()
        self._admit_samples()
        jobs, ready = self._start_requests()
        if jobs:
            self._compute_prompts(jobs)
            self._admit_samples()
            self.busy_log.add(BusyInterval("prefill", started_s, started_s + time.perf_counter() - began_s))
        if self.batch.count == 0:
            return bool(jobs or ready)
        started_s, began_s = time.time(), time.perf_counter()
        self._decode()
        self.busy_log.add(BusyInterval("decode", started_s, started_s + time.perf_counter() - began_s))
        return True

    def _start_requests(self) -> tuple[list[_PromptJob], int]:
        """Take requests off the queue while there is room. Returns prompts to compute, and how many needed nothing."""
        jobs: list[_PromptJob] = []
        ready = tokens = owed_rows = owed_blocks = 0  # owed: to the first samples of the decode requests in `jobs`
        if self.unfinished is not None:
            jobs.append(self.unfinished)
            tokens += self.unfinished.left
            if isinstance(self.unfinished.owner, ActiveDecode):
                owed_rows, owed_blocks = 1, self._own_blocks(self.unfinished.owner.request)
            self.unfinished = None
        while self.waiting and not self.partial and tokens < self.config.max_prefill_tokens:
            job = self._reserve(self.waiting[0], owed_rows, owed_blocks)
            if job is None:
                break
            self.waiting.popleft()
            if isinstance(job.owner, ActiveDecode) and isinstance(job.owner.request.kv, KvPayload):
                self._import(job, job.owner.request.kv)
                job.owner.cached_tokens = job.end
            if job.left:
                jobs.append(job)
                tokens += job.left
                if isinstance(job.owner, ActiveDecode):
                    owed_rows += 1
                    owed_blocks += self._own_blocks(job.owner.request)
            else:
                ready += 1
                self._prompt_ready(job)
                if not jobs:  # else its samples wait for those before it
                    self._admit_samples()
        return jobs, ready

    def _reserve(self, item: Waiting, owed_rows: int, owed_blocks: int) -> _PromptJob | None:
        """Blocks for the prompt's KV, the cached ones first; None if they, or a first sample, do not fit now."""
        request = item if isinstance(item, PrefillRequest) else item.request
        size, end = self.config.block_size_tokens, len(request.token_ids) - 1
        hashes = block_hashes(request.salt, request.token_ids[:end], size)
        hits = self._with_rows(request, self.blocks.match(hashes))
        missing = -(-end // size) - len(hits)
        room = self.blocks.available_beside(hits) - missing - owed_blocks
        if room < 0:
            return None
        if isinstance(item, ActiveDecode):
            if self.batch.count + owed_rows >= self.batch.capacity or room < self._own_blocks(item.request):
                return None
            item.cached_tokens = len(hits) * size
        self.blocks.hold(hits)
        fresh = self.blocks.allocate(missing)
        start = len(hits) * size
        self.prefix_query_tokens += end
        self.prefix_hit_tokens += start
        return _PromptJob(item, hashes, hits + fresh, start, end, start)

    def _with_rows(self, request: PrefillRequest | DecodeRequest, hits: list[int]) -> list[int]:
        """As many of a prompt's cached blocks as have the routes that it is to have.

        KV of another engine brings none. It is for the rollout that it came for, which has its routes from there; who
        else finds it computes it once more, and that is found from then on.
        """
        if not request.capture_routes or (isinstance(request, DecodeRequest) and request.kv is not None):
            return hits
        size, first = self.config.block_size_tokens, request.first_route_position
        slots = [self.kv.slots_of(hits, max(first, n * size), (n + 1) * size) for n in range(first // size, len(hits))]
        unknown = [n for n, each in enumerate(slots, first // size) if not self.kv.routes.known(each)]
        self.blocks.forget(hits[n] for n in unknown)
        return hits[: unknown[0]] if unknown else hits

    def _own_blocks(self, request: DecodeRequest) -> int:
        """Blocks of one sample beside the prompt's full blocks it shares: room for every token it may sample."""
        size, prompt = self.config.block_size_tokens, len(request.token_ids) - 1
        return -(-(prompt + request.sampling.max_new_tokens) // size) - prompt // size

    def _import(self, job: _PromptJob, kv: KvPayload) -> None:
        """Fill the missing positions with KV that another engine computed."""
        if not job.left:
            return
        array = np.frombuffer(kv.data, "<f4").reshape(kv.header.shape)
        missing = torch.from_numpy(array[:, :, job.start :].copy())
        self.kv.write(self.kv.slots_of(job.blocks, job.start, job.end), missing)
        self._mark_filled(job, kv.header.oldest_version)
        job.done = job.end

    def _compute_prompts(self, jobs: list[_PromptJob]) -> None:
        """One forward pass over the missing positions of all jobs, but for what the last has too many."""
        assert self.version is not None
        # Only the last can be more than is left: requests are taken until there is enough to do.
        ends = [job.end for job in jobs]
        ends[-1] -= max(0, sum(job.left for job in jobs) - self.config.max_prefill_tokens)
        starts = [job.done for job in jobs]
        step = self.kv.prefill_step([job.blocks for job in jobs], starts, ends)
        parts = list(zip(jobs, starts, ends, strict=True))
        tokens = torch.tensor(
            [token for job, start, end in parts for token in job.request.token_ids[start:end]]
        ).unsqueeze(0)
        positions = torch.cat([torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]).unsqueeze(0)
        self.model.routes.begin(capture=True)
        self.model.hidden(tokens, positions, step)
        self.kv.routes.write(step.slots_T.numpy(), self.model.routes.captured().numpy())
        self.prefilled_tokens += tokens.numel()
        for job, _, end in parts:
            job.oldest = job.oldest or self.version  # an update between two parts leaves the older one
            job.done = end
            if job.left:
                self.unfinished = job
                continue
            self._mark_filled(job, job.oldest)
            self._prompt_ready(job)

    def _mark_filled(self, job: _PromptJob, oldest: PolicyVersion) -> None:
        """The job's missing positions have KV that rests on `oldest` or newer: let later prompts find it."""
        size = self.config.block_size_tokens
        for block in job.blocks[job.start // size :]:
            self.blocks.oldest[block] = oldest
        self.blocks.register(job.blocks[: len(job.hashes)], job.hashes, job.request.salt)

    def _prompt_ready(self, job: _PromptJob) -> None:
        """All positions of a prompt have KV: hold it for a transfer, or let its samples in."""
        assert self.version is not None
        oldest = min((self.blocks.oldest[block] for block in job.blocks), default=self.version)
        if isinstance(job.owner, ActiveDecode):
            job.owner.prompt_blocks, job.owner.oldest = job.blocks, oldest
            self.partial.append(job.owner)
            if job.owner.request.kv is None and job.owner.request.capture_routes:
                self._emit_prompt_routes(job)
            return
        request = job.owner
        result = PrefillResult(request.request_id, job.end, job.start, self.version, oldest)
        self.transfers[request.request_id] = Transfer(result, job.blocks)
        if request.capture_routes:
            self._emit_prompt_routes(job)
        self._outputs.append(PrefillDone(request.request_id, self.transfers[request.request_id]))

    def _admit_samples(self) -> None:
        """Give rows and blocks to samples of started requests, in order, as far as both go."""
        while self.partial:
            assert self.version is not None
            active = self.partial[0]
            request, size = active.request, self.config.block_size_tokens
            prompt, own = len(request.token_ids) - 1, self._own_blocks(active.request)
            shared = active.prompt_blocks[: prompt // size]
            copies: list[int] = []
            while active.pending and not self.batch.full and self.blocks.available >= own:
                fresh = self.blocks.allocate(own)
                self.blocks.hold(shared)
                index = active.pending.popleft()
                active.running.add(index)
                oldest = min(active.oldest or self.version, self.version)
                self.batch.add(RunningSample(active, index, shared + fresh, oldest, [(0, self.version)]))
                copies.append(fresh[0])
            if copies and prompt % size:
                self.kv.copy_blocks([active.prompt_blocks[-1]] * len(copies), copies)
            if copies:
                active.flush_at = time.monotonic() + active.flush_s
                self._next_flush = min(self._next_flush, active.flush_at)
            if active.pending:
                return
            self.blocks.release(active.prompt_blocks)
            active.prompt_blocks = []
            self.partial.popleft()

    def _decode(self) -> None:
        """One token for every running sample."""
        batch, n = self.batch, self.batch.count
        positions = batch.position[:n]
        blocks = int(positions.max()) // self.config.block_size_tokens + 1
        positions_R = torch.from_numpy(positions.copy())
        step = self.kv.decode_step(batch.tables[:n, :blocks], positions_R)
        self.model.routes.begin(capture=True)
        tokens_1R = torch.from_numpy(batch.token[:n].copy()).unsqueeze(0)
        logits_RV = self.model.logits(self.model.hidden(tokens_1R, positions_R.unsqueeze(0), step)[0])
        self.kv.routes.write(step.slots_T.numpy(), self.model.routes.captured().numpy())
        tokens, logprobs = self._sample(logits_RV)
        stopped, ended = batch.accept(tokens, logprobs)
        self.decoded_tokens += n
        self.decode_steps += 1
        if ended.any():
            for row in np.flatnonzero(ended)[::-1].tolist():  # from the last: removing moves later rows down
                self._end_row(row, "stop" if stopped[row] else "length")
        if (now := time.monotonic()) >= self._next_flush:
            self._flush(now)

    def _sample(self, logits_RV: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        batch, n = self.batch, self.batch.count
        temperature, top_p, top_k, min_p = (
            each[:n] for each in (batch.temperature, batch.top_p, batch.top_k, batch.min_p)
        )
        tokens, logprobs = sampler.sample(
            logits_RV,
            sampler.uniforms(batch.key[:n], batch.position[:n]),
            None if (temperature == 1).all() else torch.from_numpy(temperature),
            None if (top_p == 1).all() else torch.from_numpy(top_p),
            None if (top_k == 0).all() else torch.from_numpy(top_k),
            None if (min_p == 0).all() else torch.from_numpy(min_p),
        )
        return tokens.numpy(), logprobs.numpy()

    # --- Ends and news -------------------------------------------------------------------------------

    def _end_row(self, row: int, reason: FinishReason) -> None:
        """End a running sample: hand its last tokens and its routes out, free its blocks."""
        sample = self.batch.samples[row]
        active, request = sample.owner, sample.owner.request
        first = len(request.token_ids) - 1
        count = self.batch.sampled_count(row)
        if request.capture_routes and count:
            self._emit_routes(sample.sample_id, sample.table, first, first + count)
        if reason != "aborted":  # nobody goes on from there
            self._keep_sampled(row)
        chunk = self.batch.take_chunk(row, reason)
        self.blocks.release(reversed(sample.table))  # its end is given up first: what comes before is others', too
        self.batch.remove(row)
        active.running.discard(sample.index)
        self._emit_chunks(active, [chunk])

    def _keep_sampled(self, row: int) -> None:
        """Let later prompts find what a sample's tokens have KV of: the next turn begins with them."""
        sample, size = self.batch.samples[row], self.config.block_size_tokens
        request, count = sample.owner.request, self.batch.sampled_count(row)
        # The newest token has no KV yet.
        token_ids = [*request.token_ids, *self.batch.out_token[row, : max(0, count - 1)].tolist()]
        hashes = block_hashes(request.salt, token_ids, size)
        for block in sample.table[(len(request.token_ids) - 1) // size : len(hashes)]:
            self.blocks.oldest[block] = sample.oldest
        self.blocks.register(sample.table[: len(hashes)], hashes, request.salt)

    def _end_unadmitted(self, active: ActiveDecode) -> int:
        """End a request's samples that never ran."""
        self.blocks.release(active.prompt_blocks)
        active.prompt_blocks = []
        chunks = [SampleChunk(sample_index=index, finish_reason="aborted") for index in active.pending]
        active.pending.clear()
        self._emit_chunks(active, chunks)
        return len(chunks)

    def _emit_chunks(self, active: ActiveDecode, chunks: list[SampleChunk]) -> None:
        self._news.setdefault(id(active), (active, []))[1].extend(chunks)

    def _emit_prompt_routes(self, job: _PromptJob) -> None:
        """Hand out the rows that no earlier turn did. Where older ones were computed anew, the first ones stay."""
        request, end = job.request, job.end
        first = min(request.first_route_position, end)
        prompt = prompt_hash(request.salt, request.token_ids[:end])
        self._emit_routes(request.request_id, job.blocks, first, end, job.start if job.start < first else None, prompt)

    def _emit_routes(
        self,
        key: str,
        table: list[int],
        start: int,
        end: int,
        recomputed_from: int | None = None,
        prompt: int | None = None,
    ) -> None:
        if not self.sizes.moe_layers:
            return
        routes = self.kv.routes.read(self.kv.slots_of(table, start, end), start)
        self._outputs.append(Recorded(key, replace(routes, recomputed_from=recomputed_from), prompt))

    def _flush(self, now: float, everything: bool = False) -> None:
        """Hand out tokens of samples that go on, for requests whose time has come."""
        due: dict[int, tuple[ActiveDecode, list[SampleChunk]]] = {}
        for row, sample in enumerate(self.batch.samples):
            active = sample.owner
            if (everything or now >= active.flush_at) and self.batch.sampled_count(row) > sample.flushed:
                due.setdefault(id(active), (active, []))[1].append(self.batch.take_chunk(row))
        for active, chunks in due.values():
            active.flush_at = now + active.flush_s
            self._emit_chunks(active, chunks)
        self._next_flush = min((sample.owner.flush_at for sample in self.batch.samples), default=float("inf"))

    # --- Between steps -------------------------------------------------------------------------------

    def update(
        self, version: PolicyVersion, tensors: Mapping[str, Any], verify: Callable[[PausedEngine], None]
    ) -> UpdateReport:
        """Swap weights now; the caller is between two steps, so everything in flight stays where it is."""
        paused_at = time.monotonic()
        self._flush(paused_at, everything=True)  # what is out already never waits for the verdict
        previous = self.version
        with self.weights.replaced(tensors) as apply_s:
            verify(self)
        self.version = version
        for row, sample in enumerate(self.batch.samples):
            sample.spans.append((self.batch.sampled_count(row), version))
        return UpdateReport(version, previous, time.monotonic() - paused_at, apply_s, self.batch.count)

    def unchanged(self, names: Collection[str]) -> Collection[str]:
        return ()  # they are compared where they lie, which takes no time

    def parameters(self, wanted: Collection[str] = ()) -> dict[str, np.ndarray]:
        """The live parameters by Hugging Face name."""
        return self.weights.arrays()

    def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities of `token_ids[1:]`, computed whole through the paged path on blocks of their own."""
        count = len(token_ids)
        step = self.kv.prefill_step([self.kv.scratch], [0], [count])
        tokens = torch.tensor([list(token_ids)])
        self.model.routes.begin()
        hidden_1TD = self.model.hidden(tokens, torch.arange(count).unsqueeze(0), step)
        logprobs_TV = torch.log_softmax(self.model.logits(hidden_1TD[0, :-1]), dim=-1)
        return logprobs_TV.gather(1, tokens[0, 1:].unsqueeze(1)).squeeze(1).tolist()
