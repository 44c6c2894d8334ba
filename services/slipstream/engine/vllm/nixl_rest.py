"""Lets NIXL's progress thread wait for its sockets. As it comes it asks them without a pause: a core for each engine.

NIXL's Python interface sets the longest wait to 0 and offers no setting. Sockets and shared memory wake the thread at
once whatever the wait is; what a GPU's own transports bring without waking it is seen a millisecond later at most.
"""

# vLLM and NIXL are not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

import sys
from typing import Any

WAIT_US = 1000
_RESTS = "_slipstream_rests"


def rest_progress_thread() -> None:
    """For the agents of this process, and of those that are forked off it. May be called again."""
    from vllm.distributed.nixl_utils import NixlWrapper

    bindings = sys.modules[NixlWrapper.__module__].nixlBind
    original: Any = bindings.nixlAgentConfig
    if hasattr(original, _RESTS):
        return

    class AgentConfig(original):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, WAIT_US if name == "pthrDelay" else value)

    setattr(AgentConfig, _RESTS, True)
    bindings.nixlAgentConfig = AgentConfig
