"""slipstream-teacher @ config.toml

| loop | takes | waits for | who unblocks it |
|---|---|---|---|
| score | sequences that wait, a pass at a time | a call; the engine | callers; itself |
| engine (vLLM) | nothing | its clock; raises once vLLM's process is gone | time |
"""

from __future__ import annotations

from slipstream.api.inference.v1 import teacher_pb2_grpc
from slipstream.common.runtime import leave, run_service, serve
from slipstream.teacher import telemetry
from slipstream.teacher.config import TeacherConfig
from slipstream.teacher.desk import Desk
from slipstream.teacher.engines import start_engine
from slipstream.teacher.servicer import TeacherServicer
from slipstream.teacher.trial import check_teacher


async def run(config: TeacherConfig) -> None:
    """Serve until SIGTERM."""
    engine = await start_engine(config)
    try:
        await check_teacher(engine.score, engine.bounds, config.teacher_model)
        desk = Desk(engine.score, config.max_batch_tokens, config.max_waiting_tokens)
        telemetry.observe(lambda: desk.token_count)
        servicer = TeacherServicer(config, engine.bounds, desk)
        add = teacher_pb2_grpc.add_TeacherServiceServicer_to_server
        served = [(add, servicer, "slipstream.api.inference.v1.TeacherService")]
        await serve(config, served, {"score": desk.run, **engine.loops})
    finally:
        await engine.stop()


def main() -> None:
    run_service("teacher", TeacherConfig, run)
    leave()


if __name__ == "__main__":
    main()
