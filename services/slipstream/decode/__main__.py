"""slipstream-decode @ config.toml"""

from __future__ import annotations

import asyncio

from slipstream.api.inference.v1 import worker_pb2
from slipstream.common.config import cli
from slipstream.common.runtime import leave
from slipstream.common.telemetry import setup_logging
from slipstream.decode.config import DecodeConfig
from slipstream.decode.kv_client import KvClient
from slipstream.decode.servicer import decode_servicers
from slipstream.engine.worker.worker import Worker


def main() -> None:
    config = cli(DecodeConfig)
    setup_logging(config, "decode")
    from slipstream.engine.worker.process import Pool, run_worker  # torch takes seconds: not for --help

    def build_pool(worker: Worker, token: str | None) -> Pool:
        limits = worker.engine.limits
        limit_bytes = limits.max_context_tokens * limits.kv_bytes_per_token
        kv = KvClient(token, limits.block_size_tokens, config.kv_timeout_s, limit_bytes)
        loops = {"release_kv": lambda: kv.release_for_ever(config.kv_release_interval_s)}
        return Pool(decode_servicers(worker, kv), loops, kv.close)

    asyncio.run(run_worker(config, worker_pb2.WORKER_ROLE_DECODE, build_pool))
    leave()


if __name__ == "__main__":
    main()
