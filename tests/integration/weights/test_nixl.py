"""NIXL's transfers and threads end when they are said to."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

PEER = Path(__file__).with_name("nixl_peer.py")
TIMEOUT_S = 150


async def told_by(what: str, **environment: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, PEER, what, stdout=asyncio.subprocess.PIPE, env={**os.environ, **environment}
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    finally:
        if process.returncode is None:
            process.kill()
    return json.loads(out.splitlines()[-1])


async def test_a_transfer_that_was_given_up_writes_nothing_more_and_the_next_version_is_read():
    """Over TCP, as between two hosts: memory of the same host is read without the peer."""
    told = await told_by("read", UCX_TLS="tcp,self")
    assert told == {"ended": "deadline", "late_bytes": 0, "next_bytes": 64 << 20}


async def test_closing_both_ends_ends_their_threads():
    told = await told_by("close")
    assert told["began"] > 0
    assert told["left"] == []
    assert told["read_bytes"] == 64 << 20
