"""NIXL in processes of its own: engines are forked from that of the tests, in which its threads must not have begun.

python nixl_peer.py lend     lends 64 MiB of ones: prints the loan, waits for the end of its input
python nixl_peer.py read     reads what such a process lends that stands still, until the deadline, then lets it go on
python nixl_peer.py close    reads, and closes both ends
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from slipstream.api.broadcast.v1 import broadcast_pb2
from slipstream.common.errors import DeadlineExceeded
from slipstream.weights.straight.links import Run
from slipstream.weights.straight.memory import Memory
from slipstream.weights.straight.nixl import NixlLender, NixlReader
from tests import standstill

CPU = torch.device("cpu")
SIZE_BYTES = 64 << 20


def lent() -> tuple[NixlLender, Memory, broadcast_pb2.BorrowShardResponse]:
    lender = NixlLender(CPU)
    memory = lender.allocate(SIZE_BYTES)
    memory.data.fill_(1)
    return lender, memory, lender.offer(memory, SIZE_BYTES, "reader")


def lend() -> None:
    lender, memory, offer = lent()
    print(json.dumps(base64.b64encode(offer.SerializeToString()).decode()), flush=True)
    sys.stdin.read()
    lender.close()
    memory.close()


def loan_of(process: subprocess.Popen[str]) -> broadcast_pb2.BorrowShardResponse:
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith('"'))  # NIXL says things, too
    return broadcast_pb2.BorrowShardResponse.FromString(base64.b64decode(json.loads(line)))


def read() -> dict[str, object]:
    """A peer that stood still goes on when the reader has given up: how much it writes then."""
    process = subprocess.Popen(
        [sys.executable, __file__, "lend"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    target = torch.zeros(SIZE_BYTES, dtype=torch.uint8)
    reader = NixlReader(CPU)
    try:
        loan = loan_of(process)
        standstill.stop(process.pid)
        try:
            reader.read(loan, [Run(0, 0, SIZE_BYTES)], target, "reader", time.monotonic() + 1)
            ended = "done"
        except DeadlineExceeded:
            ended = "deadline"
        process.send_signal(signal.SIGCONT)
        time.sleep(2)
        late_bytes = int(target.sum())
        reader.read(loan, [Run(0, 0, SIZE_BYTES)], target, "reader", time.monotonic() + 60)
        return {"ended": ended, "late_bytes": late_bytes, "next_bytes": int(target.sum())}
    finally:
        process.kill()
        process.wait()
        reader.close()


def close() -> dict[str, object]:
    torch.zeros(1 << 20).sum()
    before = threads()
    lender, memory, loan = lent()
    reader = NixlReader(CPU)
    target = torch.zeros(SIZE_BYTES, dtype=torch.uint8)
    reader.read(loan, [Run(0, 0, SIZE_BYTES)], target, "reader", time.monotonic() + 60)
    during = threads()
    reader.close()
    lender.close()
    memory.close()
    deadline_s = time.monotonic() + 30
    while threads() != before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return {"began": len(during - before), "left": sorted(threads() - before), "read_bytes": int(target.sum())}


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


if __name__ == "__main__":
    told = {"lend": lend, "read": read, "close": close}[sys.argv[1]]()
    if told is not None:
        print(json.dumps(told), flush=True)
