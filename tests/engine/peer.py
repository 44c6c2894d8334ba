"""A vLLM prefill engine in a process of its own, to be killed: `python -m tests.engine.peer MODEL DEVICE DTYPE ...`.

It computes each prompt that comes in as a line of JSON, and answers with the reference to its KV, leased.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from slipstream.common.processes import with_children
from slipstream.common.version import PolicyVersion
from slipstream.engine.base import KvReference, PrefillRequest
from tests import standstill
from tests.engine.engines import Vllm
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 150.0


class Peer:
    """The other side of the pipe."""

    def __init__(self, model_dir: Path, kind: Vllm, port: int = 0) -> None:
        self._model_dir = model_dir
        self._kind = kind
        self.port = port or free_port()

    async def __aenter__(self) -> Peer:
        options = (self._kind.device, self._kind.dtype, self._kind.connector, str(self.port))
        command = (sys.executable, "-m", "tests.engine.peer", str(self._model_dir), *options)
        path = os.pathsep.join((str(ROOT / "services"), str(ROOT), os.environ.get("PYTHONPATH", "")))  # the same vLLM
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        async with asyncio.timeout(START_TIMEOUT_S):
            assert await self._answer() == "ready"
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process.returncode is None:
            self.kill()
        await self._process.wait()

    async def prefill(self, prompt: list[int]) -> KvReference:
        """The KV of a prompt, held there and leased to the caller."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(prompt).encode() + b"\n")
        async with asyncio.timeout(60):
            fields = await self._answer()
        versions = {name: PolicyVersion(*fields.pop(name)) for name in ("version", "oldest_version")}
        return KvReference(**{**fields, "params": fields["params"].encode(), **versions})

    def freeze(self) -> None:
        """It answers nothing any more, and its connections stay."""
        standstill.stop(*with_children(self._process.pid))

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)

    async def _answer(self) -> Any:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            if line.startswith(b">"):  # vLLM prints too
                return json.loads(line[1:])
        raise AssertionError(f"the prefill engine ended: {await self._process.wait()}")


async def _serve(model_dir: Path, device: str, dtype: str, connector: str, port: int) -> None:
    from tests.engine.engines import Limits
    from tests.engine.oracle import tensors

    kind = Vllm(device, dtype, connector, port)  # type: ignore[arg-type]
    engine = await kind.build(model_dir, Limits(), tensors(1))
    _say("ready")
    number = 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        number += 1
        prompt = json.loads(line)
        await engine.prefill(PrefillRequest(f"peer-{number}", prompt, f"peer-salt-{number}"))
        reference = engine.lease_kv(f"peer-{number}")
        _say({**asdict(reference), "params": reference.params.decode()})
    await engine.stop()


def _say(answer: Any) -> None:
    print(">" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: gone with the tests, even while it stands still
    model, device, dtype, connector, port = sys.argv[1:]
    asyncio.run(_serve(Path(model), device, dtype, connector, int(port)))
