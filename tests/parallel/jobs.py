"""What ranks do together, on CPUs or cards. Tensors come back as files."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.distributed.tensor import DTensor

from parallel.models import SIZES, make
from slipstream.algorithms.tokens import LossTokens, StepTotals
from slipstream.common.version import PolicyVersion
from slipstream.engine.routes import RouteRows, runs
from slipstream.models.checkpoint import to_hf
from slipstream.models.head import target_logps
from slipstream.trainer.checkpoint_state import Target, load, own_group, save_async
from slipstream.trainer.checkpoint_store import CheckpointStore
from slipstream.trainer.config import ParallelConfig
from slipstream.trainer.loss_config import GspoLossConfig, MaskedRatioLossConfig
from slipstream.trainer.objective import build_objective
from slipstream.trainer.optim_config import OptimConfig
from slipstream.trainer.optimizer import plain_name
from slipstream.trainer.packed import Packed
from slipstream.trainer.parallel.layout import Layout
from slipstream.trainer.parallel.roll import RankLost, Roll
from slipstream.trainer.parallel.sharding import Passes, gradient_norm
from slipstream.trainer.parallel.slices import input_ranges
from slipstream.trainer.parallel.world import World
from slipstream.trainer.sequence import Lost, TrainSequence
from slipstream.trainer.step import Learner

DEVICE = torch.device("cpu")
"""Of this rank; `ranks.py` says it for each job."""

FIRST = PolicyVersion(1, 1)
BALANCE = 0.05
"""Coefficient of the balance loss: large enough that a mistake in it shows."""


def ready() -> str:
    together()
    return "ready"


def together() -> None:
    """Return once all ranks are here."""
    torch.zeros(1, device=DEVICE).cpu()  # what the card still has to do is done
    dist.all_reduce(torch.zeros(1))


def sequence(seed: int, length: int, trained: int, unknown: tuple[int, int] | None = None) -> TrainSequence:
    """A made rollout whose last `trained` tokens train, its routes random; rows of `unknown` are not known."""
    rng = np.random.default_rng(seed)
    routes = rng.random((length - 1, SIZES.n_layers, SIZES.n_experts)).argsort(-1)[..., : SIZES.top_k].astype(np.uint8)
    if unknown:
        routes[slice(*unknown)] = 255
    return TrainSequence(
        token_ids=rng.integers(0, SIZES.vocab_size, length).astype(np.int32),
        target_positions=np.arange(length - trained, length),
        engine_logps=rng.normal(-4.0, 0.3, trained).astype(np.float32),
        sampled_at=np.zeros(trained, np.int64),
        kv_oldest=np.zeros(trained, np.int64),
        routes=RouteRows(routes, 0, (unknown,) if unknown else ()),
        advantage=float(rng.normal()),
    )


def batches_of(plan: list[list[list[list[Any]]]]) -> list[list[list[TrainSequence]]]:
    """`[data rank][micro-batch]` of sequences, from `[seed, length, trained]` each."""
    return [[[sequence(*spec) for spec in batch] for batch in rank] for rank in plan]


LOSSES: dict[str, Any] = {"tokens": MaskedRatioLossConfig(), "sequences": GspoLossConfig()}
"""One that judges tokens by themselves, and one that needs whole sequences."""


def loss_of(logits_RV: Tensor, batch: list[TrainSequence], targets_R: Tensor, totals: StepTotals, loss: str) -> Tensor:
    """A micro-batch's part of the step's loss."""
    logp_R, _ = target_logps(logits_RV, targets_R)
    old_R = torch.from_numpy(np.concatenate([s.engine_logps for s in batch]))
    lengths = [len(s.target_positions) for s in batch]
    tokens = LossTokens.of_lengths(logp_R, old_R, [s.advantage for s in batch], lengths)
    return build_objective(LOSSES[loss])(tokens, totals).loss


def shares(batches: Any) -> Tensor:
    """Part of the recorded choices of a step that each expert got, by layer."""
    rows = np.concatenate([s.routes.rows[s.known_N] for batch in batches for s in batch])
    counts = [[(rows[:, layer] == e).sum() for e in range(SIZES.n_experts)] for layer in range(SIZES.n_layers)]
    return torch.from_numpy(np.array(counts) / rows[:, 0].size).float()


def balance_of(model: Any, batches: Any) -> Tensor:
    """The balance term of a micro-batch, written out: `E * sum of share * score / step inputs`, mean over layers."""
    inputs = sum(s.input_count for batch in batches for s in batch)
    share_LE = shares(batches)
    terms = [SIZES.n_experts * (scores * share_LE[layer]).sum() for layer, scores in enumerate(scores_seen(model))]
    return BALANCE * torch.stack(terms).mean() / inputs


def scores_seen(model: Any) -> list[Tensor]:
    """What the gates of the last forward pass gave."""
    return [block.moe.router.seen for block in model.layers.values()]


def watch_scores(model: Any) -> None:
    for block in model.layers.values():
        router = block.moe.router
        router.register_forward_hook(lambda module, _, output: setattr(module, "seen", output[2].flatten(0, 1)))


def totals_of(plan: Any) -> dict[str, int]:
    """Of all ranks."""
    specs = [spec for rank in plan for batch in rank for spec in batch]
    return {"loss_token_count": sum(spec[2] for spec in specs), "sequence_count": sum(spec[2] > 0 for spec in specs)}


def reference(kind: str, plan: Any, path: str, loss: str = "tokens") -> float:
    """One process, no groups: all micro-batches of all ranks, written out."""
    model = make(kind)
    if kind != "dense":
        watch_scores(model)
    batches = [batch for rank in batches_of(plan) for batch in rank if batch]
    totals = StepTotals(*map(float, totals_of(plan).values()))
    total = 0.0
    for batch in batches:
        packed = Packed.of(
            [s.token_ids for s in batch],
            [s.target_positions for s in batch],
            [s.routes for s in batch] if kind != "dense" else None,
        )
        part = loss_of(packed.logits_RV(model), batch, packed.targets_R, totals, loss)
        total += float(part.detach())
        (part + balance_of(model, batches) if kind != "dense" else part).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
    save_file({**{name: g.contiguous() for name, g in grads.items()}, "norm": norm.reshape(1)}, path)
    return total


def learner(
    kind: str,
    layout: dict[str, Any],
    loss: str = "tokens",
    *,
    filled: bool = False,
    empty: bool = False,
    bfloat16: bool = False,
    offload: bool = False,
    seed: int = 0,
    **parallel: Any,
) -> Learner:
    """This rank's, of a model that all start from; `filled`: that rank 0 alone has; `empty`: that nobody has."""
    balance = BALANCE if kind != "dense" else 0.0
    optim = OptimConfig(
        lr=1e-3, balance_coefficient=balance, warmup_steps=0, offload_state=offload, offload_activations=offload
    )
    world, config, passes = (
        World(Layout(**layout), device=DEVICE),
        ParallelConfig(**parallel),
        Passes(bfloat16, round_once=True),
    )
    if not (filled or empty) or world.alone:
        return Learner(make(kind, seed).to(DEVICE), optim, LOSSES[loss], None, world, config, passes)
    with torch.device("meta"):
        model = make(kind, started=False)
    agent = Learner(model, optim, LOSSES[loss], None, world, config, passes)
    if filled:
        agent.fill(None if world.rank else make(kind))
    return agent


