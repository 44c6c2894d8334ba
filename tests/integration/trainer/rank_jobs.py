"""What takes processes of its own: checkpoints of several ranks, and writers that are killed. Says what it saw in JSON.

    python rank_jobs.py FOLDER

torch is imported once; ranks and writers are forks.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

sys.path.insert(0, str(Path(__file__).parents[2]))

from unit.trainer.tiny import BASE, sequence, tiny_model

from slipstream.common.version import PolicyVersion
from slipstream.models.qwen3_moe.model import MoeModel
from slipstream.trainer.checkpoint_state import Target, load, own_group, save_async
from slipstream.trainer.checkpoint_store import CheckpointStore
from slipstream.trainer.loss_config import ClippedLossConfig
from slipstream.trainer.optim_config import OptimConfig
from slipstream.trainer.optimizer import ModelOptimizer
from slipstream.trainer.step import Learner

DEADLINE_S = 120
KILLS = 20
FIRST_STEPS, ALL_STEPS = 2, 4


def fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:  # a fork must never get back into its parent's code
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return pid


def together(count: int, folder: Path, work: Callable[[], None]) -> None:
    """Run it on so many ranks."""
    store_file = folder / f"store-{time.monotonic_ns()}"

    def rank_work(rank: int) -> None:
        store = FileStore(str(store_file), count)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=DEADLINE_S))
        work()
        dist.barrier()
        dist.destroy_process_group()

    pids = [fork(lambda rank=rank: rank_work(rank)) for rank in range(count)]
    deadline_s = time.monotonic() + DEADLINE_S
    for pid in pids:
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline_s:
                os.kill(pid, signal.SIGKILL)
                raise TimeoutError(f"rank {pids.index(pid)} does not end")
            time.sleep(0.01)


@dataclass
class Training:
    """A model and its optimizer."""

    model: MoeModel
    optimizer: ModelOptimizer


def training_of(algorithm: str) -> Training:
    """Where there are ranks, every parameter cut by its first dimension, as FSDP does."""
    model = tiny_model()
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for name, parameter in list(model.named_parameters()):
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, torch.nn.Parameter(cut(parameter.detach(), mesh)))
    config = OptimConfig.model_validate({"algorithm": algorithm, "warmup_steps": 1, "lr": 3e-3})
    return Training(model, ModelOptimizer(model.named_parameters(), config))


def cut(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    part = tensor.chunk(mesh.size())[mesh.get_local_rank()].clone()
    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride())


LOSS = ClippedLossConfig()


def gradients(step: int) -> dict[str, torch.Tensor]:
    """Of step `step`, whole: by a model that does not change."""
    other = Learner(tiny_model(), OptimConfig(), LOSS)
    other.begin(10, 2, 18, BASE)
    other.add([[sequence(10 * step), sequence(10 * step + 1, advantage=-1.0)]])
    return {name: p.grad for name, p in other.model.named_parameters() if p.grad is not None}


def steps(training: Training, first: int, last: int) -> None:
    for step in range(first, last + 1):
        for name, gradient in gradients(step).items():
            parameter = training.optimizer.parameters[name]
            parameter.grad = cut(gradient, parameter.device_mesh) if isinstance(parameter, DTensor) else gradient
        training.optimizer.step(step)


def save(training: Training, store: CheckpointStore, step: int) -> None:
    version = PolicyVersion(1, step)
    target = Target.of(store, version, {})
    save_async(training.model, training.optimizer, {}, target, own_group()).wait()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def everything(training: Training) -> dict[str, torch.Tensor]:
    found = {name: whole(p) for name, p in training.model.named_parameters()}
    for name, state in training.optimizer.state.items():
        found |= {f"{name}/{key}": whole(value) for key, value in state.items()}
    return found


def resharded(folder: Path, algorithm: str) -> dict[str, float]:
    """Two steps on so many ranks, the checkpoint loaded by so many others, two more steps: against one process."""
    alone = training_of(algorithm)
    steps(alone, 1, ALL_STEPS)
    expected = everything(alone)
    worst: dict[str, float] = {}
    for before, after in ((1, 1), (2, 1), (1, 2)):
        store = CheckpointStore(folder / f"{algorithm}-{before}-{after}")

        def first(store: CheckpointStore = store) -> None:
            training = training_of(algorithm)
            steps(training, 1, FIRST_STEPS)
            save(training, store, FIRST_STEPS)

        def second(store: CheckpointStore = store) -> None:
            saved = store.newest()
            assert saved is not None
            training = training_of(algorithm)
            load(training.model, training.optimizer, {}, saved.path)
            steps(training, FIRST_STEPS + 1, ALL_STEPS)
            found = everything(training)
            if not dist.is_initialized() or dist.get_rank() == 0:
                assert found.keys() == expected.keys()
                largest = max(
                    float((found[n] - expected[n]).abs().max() / (expected[n].abs().max() + 1e-12)) for n in found
                )
                (store.root / "worst").write_text(str(largest))

        for count, work in ((before, first), (after, second)):
            if count == 1:
                assert os.waitpid(fork(work), 0)[1] == 0
            else:
                together(count, folder, work)
        worst[f"{before} to {after}"] = float((store.root / "worst").read_text())
    return worst


def killed(folder: Path) -> dict[str, int]:
    """Writers that save one step after the other are killed at random; what they leave is looked at each time.

    Every second one is killed at a random moment of those at which a checkpoint is half written.
    """
    store = CheckpointStore(folder, keep_last=2)
    training = training_of("adamw")
    steps(training, 1, 1)
    rng = random.Random(5)
    in_the_middle = step = 0
    for kill in range(KILLS):
        reader, writer = os.pipe()

        def saves(writer: int = writer, step: int = step) -> None:
            while True:
                step += 1
                fill(training, step)
                save(training, store, step)
                os.write(writer, b"%9d" % step)

        pid = fork(saves)
        os.close(writer)
        with contextlib.closing(os.fdopen(reader, "rb", buffering=0)) as told:
            assert select.select([told], [], [], DEADLINE_S)[0], "no checkpoint was written"
            stop_at_random(pid, rng, lambda half=kill % 2: not half or any(folder.glob(".saving-*")))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            durable = int(told.read()[-9:])
        in_the_middle += any(folder.glob(".saving-*"))
        saved = store.newest()
        assert saved is not None
        step = saved.version.step
        assert step >= durable, f"step {durable} was durable, {step} is there"
        fresh = training_of("adamw")
        load(fresh.model, fresh.optimizer, {}, saved.path)
        values = {float(value) for p in fresh.model.parameters() for value in p.detach().aminmax()}
        values |= {float(state["exp_avg"].max()) for state in fresh.optimizer.state.values()}
        assert values == {float(step)}, values
    return {"kills": KILLS, "in_the_middle": in_the_middle, "step": step}


def stop_at_random(pid: int, rng: random.Random, fits: Callable[[], bool]) -> None:
    """Stop the process at random moments until one fits; it goes on after those that do not."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        time.sleep(rng.uniform(0.0, 0.06))
        os.kill(pid, signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1]), "the writer ended by itself"
        if fits():
            return
        os.kill(pid, signal.SIGCONT)
    raise TimeoutError("no moment fits")


@torch.no_grad()
def fill(training: Training, step: int) -> None:
    """Make everything tell its step."""
    for parameter in training.model.parameters():
        parameter.fill_(step)
    for state in training.optimizer.state.values():
        state["exp_avg"].fill_(step)


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    found = {algorithm: resharded(folder, algorithm) for algorithm in ("adamw", "muon")}
    print(json.dumps({"resharded": found, "killed": killed(folder / "killed")}))


if __name__ == "__main__":
    main()
