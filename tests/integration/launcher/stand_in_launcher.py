"""A launcher of tiny processes, run by the tests as a process of its own.

python stand_in_launcher.py DIRECTORY RESTART STOP_TIMEOUT_S NAME=CODE...

A service is ready once it has made the file READY, which its code finds in a variable of that name.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from slipstream.launcher.process import ProcessSpec
from slipstream.launcher.session import conduct
from slipstream.launcher.supervisor import RestartPolicy, Supervisor


def main() -> None:
    directory, restart, stop_timeout_s, services = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4:]
    events = (directory / "events.jsonl").open("a", buffering=1)
    policy: RestartPolicy = "on_failure" if restart == "on_failure" else "never"
    supervisor = Supervisor(
        restart=policy,
        restart_budget=2,
        backoff_s=0.05,
        stop_timeout_s=stop_timeout_s,
        on_event=lambda kind, **fields: print(json.dumps({"kind": kind, **fields}), file=events),
    )
    specs = []
    for service in services:
        name, _, code = service.partition("=")
        marker = directory / f"{name}.ready"

        async def ready(marker: Path = marker) -> bool:
            return marker.exists()

        code = f"import pathlib; READY = pathlib.Path({str(marker)!r})\n{code}"
        specs.append(
            ProcessSpec(
                name,
                (sys.executable, "-c", code),
                directory / f"{name}.log",
                directory / f"{name}.out",
                ready,
                always_restart=name == "valkey",
                resumable=name != "trainer",
                group="ranks" if name.startswith("rank") else "",
                stops_last=name == "valkey",
            )
        )

    async def work() -> None:
        print("ready", flush=True)
        await asyncio.sleep(3600)

    ending = asyncio.run(conduct(supervisor, [specs], work))
    print(ending.sentence, flush=True)
    sys.exit(ending.exit_code)


if __name__ == "__main__":
    main()
