"""slipstream-prefill @ config.toml"""

from __future__ import annotations

import asyncio

from slipstream.api.inference.v1 import worker_pb2
from slipstream.common.config import cli
from slipstream.common.runtime import leave
from slipstream.common.telemetry import setup_logging
from slipstream.engine.worker.worker import Worker
from slipstream.prefill.config import PrefillConfig
from slipstream.prefill.servicer import prefill_servicers


def main() -> None:
    config = cli(PrefillConfig)
    setup_logging(config, "prefill")
    from slipstream.engine.worker.process import Pool, run_worker  # torch takes seconds: not for --help

    def build_pool(worker: Worker, token: str | None) -> Pool:
        return Pool(prefill_servicers(worker, config.engine.transfer_ttl_s))

    asyncio.run(run_worker(config, worker_pb2.WORKER_ROLE_PREFILL, build_pool))
    leave()


if __name__ == "__main__":
    main()
