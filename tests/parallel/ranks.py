"""The ranks' side of the pool: imports torch once, then forks the ranks, each of which runs jobs until its line closes.
One rank alone is the process itself.

    python -m parallel.ranks FD...     # one socket a rank

A job is a line of JSON, `{"name", "rank", "ranks", "store", "collective_timeout_s", "device", "arguments"}`, and names
a function of `jobs.py`. The ranks of a job make a process group of their own, so that jobs of any size run in one pool.
The answer is a line too.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import sys
import traceback

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from parallel import jobs
from slipstream.trainer.compute import device_of
from slipstream.trainer.config import ComputeConfig
from slipstream.trainer.parallel.backend import backend_of, prepare


def run(job: dict) -> dict:
    """Run one job in a process group of its own."""
    timeout = datetime.timedelta(seconds=job["collective_timeout_s"])
    store = FileStore(job["store"], job["ranks"])
    jobs.DEVICE = device_of(ComputeConfig(device=job["device"]), job["rank"])
    try:
        prepare(jobs.DEVICE)
        dist.init_process_group(
            backend_of(jobs.DEVICE), store=store, rank=job["rank"], world_size=job["ranks"], timeout=timeout
        )
        return {"answer": getattr(jobs, job["name"])(**job["arguments"])}
    except Exception:  # whatever it is, the test shows it
        return {"error": traceback.format_exc()}


def serve(line: socket.socket) -> None:
    torch.set_num_threads(1)
    with line.makefile("rw") as file:
        for job in file:
            file.write(json.dumps(run(json.loads(job))) + "\n")
            file.flush()
            if dist.is_initialized():  # which may wait for ranks that are lost
                dist.destroy_process_group()


def main() -> None:
    lines = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]
    if len(lines) == 1:
        serve(lines[0])
        os._exit(0)
    for own in lines:
        if os.fork() == 0:
            for other in lines:
                if other is not own:
                    other.close()
            serve(own)
            os._exit(0)
    for line in lines:
        line.close()
    for _ in lines:
        os.wait()


if __name__ == "__main__":
    main()