def inputs_of(batches: Any) -> int:
    return sum(s.input_count for batch in batches for s in batch)


def gradients(kind: str, layout: dict[str, Any], plan: Any, path: str, **how: Any) -> float:
    """All ranks of a layout together; rank 0 writes the whole gradients. Returns the loss, the same on all."""
    agent = learner(kind, layout, **how)
    mine = batches_of(plan)[agent.world.data_rank]
    if kind != "dense":
        agent.expert_share_LE = shares([batch for rank in batches_of(plan) for batch in rank])
    agent.begin(**totals_of(plan), input_token_count=inputs_of(mine), trained=0)
    agent.add(mine)
    norm = gradient_norm(agent.ranked)
    grads = {plain_name(name): whole(p.grad) for name, p in agent.model.named_parameters() if p.grad is not None}
    if dist.get_rank() == 0:
        save_file({**grads, "norm": norm.cpu().reshape(1)}, path)
    total = agent.world.sum(torch.tensor(agent.figures.sums["loss"]))
    together()  # who left early would break the connection under the others' hands
    return float(total)


def whole(grad: Any) -> Tensor:
    return (grad.full_tensor() if isinstance(grad, DTensor) else grad).cpu().contiguous()


def steps(kind: str, layout: dict[str, Any], plan: Any, path: str, **how: Any) -> list[dict[str, float]]:
    """Three steps of a layout; rank 0 writes the weights. Returns its figures of each."""
    agent = learner(kind, layout, **how)
    figures, probed = [], ([], 0.0)
    for step in range(1, 4):
        figures.append(take(agent, plan, step))
        probed = agent.probe([1, 2, 3, 4, 5])  # also between steps: it leaves nothing behind
    tensors = agent.whole_tensors()
    if agent.world.rank == 0:
        save_file(tensors | {"probe": torch.tensor([*probed[0], probed[1]])}, path)
    together()
    return figures


