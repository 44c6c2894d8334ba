"""slipstream-decode @ config.toml"""

from __future__ import annotations

from slipstream.api.inference.v1 import worker_pb2
from slipstream.common.auth import Access
from slipstream.common.runtime import leave, run_service
from slipstream.decode.config import DecodeConfig
from slipstream.decode.kv_client import KvClient
from slipstream.decode.servicer import decode_servicers
from slipstream.engine.worker.worker import Worker


async def run(config: DecodeConfig) -> None:
    """Serve until SIGTERM."""
    from slipstream.engine.worker.process import Pool, run_worker  # torch takes seconds: not for --help

    def build_pool(worker: Worker, access: Access) -> Pool:
        limits = worker.engine.limits
        limit_bytes = limits.max_context_tokens * limits.kv_bytes_per_token
        addresses = {worker.address for worker in config.prefill_workers}
        kv = KvClient(access, addresses, config.kv_timeout_s, limit_bytes)
        loops = {"release_kv": lambda: kv.release_for_ever(config.kv_release_interval_s)}
        return Pool(decode_servicers(worker, kv), loops, kv.close)

    await run_worker(config, worker_pb2.WORKER_ROLE_DECODE, build_pool)


def main() -> None:
    run_service("decode", DecodeConfig, run)
    leave()


if __name__ == "__main__":
    main()
