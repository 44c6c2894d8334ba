"""slipstream-prefill @ config.toml"""

from __future__ import annotations

from slipstream.api.inference.v1 import worker_pb2
from slipstream.common.auth import Access
from slipstream.common.runtime import leave, run_service
from slipstream.engine.worker.worker import Worker
from slipstream.prefill.config import PrefillConfig
from slipstream.prefill.servicer import prefill_servicers


async def run(config: PrefillConfig) -> None:
    """Serve until SIGTERM."""
    from slipstream.engine.worker.process import Pool, run_worker  # torch takes seconds: not for --help

    def build_pool(worker: Worker, access: Access) -> Pool:
        return Pool(prefill_servicers(worker, config.engine.transfer_ttl_s))

    await run_worker(config, worker_pb2.WORKER_ROLE_PREFILL, build_pool)


def main() -> None:
    run_service("prefill", PrefillConfig, run)
    leave()


if __name__ == "__main__":
    main()