def take(agent: Learner, plan: Any, step: int) -> dict[str, float]:
    """One step, and its figures."""
    mine = batches_of(plan)[agent.world.data_rank]
    agent.begin(**totals_of(plan), input_token_count=inputs_of(mine), trained=0, checked=len(mine) - 1)
    agent.add(mine)
    return agent.finish(step)


def saved(kind: str, layout: dict[str, Any], plan: Any, directory: str, **how: Any) -> None:
    """The checkpoint of one step."""
    agent, target = learner(kind, layout, **how), Target.of(CheckpointStore(Path(directory)), FIRST, {})
    take(agent, plan, 1)
    save_async(agent.model, agent.optimizer, agent.carried, target, own_group()).wait()
    together()


def resumed(kind: str, layout: dict[str, Any], plan: Any, directory: str, path: str, **how: Any) -> None:
    """Two more steps from it, by other ranks; rank 0 writes the weights."""
    agent = learner(kind, layout, seed=1, empty=True, **how)
    load(agent.model, agent.optimizer, agent.carried, CheckpointStore(Path(directory)).at(FIRST).path)
    for step in (2, 3):
        take(agent, plan, step)
    tensors = agent.whole_tensors()
    if agent.world.rank == 0:
        save_file(tensors, path)
    together()


def exported(kind: str, layout: dict[str, Any], path: str) -> list[Any]:
    """Name, shape and offsets of the boxes that this rank holds, whose values go to a file."""
    boxes = learner(kind, layout).export_boxes()
    save_file({str(n): torch.from_numpy(box.values.copy()) for n, box in enumerate(boxes)}, f"{path}-{dist.get_rank()}")
    if dist.get_rank() == 0:
        save_file(to_hf(make(kind)), f"{path}-whole")
    together()
    return [[box.name, box.global_shape, box.offsets] for box in boxes]


def lost(layout: dict[str, Any], batch: Any, losers: list[list[int]]) -> list[Any]:
    """A micro-batch of which each context rank lacks some sequences; what is trained, and the loss."""
    agent = learner("moe", layout)
    made = [sequence(*spec) for spec in batch]
    lacking = losers[agent.world.context_rank]
    mine = [Lost(s.input_count) if n in lacking else only_rows(n, made, agent) for n, s in enumerate(made)]
    agent.begin(100, 10, inputs_of([made]), trained=0)
    agent.add([mine])
    tokens = agent.world.sum(torch.tensor(float(agent.figures.sums["loss"])))
    figures = agent.finish(1)
    together()
    return [figures, float(tokens)]


def only_rows(number: int, batch: list[TrainSequence], agent: Learner) -> TrainSequence:
    """A sequence of a micro-batch with the routes that this rank fetches, and no others."""
    context, rank, one = agent.world.layout.context, agent.world.context_rank, batch[number]
    ranges = input_ranges([s.input_count for s in batch], context, rank)[number]
    known = np.zeros(one.input_count, bool)
    for first, last in ranges:
        known[first:last] = one.known_N[first:last]
    rows = np.where(known[:, None, None], one.routes.rows, 255).astype(np.uint8)
    return replace(one, routes=RouteRows(rows, 0, runs(~known)))


def interrupted(how: str, path: str, silence_s: float) -> dict[str, Any]:
    """Steps of all ranks, of which the last is lost in the second one. Says what the others are told, and when."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    roll = Roll(FileStore(path, ranks), rank, ranks, silence_s)
    world = World(Layout(data=ranks, expert=ranks), roll, device=DEVICE)
    agent = Learner(make("moe").to(DEVICE), OptimConfig(), LOSSES["tokens"], None, world)
    started = 0.0
    try:
        for step in range(2):
            started = time.monotonic()
            with world.watching():
                agent.begin(8, 2, 8, trained=0)
                if step == 1 and rank == ranks - 1:
                    WAYS[how]()
                agent.add([[sequence(rank, 9, 4)]])
                agent.finish(step + 1)
    except RankLost as lost:
        return {"ranks": lost.ranks, "message": str(lost), "after_s": time.monotonic() - started}
    finally:
        roll.close()
    return {"ranks": None}


WAYS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stuck": lambda: time.sleep(600.0),
}
"""Ways to lose a rank."""


def logps(kind: str, layout: dict[str, Any], batch: Any, perturbed: int, path: str) -> None:
    """Log-probabilities of a micro-batch's targets, before and after document `perturbed` gets other tokens."""
    agent = learner(kind, layout)
    made = [sequence(*spec) for spec in batch]
    found = {}
    for name in ("before", "after"):
        found[name] = torch.from_numpy(agent.logps(made))
        other = (made[perturbed].token_ids + 7) % SIZES.vocab_size
        made[perturbed] = replace(made[perturbed], token_ids=other.astype(np.int32))
    save_file(found, f"{path}-{dist.get_rank()}")
    together()
