"""What runs in vLLM's worker process on our behalf: weight updates, and the live weights read back.

vLLM mixes `WorkerExtension` into its worker class; each method is one `collective_rpc`, between two steps.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from slipstream.engine.vllm.draws import seed_draws_by_position
from slipstream.engine.vllm.held import release_held
from slipstream.engine.vllm.live import LiveWeights
from slipstream.engine.vllm.memory_files import write_tensors
from slipstream.engine.vllm.reload import abandon_reload, mend_expert_reload

_PR_SET_PDEATHSIG = 1

mend_expert_reload()


class WorkerExtension:
    """Methods of the worker that our engine calls."""

    model_runner: Any
    reload_weights: Any

    def slipstream_start(self, parent_pid: int) -> None:
        """Get ready; and end with the process that owns the engine, even if it is killed."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)
        seed_draws_by_position(self.model_runner)

    def slipstream_release_kv(self, request_ids: list[str]) -> None:
        """Nobody will read what is held of these prefills. Those that were read are free already, and skipped."""
        release_held(request_ids)

    def slipstream_swap(self, path: str, previous: str | None) -> tuple[str, dict[str, int]]:
        """Replace all weights by those in a file. If that fails go back to the previous file, and say why it failed.

        Returns that reason, or else the tokens that each request here has sampled so far, by vLLM's own ids. Raises if
        there is no way back.
        """
        try:
            self.reload_weights(weights_iterator=_tensors(path))
        except Exception as error:
            abandon_reload(self.model_runner.get_model())
            if previous is not None:
                self.reload_weights(weights_iterator=_tensors(previous))
            return f"{type(error).__name__}: {error}", {}
        return "", {key: len(state.output_token_ids) for key, state in self.model_runner.requests.items()}

    def slipstream_read_back(self, applied: str, target: str) -> None:
        """Write the weights in use to `target`, by the names in the file that was applied."""
        with torch.inference_mode():
            live = LiveWeights(self.model_runner.get_model(), dict(_tensors(applied)))
            write_tensors(target, live.tensors())


def _tensors(path: str) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is no mapping)
            yield name, file.get_tensor(name)
