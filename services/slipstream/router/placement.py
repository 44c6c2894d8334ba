"""The placement policy: prefix affinity until a worker is saturated, then load. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from slipstream.common.errors import NoWorker, PoolSaturated
from slipstream.common.rank_groups import in_whole_groups
from slipstream.common.version import PolicyVersion
from slipstream.router.pool import Worker


@dataclass(frozen=True)
class Demand:
    """What one turn of a group asks of a worker."""

    block_hashes: Sequence[int]
    sample_count: int
    min_version: PolicyVersion
    avoid_replicas: Collection[str] = ()
    prompt_token_count: int = 0


@dataclass(frozen=True)
class PlacementPolicy:
    """Limits of the policy; see RouterConfig for their meaning."""

    silence_s: float
    saturation_fraction: float
    affinity_slack_samples: int
    remote_prefill_min_uncached_tokens: int = 0

    def place(
        self, prefill_pool: Sequence[Worker], decode_pool: Sequence[Worker], demand: Demand, now_s: float
    ) -> tuple[Worker | None, Worker]:
        """Pick both workers of a turn. No prefill worker: the decode worker computes the prompt itself.

        The last token of a prompt counts for nothing: decode computes it in any case.
        """
        decode = self.choose("decode", decode_pool, demand, now_s)
        uncached = demand.prompt_token_count - 1 - decode.cached_tokens(demand.block_hashes)
        if not prefill_pool or uncached < self.remote_prefill_min_uncached_tokens:
            return None, decode
        return self.choose("prefill", prefill_pool, replace(demand, sample_count=1), now_s), decode

    def choose(self, pool_name: str, workers: Sequence[Worker], demand: Demand, now_s: float) -> Worker:
        """Pick the worker of one pool.

        Never one that is stale, silent or below the asked version, however idle it is, nor a rank of a group that has
        one. Replicas to avoid are offered only when nothing else is left.

        Raises:
            NoWorker: no worker of the pool can serve the version.
            PoolSaturated: all that can are full.
        """
        able = [
            worker
            for worker in in_whole_groups(workers, lambda worker: worker.routable(now_s, self.silence_s))
            if worker.version >= demand.min_version
        ]
        if not able:
            raise NoWorker(
                f"no routable {pool_name} worker serves {demand.min_version} or newer",
                pool=pool_name,
                min_policy_version=str(demand.min_version),
            )
        free = [worker for worker in able if not worker.saturated(demand.sample_count, self.saturation_fraction)]
        if not free:
            # A group bigger than a worker's slots could never be placed; an idle worker queues it.
            free = [worker for worker in able if worker.busy_samples == 0]
        if not free:
            raise PoolSaturated(
                f"all {len(able)} {pool_name} workers are full (router.saturation_fraction)",
                pool=pool_name,
                name="router.saturation_fraction",
                limit=self.saturation_fraction,
            )
        wanted = [worker for worker in free if worker.replica not in demand.avoid_replicas] or free
        least_busy = min(worker.busy_samples for worker in wanted)
        near = [worker for worker in wanted if worker.busy_samples <= least_busy + self.affinity_slack_samples]
        return max(
            near,
            key=lambda worker: (
                worker.prefix.matched_blocks(demand.block_hashes),
                -worker.busy_samples,
                -worker.placement_count,
            ),
        )
