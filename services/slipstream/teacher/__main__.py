"""slipstream-teacher @ config.toml

| loop | takes | waits for | who unblocks it |
|---|---|---|---|
| score | sequences that wait, a pass at a time | a call; the torch thread | callers; itself |
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from slipstream.api.inference.v1 import teacher_pb2_grpc
from slipstream.common.runtime import leave, run_service, serve
from slipstream.teacher import telemetry
from slipstream.teacher.config import TeacherConfig
from slipstream.teacher.desk import Desk


async def run(config: TeacherConfig) -> None:
    """Serve until SIGTERM."""
    from slipstream.teacher.scorer import Scorer  # torch takes seconds: not for --help
    from slipstream.teacher.servicer import TeacherServicer

    executor = ThreadPoolExecutor(1, thread_name_prefix="torch")
    scorer = await asyncio.get_running_loop().run_in_executor(executor, Scorer, config)
    desk = Desk(scorer.score, executor, config.max_batch_tokens, config.max_waiting_tokens)
    telemetry.observe(lambda: desk.token_count)
    servicer = TeacherServicer(config, scorer.sizes, desk)
    add = teacher_pb2_grpc.add_TeacherServiceServicer_to_server
    try:
        await serve(config, [(add, servicer, "slipstream.api.inference.v1.TeacherService")], {"score": desk.run})
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def main() -> None:
    run_service("teacher", TeacherConfig, run)
    leave()


if __name__ == "__main__":
    main()
