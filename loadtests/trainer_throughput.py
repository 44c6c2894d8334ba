"""What an RL step costs, against torchtitan's bare step of the same sizes in the same run.

    python loadtests/trainer_throughput.py --shape qwen3-0.6b            # dense, 16k context
    python loadtests/trainer_throughput.py --shape qwen3-30b-a3b-lora    # LoRA of rank 16
    python loadtests/trainer_throughput.py --shape moe-1b                # 1B of 4.9B parameters active
    python loadtests/trainer_throughput.py --shape moe-1b --fp8          # and the same with products in FP8
    python loadtests/trainer_throughput.py --shape qwen3-0.6b --longest  # and the longest context that fits
    python loadtests/trainer_throughput.py --all --out figures.jsonl     # all of them, one process each
    python loadtests/trainer_throughput.py --shape tiny --context 256    # on a CPU, in seconds

The RL step is the trainer's own `Learner`: routes replayed, log-probabilities, loss, gradient, optimizer, and the copy
of the weights that is published. What a version's bytes then take on their way is not in it, as they go beside the next
step. Rows are here already. On a card: bfloat16 through autocast, float32 weights and moments, as torchtitan on one.

Exits with 1 where a budget is missed; budgets are of one H200.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bare_step import BareStep
from trainer_shapes import BASE, SHAPES, Shape, make_model, make_sequence

from slipstream.trainer.config import ParallelConfig
from slipstream.trainer.cost import STEP_PHASES, ModelCost, peak_flops
from slipstream.trainer.loss_config import MaskedRatioLossConfig
from slipstream.trainer.optim_config import OptimConfig
from slipstream.trainer.parallel.sharding import Passes
from slipstream.trainer.step import Learner

WARM_UP_STEPS = 2
CONTEXT = 16384
REPLAY_BUDGET = 1.03
LONGEST_STEP = 1.25
BUDGET_CARD = "H200"

Figures = dict[str, Any]


class RlStep:
    """The trainer's learner with a random model."""

    def __init__(self, shape: Shape, arguments: argparse.Namespace, device: torch.device, *, fp8: bool = False) -> None:
        model = make_model(shape, device, fp8=fp8)
        self.cost = ModelCost.of(model)
        parallel = ParallelConfig(checkpointing=arguments.checkpointing, compile=arguments.compile)
        optim = OptimConfig(lr=1e-5, warmup_steps=0)
        passes = Passes(bfloat16=device.type != "cpu")
        self.learner = Learner(model, optim, MaskedRatioLossConfig(), parallel=parallel, passes=passes)
        self._lora = shape.lora is not None
        self._step = 0

    def run(self, batches: list[Any]) -> Figures:
        """One step and the copy that is published; returns its figures, all seconds of a synchronised card."""
        self._step += 1
        tokens = sum(len(s.target_positions) for batch in batches for s in batch)
        started_s = now_s(self.learner.device)
        figures = self.learner.train(batches, step=self._step, loss_token_count=tokens, trained=BASE)
        trained_s = now_s(self.learner.device)
        self.learner.export_adapter(with_base=False) if self._lora else self.learner.export()
        ended_s = now_s(self.learner.device)
        return {**figures, "step_s": ended_s - started_s, "publish_s": ended_s - trained_s}


def now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def fastest(runs: list[Figures]) -> Figures:
    """The one that others disturbed least."""
    return min(runs, key=lambda figures: figures["step_s"])


