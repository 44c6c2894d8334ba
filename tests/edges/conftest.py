"""One stack for all tests of this directory: `slipstream up` with a run that trains as long as they last."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest
from run_process import PREFILLING, launching
from stack import REPLICAS, Stack

SEED = int(os.environ.get("SLIPSTREAM_EDGES_SEED", "1"))


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with launching(tmp_path_factory.mktemp("edges")) as start:
        run = start("edges", *PREFILLING, "--orchestrator.total-steps", "100000", command="up")
        run.wait_up()
        run.wait_step(2)
        under_fire = Stack(run, SEED)
        asyncio.run(under_fire.discover())
        assert asyncio.run(under_fire.pause()) == {}
        under_fire.rested = under_fire.vitals()
        asyncio.run(under_fire.go_on())
        under_fire.silent_clients = [under_fire.call_silently(replica, 20) for replica in REPLICAS]
        yield under_fire
        for client in under_fire.silent_clients:
            client.close()
