"""What runs in vLLM's worker process on our behalf: weight updates, and the live weights read back.

vLLM mixes `WorkerExtension` into its worker class; each method is one `collective_rpc`, between two steps.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from typing import Any

import torch
import vllm

from slipstream.api.broadcast.v1 import broadcast_pb2
from slipstream.engine.vllm.arena import Arena, TensorMemory
from slipstream.engine.vllm.draws import seed_draws_by_position
from slipstream.engine.vllm.held import release_held
from slipstream.engine.vllm.latent import cut_again
from slipstream.engine.vllm.layout import Layout
from slipstream.engine.vllm.live import LiveWeights, own_groups
from slipstream.engine.vllm.reload import abandon_reload, mend_expert_reload, prepare_tied_head
from slipstream.engine.vllm.staging import Stage, free_bytes
from slipstream.engine.vllm.versions import version_of
from slipstream.weights.manifest import Manifest
from slipstream.weights.straight.receiver import Receiver

_PR_SET_PDEATHSIG = 1

mend_expert_reload()
if torch.version.cuda is None:
    from slipstream.engine.vllm.cpu_ranks import mend_cpu_ranks

    mend_cpu_ranks()
if not version_of(vllm.__version__).routes_by_slot:
    from slipstream.engine.vllm.step_rows import mend_capture, mend_cpu_capture

    mend_cpu_capture() if torch.version.cuda is None else mend_capture()


class WorkerExtension:
    """Methods of the worker that our engine calls."""

    model_runner: Any
    device: torch.device
    reload_weights: Any
    _arenas: dict[str, TensorMemory]
    _receiver: Receiver
    _pinning: dict[str, threading.Thread]

    def slipstream_start(self, parent_pid: int) -> None:
        """Get ready; and end with the process that owns the engine, even if it is killed."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)
        self._arenas, self._pinning = {}, {}
        self._receiver = Receiver(self.device)
        if hasattr(self.model_runner, "input_batch"):
            seed_draws_by_position(self.model_runner)  # the newer runner draws so by itself

    def slipstream_alive(self) -> None:
        """A sign of life: this worker is between two steps."""

    def slipstream_release_kv(self, request_ids: list[str]) -> list[str]:
        """Nobody will read what is held of these prefills. Returns those to ask for again."""
        return release_held(request_ids)

    def slipstream_attach(self, path: str, shapes: dict[str, list[int]], dtype: str) -> None:
        """Open memory that weights will be read from. It is made ready for that meanwhile, while steps go on."""
        if path in self._arenas:
            return
        layout = Layout.of({name: tuple(shape) for name, shape in shapes.items()}, dtype)
        arena = self._arenas[path] = Arena(layout, path)
        thread = self._pinning[path] = threading.Thread(target=_make_ready, args=(arena, self.device), daemon=True)
        thread.start()

    def slipstream_attached(self, path: str) -> bool:
        """Whether what `slipstream_attach` began is done."""
        thread = self._pinning.get(path)
        return thread is None or not thread.is_alive()

    def slipstream_room(self) -> int:
        """Bytes that are free on this device beside weights and KV."""
        return free_bytes(self.device)

    def slipstream_receive(
        self,
        path: str,
        shapes: dict[str, list[int]],
        dtype: str,
        manifest: bytes,
        loans: list[bytes],
        reader: str,
        timeout_s: float,
    ) -> bool:
        """Begin to read a version into memory of this device, while steps go on. False if that has no end yet."""
        stage = self._arenas.get(path)
        if not isinstance(stage, Stage):
            layout = Layout.of({name: tuple(shape) for name, shape in shapes.items()}, dtype)
            stage = self._arenas[path] = Stage(layout, self.device)
        described = Manifest.from_proto(broadcast_pb2.Manifest.FromString(manifest))
        return stage.fill_from(self._receiver, described, loans, reader, timeout_s)

    def slipstream_received(self, path: str) -> tuple[str, str, float, float] | None:
        """What came of `slipstream_receive`, as `Stage.outcome` has it."""
        stage = self._arenas[path]
        assert isinstance(stage, Stage)
        return stage.outcome()

    def slipstream_swap(self, path: str, previous: str | None) -> tuple[str, dict[str, int]]:
        """Replace all weights by those in an arena. If that fails go back to the previous one, and say why it failed.

        Returns that reason, or else the tokens that each request here has sampled so far, by vLLM's own ids. Raises if
        there is no way back.
        """
        try:
            self._load(self._arenas[path])
        except Exception as error:
            abandon_reload(self.model_runner.get_model())
            if previous is not None:
                self._load(self._arenas[previous])
            return f"{type(error).__name__}: {error}", {}
        return "", sampled_counts(self.model_runner)

    def slipstream_read_back(
        self, applied: str, names: list[str], target: str, whole: bool
    ) -> tuple[list[str], dict[str, float]]:
        """Compare weights in use with those applied, and write what differs, or all, to another arena.

        Returns the names of those that are equal, and the quantised modules among all with their errors.
        """
        tensors = self._arenas[applied].tensors()
        live = self._live(self._arenas[applied])
        with torch.inference_mode():
            found = live.tensors(set(names))
        equal = [name for name, tensor in found.items() if tensor is tensors[name]]
        layout = Layout.of({name: tuple(tensors[name].shape) for name in names}, self._arenas[applied].layout.dtype)
        arena = Arena(layout, target)
        arena.fill({name: tensor for name, tensor in found.items() if whole or tensor is not tensors[name]})
        arena.close()
        return equal, live.errors

    def slipstream_quantised(self, applied: str) -> dict[str, str]:
        """Modules that are quantised, and how."""
        return self._live(self._arenas[applied]).quantised()

    def _live(self, arena: TensorMemory) -> LiveWeights:
        model = self.model_runner.get_model()
        return LiveWeights(model, own_groups(model, arena.layout.groups), arena.tensors())

    def slipstream_own_names(self, applied: str) -> list[str]:
        """The tensors that this rank holds: of the experts of a data-parallel group only some."""
        groups = own_groups(self.model_runner.get_model(), self._arenas[applied].layout.groups)
        return [name for group in groups for name in group.names]

    @torch.no_grad()
    def _load(self, arena: TensorMemory) -> None:
        """Fill the parameters in place if they are as the checkpoint's; vLLM's own loader takes a Python call each."""
        live = self._live(arena)
        groups = own_groups(self.model_runner.get_model(), arena.layout.groups)
        targets = [(live.parameter(group), group) for group in groups]
        if (
            self.device.type == "cpu"
            or groups != arena.layout.groups
            or any(parameter is None for parameter, _ in targets)
        ):
            self.reload_weights(weights_iterator=arena.tensors().items())
            prepare_tied_head(self.model_runner.get_model())
            return
        for parameter, group in targets:
            assert parameter is not None
            span = arena.span(group)
            parameter.flatten()[: span.numel()].copy_(span, non_blocking=True)
        cut_again(self.model_runner.get_model(), self.model_runner.model_config.dtype)
        torch.cuda.synchronize(self.device)


def sampled_counts(runner: Any) -> dict[str, int]:
    """Tokens sampled by each request that a model runner of vLLM holds; between two steps."""
    if hasattr(runner, "requests"):
        return {key: len(state.output_token_ids) for key, state in runner.requests.items()}
    states = runner.req_states
    totals = states.total_len.gpu.tolist()
    return {key: totals[row] - int(states.prompt_len.np[row]) for key, row in states.req_id_to_index.items()}


def _make_ready(arena: Arena, device: torch.device) -> None:
    arena.tensors()  # of 6,000 tensors that takes a tenth of a second, of a pause otherwise
    if device.type == "cuda":
        torch.cuda.set_device(device)
        arena.pin()