def measure(name: str, arguments: argparse.Namespace, device: torch.device) -> Figures:
    shape, context = SHAPES[name], arguments.context
    tokens = context * arguments.micro_batches
    found: Figures = {
        "shape": name,
        "context": context,
        "tokens": tokens,
        "device": device_name(device),
        "checkpointing": arguments.checkpointing,
        "compile": arguments.compile,
        "torch": torch.__version__,
    }
    rl = RlStep(shape, arguments, device)
    flops = rl.cost.flops([context], context) * arguments.micro_batches
    peak = peak_flops(device, arguments.peak_flops)

    def rate(step_s: float) -> Figures:
        mfu = None if peak is None else flops / step_s / peak
        return {"step_s": step_s, "tokens_per_s": tokens / step_s, "mfu": mfu}

    kinds = ("rl", "replay_off") if shape.moe else ("rl",)
    runs: dict[str, list[Figures]] = {kind: [] for kind in kinds}
    for index in range(WARM_UP_STEPS + arguments.steps):
        for kind in kinds:  # in turn, as the machine is not the same from one minute to the next
            seeds = range(index * arguments.micro_batches, (index + 1) * arguments.micro_batches)
            batches = [[make_sequence(shape, context, seed, replay=kind == "rl")] for seed in seeds]
            figures = rl.run(batches)
            if index >= WARM_UP_STEPS:
                runs[kind].append(figures)
    best = {kind: fastest(each) for kind, each in runs.items()}
    found |= {kind: rate(figures["step_s"]) for kind, figures in best.items()}
    figures = best["rl"]
    phases = {phase: figures[f"{phase}_s"] for phase in STEP_PHASES if f"{phase}_s" in figures}
    phases["publish"] = figures["publish_s"]
    phases["other"] = figures["step_s"] - sum(phases.values())
    found["share"] = {phase: seconds / figures["step_s"] for phase, seconds in phases.items()}
    found["loss"], found["grad_norm"] = figures["loss"], figures["grad_norm"]
    found["memory"] = {key: value for key, value in figures.items() if key.startswith("memory_")}
    del rl
    free(device)
    if arguments.fp8:
        found["fp8"] = rate(fp8_step_s(shape, arguments, device))
        found["fp8_speedup"] = found["rl"]["step_s"] / found["fp8"]["step_s"]
    if shape.lora is None and not arguments.no_bare:
        found["bare"] = rate(bare_step_s(shape, arguments, device))
        found["of_bare"] = found["bare"]["step_s"] / found["rl"]["step_s"]
    if "replay_off" in found:
        found["replay_cost"] = found["rl"]["step_s"] / found["replay_off"]["step_s"]
    return found


def fp8_step_s(shape: Shape, arguments: argparse.Namespace, device: torch.device) -> float:
    """The same step with products in FP8."""
    rl, times = RlStep(shape, arguments, device, fp8=True), []
    for index in range(WARM_UP_STEPS + arguments.steps):
        seeds = range(index * arguments.micro_batches, (index + 1) * arguments.micro_batches)
        times.append(rl.run([[make_sequence(shape, arguments.context, seed)] for seed in seeds])["step_s"])
    del rl
    free(device)
    return min(times[WARM_UP_STEPS:])


def bare_step_s(shape: Shape, arguments: argparse.Namespace, device: torch.device) -> float:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    bare = BareStep(shape, device, dtype, checkpointing=arguments.checkpointing)
    if arguments.compile:
        for block in bare.model.layers.values():
            block.compile()
    generator = torch.Generator().manual_seed(0)
    shape_BL = (arguments.micro_batches, arguments.context + 1)
    tokens_BL = torch.randint(0, shape.sizes.vocab_size, shape_BL, generator=generator).to(device)
    times = []
    for _ in range(WARM_UP_STEPS + arguments.steps):
        started_s = now_s(device)
        bare.run(tokens_BL[:, :-1], tokens_BL[:, 1:])
        times.append(now_s(device) - started_s)
    del bare
    free(device)
    return min(times[WARM_UP_STEPS:])


