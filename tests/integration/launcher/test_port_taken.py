"""A port of the run that somebody else has taken since it was picked."""

from __future__ import annotations

import asyncio
import re
import socket
import sys

import pytest

from slipstream.launcher.errors import ServiceDiedError
from slipstream.launcher.process import ProcessSpec
from slipstream.launcher.supervisor import Supervisor


async def test_a_service_whose_port_is_taken_ends_the_run_with_a_sentence(tmp_path):
    async def never() -> bool:
        return False

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        flags = ("--listen.port", str(port), "--run-dir", str(tmp_path), "--log.file", str(tmp_path / "log"))
        command = (sys.executable, "-m", "slipstream.broadcaster", *flags)
        supervisor = Supervisor()
        spec = ProcessSpec("broadcaster", command, tmp_path / "log", tmp_path / "out", never)
        with pytest.raises(ServiceDiedError) as caught:
            await asyncio.wait_for(supervisor.start([spec]), 100)
        await supervisor.stop()
    assert re.fullmatch(
        rf"broadcaster died \(exited with code 1\): cannot listen on 127\.0\.0\.1:{port}: address already in use; "
        rf"its log is {tmp_path}/log \(and out\)",
        str(caught.value),
    )
