"""Metrics of a prefill or decode worker."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import Counter, Histogram

from slipstream.common.metrics import Reading
from slipstream.common.version import PolicyVersion
from slipstream.engine.base import Engine, OffloadLoad

running_samples = Reading("gauge", "slipstream_worker_running_samples", "Samples being decoded.")
waiting_requests = Reading("gauge", "slipstream_worker_waiting_requests", "Requests that have not begun.")
tokens_in_flight = Reading("gauge", "slipstream_worker_tokens_in_flight", "Tokens of running samples, with prompts.")
blocks_used = Reading("gauge", "slipstream_worker_kv_blocks_used", "KV blocks held by requests, transfers or samples.")
blocks_total = Reading("gauge", "slipstream_worker_kv_blocks_limit", "KV blocks in all.")
prefilled_tokens = Reading("counter", "slipstream_worker_prefilled_tokens", "Prompt positions computed.")
decoded_tokens = Reading("counter", "slipstream_worker_decoded_tokens", "Tokens sampled.")
decode_steps = Reading("counter", "slipstream_worker_decode_steps", "Decode steps; tokens by steps is the batch.")
prefix_query_tokens = Reading("counter", "slipstream_worker_prefix_query_tokens", "Prompt positions looked up.")
prefix_hit_tokens = Reading("counter", "slipstream_worker_prefix_hit_tokens", "Those found in the prefix cache.")
route_bytes = Reading("gauge", "slipstream_worker_route_bytes", "Bytes of routes kept for the trainer.")
preemptions = Reading("counter", "slipstream_worker_preemptions", "Samples that lost their KV to others.")
routes_dropped = Reading("counter", "slipstream_worker_routes_dropped_rows", "Routes given up at the byte bound.")
dead_kv_bytes = Reading("gauge", "slipstream_worker_dead_kv_bytes", "KV that stays under salts that have ended.")
offload_query_tokens = Reading(
    "counter", "slipstream_worker_offload_query_tokens", "Prompt positions looked up in the offload tiers."
)
offload_hit_tokens = Reading("counter", "slipstream_worker_offload_hit_tokens", "Those found in the offload tiers.")
offload_held_bytes = Reading(
    "gauge", "slipstream_worker_offload_held_bytes", "KV held in a tier; the disk's is of all its users.", ["tier"]
)
offload_dead_bytes = Reading(
    "gauge", "slipstream_worker_offload_dead_bytes", "KV in the offload tiers under salts that have ended."
)
offload_moved_bytes = Reading(
    "counter",
    "slipstream_worker_offload_moved_bytes",
    "KV written to disk and to a store that hosts share, and read from there.",
    ["tier", "direction"],
)
offload_lost_blocks = Reading(
    "counter",
    "slipstream_worker_offload_lost_blocks",
    "Blocks that were damaged or foreign (rejected), or could not be written (failed).",
    ["reason"],
)
policy_step = Reading("gauge", "slipstream_worker_policy_step", "Step of the weights in use; -1 before the first.")
engine_silent = Reading(
    "gauge", "slipstream_worker_engine_silent_seconds", "Since the engine's last sign of life, above its bound; else 0."
)
stale = Reading("gauge", "slipstream_worker_stale", "1 while the weights failed their check and nothing is taken.")

logprobs_unknown = Counter(
    "slipstream_worker_logprobs_unknown", "Sampled tokens whose log-probability was no number or above 0."
)
rows_sent_bytes = Counter("slipstream_worker_rows_sent_bytes", "Bytes of expert routes handed to whoever asked.")
kv_sent_bytes = Counter("slipstream_worker_kv_sent_bytes", "Bytes of KV handed to decode workers.")
weights_fetched_bytes = Counter(
    "slipstream_worker_weights_fetched_bytes", "Bytes of weights that came, by how they came.", ["transport"]
)
weights_fetch = Histogram(
    "slipstream_worker_weights_fetch_seconds",
    "Time for one version of the weights to come and be checked.",
    ["transport"],
    buckets=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
)
update_pause = Histogram(
    "slipstream_worker_update_pause_seconds",
    "From the last step on old weights to the first on new ones.",
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0),
)


def weights_fetched(transport: str, size_bytes: int, seconds: float) -> None:
    """A version came by a transport; by grpc also where another is configured, as its bytes were published so."""
    weights_fetched_bytes.labels(transport).inc(size_bytes)
    weights_fetch.labels(transport).observe(seconds)


def observe(engine: Engine, version: Callable[[], PolicyVersion], is_stale: Callable[[], bool]) -> None:
    """Read this worker from now on."""
    for reading, field in (
        (running_samples, "running_samples"),
        (waiting_requests, "waiting_requests"),
        (tokens_in_flight, "tokens_in_flight"),
        (blocks_used, "blocks_used"),
        (blocks_total, "blocks_total"),
        (prefilled_tokens, "prefilled_tokens"),
        (decoded_tokens, "decoded_tokens"),
        (decode_steps, "decode_steps"),
        (prefix_query_tokens, "prefix_query_tokens"),
        (prefix_hit_tokens, "prefix_hit_tokens"),
        (route_bytes, "route_bytes"),
        (preemptions, "preemptions"),
        (routes_dropped, "routes_dropped"),
        (dead_kv_bytes, "dead_kv_bytes"),
    ):
        reading.read_from(lambda field=field: getattr(engine.load(), field))
    if engine.load().offload is not None:
        _observe_offload(lambda: engine.load().offload or OffloadLoad())
    policy_step.read_from(lambda: version().step if version() else -1)
    stale.read_from(is_stale)
    engine_silent.read_from(lambda: engine.silent_s)


def _observe_offload(load: Callable[[], OffloadLoad]) -> None:
    offload_query_tokens.read_from(lambda: load().query_tokens)
    offload_hit_tokens.read_from(lambda: load().hit_tokens)
    offload_held_bytes.read_from(lambda: {"memory": load().memory_bytes, "disk": load().disk_bytes})
    offload_dead_bytes.read_from(lambda: load().dead_bytes)
    offload_moved_bytes.read_from(
        lambda: {
            ("disk", "written"): load().disk_written_bytes,
            ("disk", "read"): load().disk_read_bytes,
            ("store", "written"): load().store_written_bytes,
            ("store", "read"): load().store_read_bytes,
        }
    )
    offload_lost_blocks.read_from(lambda: {"rejected": load().rejected_blocks, "failed": load().failed_blocks})