def longest_context(name: str, arguments: argparse.Namespace, device: torch.device) -> int:
    """The longest document that a step of one micro-batch takes, to a quarter."""
    shape, context, fits = SHAPES[name], arguments.context, 0
    rl = RlStep(shape, arguments, device)
    while context <= shape.sizes.max_context_tokens:
        try:
            rl.run([[make_sequence(shape, context, 0)]])
        except torch.OutOfMemoryError:
            break
        fits, context = context, int(context * LONGEST_STEP) // 1024 * 1024
        print(f"a context of {fits:,} fits", flush=True)
    return fits


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def describe(found: Figures) -> list[str]:
    """For people."""

    def line(what: str, figures: Figures) -> str:
        mfu = "" if figures["mfu"] is None else f"  MFU {figures['mfu']:.1%}"
        return f"{what:<11} {figures['step_s']:8.3f} s  {figures['tokens_per_s']:>10,.0f} tokens/s{mfu}"

    lines = [f"{found['shape']}, context {found['context']:,}, {found['tokens']:,} tokens a step, {found['device']}"]
    lines.append(line("RL step", found["rl"]))
    lines.append("  " + ", ".join(f"{phase} {share:.1%}" for phase, share in found["share"].items()))
    if "replay_off" in found:
        lines.append(line("no replay", found["replay_off"]) + f"  (replay costs {found['replay_cost'] - 1:+.1%})")
    if "fp8" in found:
        lines.append(line("in FP8", found["fp8"]) + f"  ({found['fp8_speedup']:.2f} times as fast)")
    if "bare" in found:
        lines.append(line("bare step", found["bare"]) + f"  (RL step at {found['of_bare']:.2f} of its speed)")
    return lines


def missed(found: Figures) -> list[str]:
    """Budgets that do not hold; none anywhere but on the card that they are of."""
    if BUDGET_CARD not in found["device"] or found["context"] != CONTEXT:
        return []
    shape, complaints = SHAPES[found["shape"]], []
    rate = found["rl"]["tokens_per_s"]
    if shape.budget_tokens_per_s and rate < shape.budget_tokens_per_s:
        complaints.append(f"{rate:,.0f} tokens/s; {shape.budget_tokens_per_s:,.0f} are asked for")
    if shape.budget_of_bare and found.get("of_bare", 1.0) < shape.budget_of_bare:
        complaints.append(f"{found['of_bare']:.3f} of the bare step; {shape.budget_of_bare} are asked for")
    if found.get("replay_cost", 1.0) > REPLAY_BUDGET:
        complaints.append(f"replay makes a step {found['replay_cost']:.3f} times as long; {REPLAY_BUDGET} is the most")
    return complaints


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of each document, one a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step")
    parser.add_argument("--steps", type=int, default=3, help="measured, after two of warm-up; the fastest counts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpointing", choices=("none", "selective", "full"), default="selective")
    parser.add_argument("--compile", action="store_true", help="compile each block, of both")
    parser.add_argument("--peak-flops", type=float, help="of the device, where its name does not tell")
    parser.add_argument(
        "--flash", choices=("FA3", "FA4"), help="another flash attention, where its package is installed"
    )
    parser.add_argument("--fp8", action="store_true", help="also with products in FP8")
    parser.add_argument("--longest", action="store_true", help="also the longest context that fits")
    parser.add_argument("--no-bare", action="store_true")
    parser.add_argument("--all", action="store_true", help="all shapes of the card")
    parser.add_argument("--out", type=Path, help="append the figures, a JSON object a line")
    return parser.parse_args(argv)


def run_all(arguments: argparse.Namespace) -> int:
    """One process each: what one leaves on the card would be missing to the next."""
    runs = [["--shape", "qwen3-0.6b", "--longest"], ["--shape", "qwen3-30b-a3b-lora"], ["--shape", "moe-1b", "--fp8"]]
    out = ["--out", str(arguments.out)] if arguments.out else []
    command: Callable[[list[str]], list[str]] = lambda words: [sys.executable, __file__, *words, *out]  # noqa: E731
    return max(subprocess.run(command(words), check=False).returncode for words in runs)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.all:
        return run_all(arguments)
    device = torch.device(arguments.device)
    if arguments.flash:
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl(arguments.flash)
    found = measure(arguments.shape, arguments, device)
    print("\n".join(describe(found)), flush=True)
    if arguments.longest and device.type == "cuda":
        found["longest_context"] = longest_context(arguments.shape, arguments, device)
        print(f"longest context: {found['longest_context']:,} tokens")
    if arguments.out:
        with arguments.out.open("a") as file:
            file.write(json.dumps(found) + "\n")
    complaints = missed(found)
    for complaint in complaints:
        print(f"MISSED: {complaint}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
