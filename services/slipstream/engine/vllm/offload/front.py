"""Offloading, as our engine sees it: what a request tells vLLM, salts that end, figures."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from slipstream.common.version import PolicyVersion
from slipstream.engine.base import OffloadLoad
from slipstream.engine.vllm.offload.config import NativeOffloadConfig
from slipstream.engine.vllm.offload.files import BlockFiles
from slipstream.engine.vllm.offload.names import SALT

log = structlog.get_logger()

KEPT_MARKERS = 4096


class Offload:
    """Off if there is no configuration: then each call does nothing."""

    def __init__(self, config: NativeOffloadConfig | None, run_id: str) -> None:
        self._config = config
        self._run_id = run_id
        self._files: BlockFiles | None = None
        self._living = ExitStack()
        self._marked: OrderedDict[tuple[str, PolicyVersion], None] = OrderedDict()

    def start(self) -> None:
        """Take part in the directory; blocks of runs that nobody serves any more are removed."""
        if self._config is not None and self._config.disk_bytes:
            self._files = BlockFiles(Path(self._config.directory), self._config.disk_bytes, b"")
            self._living.callback(self._files.close)
            self._living.enter_context(self._files.living(self._run_id))

    def stop(self) -> None:
        self._living.close()
        self._files = None

    # --- Requests ------------------------------------------------------------------------------------

    def extra_args(self, salt: str, transfer: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Of a request's sampling parameters; `transfer`: what another connector is told of it."""
        told = {} if self._config is None else {SALT: salt}
        told |= transfer or {}
        return {"kv_transfer_params": told} if told else None

    def none_args(self) -> dict[str, Any] | None:
        """Of a request that leaves nothing behind."""
        return None if self._config is None else {"kv_transfer_params": {"max_offload_tokens": 0}}

    def use(self, salt: str, version: PolicyVersion) -> None:
        """Weights of this version will write under the salt."""
        if self._files is None or (salt, version) in self._marked:
            return
        self._files.use(salt, version)
        self._marked[salt, version] = None
        if len(self._marked) > KEPT_MARKERS:
            self._marked.popitem(last=False)

    def oldest_of(self, salt: str, version: PolicyVersion) -> PolicyVersion:
        """The oldest weights behind blocks of a salt: that version, or what others may have written."""
        return version if self._files is None else min(version, self._files.oldest(salt) or version)

    # --- Salts ---------------------------------------------------------------------------------------

    async def end(self, salt: str) -> None:
        """No request will come under the salt, and vLLM knows: remove what is on disk."""
        if self._files is not None and (freed_bytes := await asyncio.to_thread(self._files.end, salt)):
            log.info("offload_salt_ended", salt=salt, freed_bytes=freed_bytes)

    def load(self, told: OffloadLoad) -> OffloadLoad | None:
        """`told`: what came with the last step; others write to the directory meanwhile."""
        if self._files is None:
            return None if self._config is None else told
        return replace(told, disk_bytes=self._files.used_bytes)
