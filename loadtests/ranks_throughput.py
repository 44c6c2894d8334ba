"""Tokens a second of the trainer's ranks, two against one: what FSDP2, expert and context parallelism cost and bring.

    python loadtests/ranks_throughput.py --out figures.jsonl                   # two cards: every layout
    python loadtests/ranks_throughput.py --shape tiny --context 256            # on a CPU, in a minute
    python loadtests/ranks_throughput.py --layouts fsdp2 cp2 --shape qwen3-0.6b

*Weak*: each rank has as many micro-batches as the single one, so perfect is twice the tokens a second. *Strong*: the
ranks share the single one's micro-batches, so perfect is half the time. Context parallelism shares the tokens of each
micro-batch, which is strong scaling, and the longer context that it is for is weak scaling: twice the context.

Each run is a step of `Learner`: routes replayed, loss, gradient, optimizer. Models have random weights that every rank
makes for its part alone, on its card. A layout has processes and a limit of its own, which on cards are all started at
once and do not touch a card before their turn; a line of figures is written after each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trainer_runs import device_name, now_s
from trainer_shapes import BASE, SHAPES, Shape, make_model, make_sequence

from slipstream.trainer.config import ComputeConfig, ParallelConfig, RankConfig
from slipstream.trainer.cost import ModelCost, memory, peak_flops
from slipstream.trainer.loss_config import MaskedRatioLossConfig
from slipstream.trainer.optim_config import OptimConfig
from slipstream.trainer.parallel.export import held
from slipstream.trainer.parallel.layout import Layout
from slipstream.trainer.parallel.meeting import meet
from slipstream.trainer.parallel.sharding import Passes
from slipstream.trainer.step import Learner

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "fsdp2": {"data": 2},
    "fsdp2-ep2": {"data": 2, "expert": 2},
    "cp2-ulysses": {"data": 1, "context": 2},
    "cp2-ring": {"data": 1, "context": 2, "context_kind": "ring"},
}
RUNS = [
    ("moe-1b", ("one", "fsdp2", "fsdp2-ep2", "cp2-ulysses")),
    ("qwen3-0.6b", ("one", "fsdp2", "cp2-ulysses", "cp2-ring")),
]
"""Shapes and layouts of two cards, in order of worth."""

GO = "go\n"
WARM_UP_STEPS = 1
RING_CONTEXT = 8192
"""Tokens of a micro-batch at most, of the ring: it keeps scores of all pairs of two slices."""


@torch.no_grad()
def fill(model: Any, seed: int) -> None:
    """Random weights for the part of each parameter that is here. No rank has more."""
    for number, (_, parameter) in enumerate(model.named_parameters()):
        _, part = held(parameter)
        generator = torch.Generator(part.device).manual_seed(seed + number)
        if parameter.ndim == 1:
            part.fill_(1.0)
        else:
            part.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)


def learner(shape: Shape, world: Any, parallel: ParallelConfig) -> tuple[Learner, ModelCost]:
    """Of a model that is on meta until each rank has room for its part."""
    if world.alone:
        model = make_model(shape, world.device)
    else:
        with torch.device("meta"):
            model = shape.build(shape.sizes)
    cost = ModelCost.of(model)
    passes = Passes(bfloat16=world.device.type != "cpu")
    agent = Learner(model, OptimConfig(lr=1e-5, warmup_steps=0), MaskedRatioLossConfig(), None, world, parallel, passes)
    if not world.alone:
        fill(agent.model, 1000 * world.rank)
    return agent, cost


def step(agent: Learner, shape: Shape, context: int, micro_batches: int, number: int) -> dict[str, float]:
    """One step of so many micro-batches of this rank; its seconds, from a moment at which all ranks are here."""
    world = agent.world
    first = (number * world.layout.data + world.data_rank) * micro_batches
    batches = [[make_sequence(shape, context, first + n)] for n in range(micro_batches)]
    tokens = context * micro_batches * world.layout.data
    world.all_agree(True)
    started_s = now_s(agent.device)
    agent.begin(tokens, micro_batches * world.layout.data, context * micro_batches, BASE)
    agent.add(batches)
    figures = agent.finish(number)
    world.all_agree(True)
    step_s = now_s(agent.device) - started_s
    return {"step_s": step_s, "loss": figures["loss"], "grad_norm": figures["grad_norm"], "tokens": tokens}


def measured(agent: Learner, shape: Shape, context: int, micro_batches: int, steps: int) -> dict[str, float]:
    """The fastest of some steps; a first one is not counted."""
    runs = [step(agent, shape, context, micro_batches, number + 1) for number in range(WARM_UP_STEPS + steps)]
    return min(runs[WARM_UP_STEPS:], key=lambda run: run["step_s"])


def loads_of(layout: str, context: int, micro_batches: int) -> dict[str, tuple[int, int]]:
    """Context and micro-batches of a rank, by how they compare with the single one's."""
    if layout == "one":
        return {"base": (context, micro_batches)}
    if layout.startswith("cp2"):
        context = min(context, RING_CONTEXT) if layout.endswith("ring") else context
        return {"strong": (context, micro_batches), "weak": (2 * context, micro_batches)}
    return {"weak": (context, micro_batches), "strong": (context, max(1, micro_batches // 2))}


def work(arguments: argparse.Namespace) -> None:
    """What one rank does."""
    shape, layout = SHAPES[arguments.shape], Layout(**LAYOUTS[arguments.layout])
    if sys.stdin.readline() != GO:
        return
    place = RankConfig(rank=arguments.rank, rank_count=layout.rank_count, rendezvous=arguments.meeting)
    parallel = ParallelConfig.model_validate(
        {**LAYOUTS[arguments.layout], "checkpointing": arguments.checkpointing, "timeout_s": 60.0}
    )
    world = meet(place, parallel, ComputeConfig(device=arguments.device))
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
    started_s = time.monotonic()
    with world.watching():
        agent, cost = learner(shape, world, parallel)
        made_s = time.monotonic() - started_s
        loads = loads_of(arguments.layout, arguments.context, arguments.micro_batches)
        for load, (context, micro_batches) in loads.items():
            best = measured(agent, shape, context, micro_batches, arguments.steps)
            held_bytes = memory(world.device)
            flops = cost.flops([context], context) * best["tokens"] / context
            peak = peak_flops(world.device, arguments.peak_flops)
            found = {
                "shape": arguments.shape,
                "layout": arguments.layout,
                "load": load,
                "context": context,
                "ranks": layout.rank_count,
                "device": device_name(world.device),
                "made_s": made_s,
                **best,
                "tokens_per_s": best["tokens"] / best["step_s"],
                "mfu": None if peak is None else flops / best["step_s"] / (peak * layout.rank_count),
                **held_bytes,
            }
            if world.rank == 0:
                print(json.dumps(found), flush=True)
    if dist.is_initialized():
        world.all_agree(True)
    os._exit(0)  # taking groups apart has no deadline


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class LayoutRun:
    """The processes of a layout: they import what they need, and wait for their turn."""

    def __init__(self, shape: str, layout: str, arguments: argparse.Namespace) -> None:
        self.shape, self.layout, self._limit_s = shape, layout, arguments.limit_s
        words = ["--shape", shape, "--layout", layout, "--meeting", f"tcp://127.0.0.1:{free_port()}"]
        for name in ("context", "micro_batches", "steps", "device", "checkpointing"):
            words += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
        if arguments.peak_flops:
            words += ["--peak-flops", str(arguments.peak_flops)]
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, *words, "--rank", str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
            for rank in range(Layout(**LAYOUTS[layout]).rank_count)
        ]

    def run(self) -> tuple[list[dict[str, Any]], str | None]:
        """Figures, and what went wrong."""
        wrong = None
        first, others = self._processes[0], self._processes[1:]
        for process in others:
            self._say(process, GO)
        try:
            said, _ = first.communicate(GO, timeout=self._limit_s)
            for process in others:
                process.wait(10.0)
        except subprocess.TimeoutExpired as late:
            output: Any = late.stdout or ""
            said = output.decode() if isinstance(output, bytes) else output
            wrong = f"longer than {self._limit_s} s"
        self.end()
        codes = [process.returncode for process in self._processes]
        if wrong is None and any(codes):
            wrong = f"exit codes {codes}"
        return [json.loads(line) for line in said.splitlines() if line.startswith("{")], wrong

    def end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    @staticmethod
    def _say(process: subprocess.Popen[str], word: str) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(word)
            process.stdin.flush()


def compared(found: dict[str, Any], base: dict[str, Any] | None) -> dict[str, Any]:
    """With how many times as fast as the single rank it is."""
    if base is None or found["layout"] == "one":
        return found
    return {**found, "speedup": found["tokens_per_s"] / base["tokens_per_s"]}


def describe(found: dict[str, Any]) -> str:
    mfu = "" if found["mfu"] is None else f"  MFU {found['mfu']:.1%}"
    speedup = f"  {found['speedup']:.2f} x one" if "speedup" in found else ""
    most = max(found.get("memory_allocated_bytes", 0), found.get("memory_resident_max_bytes", 0)) / 2**30
    rate = f"{found['step_s']:8.3f} s {found['tokens_per_s']:>11,.0f} tokens/s"
    what = f"{found['shape']:<11} {found['layout']:<12} {found['load']:<7} {found['context']:>7,}"
    return f"{what} {rate}{mfu}{speedup}  {most:.1f} GiB a rank"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="this one alone")
    parser.add_argument("--layouts", nargs="+", choices=sorted(LAYOUTS), help="of each shape; without it, all that fit")
    parser.add_argument("--context", type=int, default=16384, help="tokens of each document, one a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=2, help="of a step, of the single rank")
    parser.add_argument("--steps", type=int, default=2, help="measured, after one of warm-up; the fastest counts")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpointing", choices=("none", "selective", "full"), default="selective")
    parser.add_argument("--peak-flops", type=float, help="of the device, where its name does not tell")
    parser.add_argument("--limit-s", type=float, default=60.0, help="of one layout, its start included")
    parser.add_argument("--out", type=Path, help="append the figures, a JSON object a line")
    parser.add_argument("--layout", choices=sorted(LAYOUTS), help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", default="", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.rank is not None:
        work(arguments)
    plan = planned(arguments)
    waiting = [LayoutRun(shape, layout, arguments) for shape, layout in plan] if arguments.device == "cuda" else []
    bases: dict[str, dict[str, Any]] = {}
    failures = 0
    try:
        for number, (shape, layout) in enumerate(plan):
            run = waiting[number] if waiting else LayoutRun(shape, layout, arguments)
            found, wrong = run.run()
            if layout == "one" and found:
                bases[shape] = found[0]
            for each in (compared(one, bases.get(shape)) for one in found):
                print(describe(each), flush=True)
                if arguments.out:
                    with arguments.out.open("a") as file:
                        file.write(json.dumps(each) + "\n")
            if wrong:
                failures += 1
                print(f"{shape} {layout}: {wrong}", flush=True)
    finally:
        for run in waiting:
            run.end()
    return 1 if failures else 0


def planned(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Shapes with their layouts, in order."""
    known = dict(RUNS)
    runs = RUNS if arguments.shape is None else [(arguments.shape, known.get(arguments.shape, tuple(LAYOUTS)))]
    return [
        (shape, layout)
        for shape, layouts in runs
        for layout in layouts
        if not arguments.layouts or layout in arguments.layouts
        if SHAPES[shape].moe or LAYOUTS[layout].get("expert", 1) == 1
    ]


if __name__ == "__main__":
    sys.exit(main())
