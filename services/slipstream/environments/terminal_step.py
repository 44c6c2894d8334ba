"""Runs inside the sandbox: one command of a shell in a working directory that outlives it. Standard library only.

Programs of a sandbox share nothing but the files under /files, which they cannot write. So each begins with the working
directory as the one before left it, /files/work.tar, and ends by printing what became of it: a line of JSON, then the
directory as the next one gets it.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import signal
import subprocess
import sys
import tarfile

WORK = "/tmp/work"
STATE = "/files/work.tar"
PR_SET_DUMPABLE = 4


def main() -> None:
    request = json.load(sys.stdin)
    os.makedirs(WORK)
    if os.path.exists(STATE):
        with tarfile.open(STATE) as archive:
            archive.extractall(WORK, filter="tar")
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # the command cannot trace this process
    with open("/tmp/output", "w+b") as output:
        shell = subprocess.Popen(
            ["bash", "-c", request["command"]],
            cwd=WORK,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = shell.wait(request["wall_s"])
        except subprocess.TimeoutExpired:
            code = None
        try:
            os.killpg(shell.pid, signal.SIGKILL)
        except ProcessLookupError:
            output.flush()  # nothing of it is left
        output.seek(0)
        said = output.read(request["output_bytes"] + 1)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(WORK, ".")
    shown = said[: request["output_bytes"]].decode(errors="replace")
    told = {"exit_code": code, "output": shown, "cut": len(said) > request["output_bytes"]}
    sys.stdout.buffer.write(json.dumps(told).encode() + b"\n" + packed.getvalue())


if __name__ == "__main__":
    main()
