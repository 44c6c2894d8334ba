# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
"""Outputs of vLLM that its caller has not taken yet are merged; the expert routes of the last one got lost in that."""

from __future__ import annotations

from typing import Any

from vllm.outputs import RequestOutput

_MENDED = "_slipstream_mended"


def keep_routes_when_merging() -> None:
    """Carry the routes over, which come with a request's last output only."""
    original: Any = RequestOutput.add
    if hasattr(original, _MENDED):
        return

    def add(self: Any, next_output: Any, aggregate: bool) -> None:
        original(self, next_output, aggregate=aggregate)
        merged = {output.index: output for output in self.outputs}
        for output in next_output.outputs:
            if output.routed_experts is not None:
                merged[output.index].routed_experts = output.routed_experts

    setattr(add, _MENDED, True)
    RequestOutput.add = add  # type: ignore[method-assign]
