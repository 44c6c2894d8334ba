"""What tracing costs: processor time of a call with a span on both ends, as a ratio to the same call without.

    python loadtests/tracing.py [--calls 1000] [--out figures.jsonl]

A real server and a real channel, both in this process; calls with tracing off, of a rollout that is not among the
recorded share, with every span written to a file, with each of them written by itself, and of a request that `SHARED`
rollouts share, which is in the trace of each, in turns. The least of the rounds counts, in processor time: that hardly
depends on what else the machine does. Asserted: a call that is traced costs at most `MOST` times one that is not. The
machine's caches are others' too, so on a busy one two rounds of the same differ by a tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "services"))

from slipstream.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from slipstream.common import tracing
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.config import ServiceConfig
from slipstream.common.runtime import build_server
from slipstream.common.timeline import TimelineFile

MOST = 1.75
ROUNDS = 5
KINDS: dict[str, dict[str, Any]] = {
    "off": {"share": 0.0},
    "not recorded": {"share": 1e-9},
    "recorded": {"share": 1.0},
    "each by itself": {"share": 1.0, "batch_spans": 1},
    "shared": {"share": 1.0},
}
SHARED = 8


class Desk(rollout_pb2_grpc.RolloutServiceServicer):
    """Answers at once."""

    async def GetSession(self, request: rollout_pb2.GetSessionRequest, context: Any) -> rollout_pb2.GetSessionResponse:
        return rollout_pb2.GetSessionResponse()


def opened(number: int, rollouts: int) -> Any:
    """The span that a call is made in, as the runner opens it."""
    name = f"train-{number}", 1, 1
    roots = {f"train-{number}.1.{index}": tracing.rollout_trace(*name, index) for index in range(rollouts)}
    if rollouts == 1:
        return tracing.span("turn", next(iter(roots.values())), samples=1)
    copies = {rollout_id: root for rollout_id, root in roots.items() if root is not None}
    return tracing.span("turn", tracing.group_trace(*name), copies, samples=rollouts)


async def round_us(stub: rollout_pb2_grpc.RolloutServiceStub, calls: int, rollouts: int = 1) -> float:
    """Processor time of a call, in microseconds."""
    began_s = time.process_time()
    for number in range(calls):
        with opened(number, rollouts):
            await stub.GetSession(rollout_pb2.GetSessionRequest(session_id="s"), timeout=30)  # pyright: ignore
    return (time.process_time() - began_s) / calls * 1e6


async def measure(calls: int, directory: Path) -> dict[str, float]:
    """Microseconds of a call, by what is recorded of it."""
    config = ServiceConfig(run_id="tracing", run_dir=directory)
    server, port = build_server(config, [(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, Desk(), "")])
    await server.start()
    file = TimelineFile(directory / "timeline" / "loadtest.jsonl")
    least: dict[str, float] = {}
    try:
        async with open_channel(f"127.0.0.1:{port}", Access()) as channel:
            stub = rollout_pb2_grpc.RolloutServiceStub(channel)
            await round_us(stub, calls // 10 + 1)
            for _ in range(ROUNDS):
                for name, settings in KINDS.items():
                    tracing.use(tracing.Tracer("tracing", file=file, **settings))
                    rollouts = SHARED if name == "shared" else 1
                    least[name] = min(least.get(name, float("inf")), await round_us(stub, calls, rollouts))
    finally:
        tracing.use(tracing.Tracer("", 0.0))
        await server.stop(None)
    return least


def figures(calls: int) -> dict[str, float]:
    """What is written and asserted on."""
    with tempfile.TemporaryDirectory() as directory:
        least = asyncio.run(measure(calls, Path(directory)))
    off = least["off"]
    return {
        "call_us": round(off, 1),
        "recorded_ratio": round(least["recorded"] / off, 3),
        "unrecorded_ratio": round(least["not recorded"] / off, 3),
        "each_by_itself_ratio": round(least["each by itself"] / off, 3),
        "rollout_sharing_us": round((least["shared"] - least["recorded"]) / SHARED, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=1000, help="of a round")
    parser.add_argument("--out", type=Path, help="append the figures to this file")
    arguments = parser.parse_args()
    found = figures(arguments.calls)
    print(json.dumps(found))
    if arguments.out is not None:
        with arguments.out.open("a") as out:
            out.write(json.dumps(found) + "\n")
    assert found["recorded_ratio"] <= MOST, "tracing costs more than it may"


if __name__ == "__main__":
    main()
