"""What an RL step costs, against torchtitan's bare step of the same sizes in the same run.

    python loadtests/trainer_throughput.py --shape qwen3-0.6b            # dense, 16k context
    python loadtests/trainer_throughput.py --shape qwen3-30b-a3b-lora    # LoRA of rank 16
    python loadtests/trainer_throughput.py --shape moe-1b                # 1B of 4.9B parameters active
    python loadtests/trainer_throughput.py --shape moe-1b --fp8          # and the same with products in FP8
    python loadtests/trainer_throughput.py --shape moe-1b --only fp8     # those alone
    python loadtests/trainer_throughput.py --shape qwen3-0.6b --longest  # and the longest context that fits
    python loadtests/trainer_throughput.py --all --out figures.jsonl     # all of them, one process each
    python loadtests/trainer_throughput.py --shape moe-1b --profile FILE # and its slowest kernels and operators
    python loadtests/trainer_throughput.py --shape tiny --context 256    # on a CPU, in seconds

The RL step is the trainer's own `Learner`: routes replayed, log-probabilities, loss, gradient, optimizer, and the copy
of the weights that is published, which goes on beside the next step and holds up that one's optimizer if it has to.
What a version's bytes then take on their way is not in it. Rows are here already. On a card: bfloat16 through autocast,
float32 weights and moments, as torchtitan on one.

Figures are written as soon as there are any, so that what is cut off leaves what it had. Each shape of `--all` has a
time limit. Exits with 1 where a budget is missed or a kind of step fails; budgets are of one H200.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from trainer_runs import Figures, Runs, device_name, free
from trainer_shapes import SHAPES

from slipstream.models import attention, expert_rows, head, turned

CONTEXT = 16384
REPLAY_BUDGET = 1.03
BUDGET_CARD = "H200"
ALL: tuple[tuple[float, tuple[str, ...]], ...] = (
    (140.0, ("--shape", "qwen3-0.6b", "--longest")),
    (140.0, ("--shape", "qwen3-30b-a3b-lora", "--micro-batches", "4", "--warm-up", "1")),
    (240.0, ("--shape", "moe-1b", "--fp8", "--warm-up", "1")),
)
"""Seconds and arguments of each shape."""


def measure(name: str, arguments: argparse.Namespace, device: torch.device, out: Callable[[Figures], None]) -> Figures:
    """All kinds of step of one shape, one after another; what fails is noted, and the next is tried."""
    shape = SHAPES[name]
    arguments.checkpointing = arguments.checkpointing or shape.checkpointing
    found: Figures = {
        "shape": name,
        "context": arguments.context,
        "tokens": arguments.context * arguments.micro_batches,
        "device": device_name(device),
        "checkpointing": arguments.checkpointing,
        "compile": arguments.compile,
        "round_once": not arguments.round_each_pass,
        "turned": arguments.turned,
        "grouped": arguments.grouped,
        "torch": torch.__version__,
    }
    runs = Runs(shape, arguments, device)
    kinds: dict[str, Callable[[], Iterator[Figures]]] = {"rl": runs.rl}
    if shape.lora is None and not arguments.no_bare:
        kinds["bare"] = runs.bare
    if arguments.fp8 or arguments.only == "fp8":
        kinds["fp8"] = runs.fp8
    if arguments.only:
        kinds = {kind: run for kind, run in kinds.items() if kind == arguments.only}
    for kind, run in kinds.items():
        failure = _run(run, found, out)
        free(device)  # out of the call whose error holds what it had made
        if failure and kind == "rl" and "rl" not in found:
            ease(failure, arguments, found)
            failure = _run(run, found, out)
            free(device)
        if failure:
            found.setdefault("failed", {})[kind] = failure
            print(f"FAILED: {kind}: {failure}", flush=True)
            out(found)
            if kind == "rl" and "rl" not in found:
                break
    return found


def ease(failure: str, arguments: argparse.Namespace, found: Figures) -> None:
    """Once more, in less memory, or without kernels of our own: a figure that says so is better than none."""
    if "OutOfMemory" in failure:
        arguments.checkpointing, arguments.logits_gib = "full", 0.5
        found["checkpointing"] = "full"
    else:
        head.FUSED_ON.clear()
        expert_rows.FUSED_ON.clear()
        turned.FUSED_ON.clear()
        found["kernels"] = "plain operators"
    print(f"FAILED: rl: {failure}; once more, eased", flush=True)


def _run(run: Callable[[], Iterator[Figures]], found: Figures, out: Callable[[Figures], None]) -> str | None:
    """Take in the figures of one kind of step; what it failed with, in a line."""
    try:
        for figures in run():
            found |= figures
            if {"rl", "bare"} <= found.keys():
                found["of_bare"] = found["bare"]["step_s"] / found["rl"]["step_s"]
            if {"rl", "fp8"} <= found.keys():
                found["fp8_speedup"] = found["rl"]["step_s"] / found["fp8"]["step_s"]
            out(found)
    except Exception as error:  # of kernels, drivers, memory
        traceback.print_exc()
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def describe(found: Figures) -> list[str]:
    """For people."""

    def line(what: str, figures: Figures) -> str:
        mfu = "" if figures["mfu"] is None else f"  MFU {figures['mfu']:.1%}"
        return f"{what:<11} {figures['step_s']:8.3f} s  {figures['tokens_per_s']:>10,.0f} tokens/s{mfu}"

    lines = [f"{found['shape']}, context {found['context']:,}, {found['tokens']:,} tokens a step, {found['device']}"]
    if "rl" in found:
        lines.append(line("RL step", found["rl"]))
        lines.append("  " + ", ".join(f"{phase} {share:.1%}" for phase, share in found["share"].items()))
    if "replay_off" in found:
        lines.append(line("no replay", found["replay_off"]) + f"  (replay costs {found['replay_cost'] - 1:+.1%})")
    if "longest_context" in found:
        lines.append(f"longest context: {found['longest_context']:,} tokens")
    if "bare" in found:
        beside = f"  (RL step at {found['of_bare']:.2f} of its speed)" if "of_bare" in found else ""
        lines.append(line("bare step", found["bare"]) + beside)
    if "fp8" in found:
        beside = f"  ({found['fp8_speedup']:.2f} times as fast)" if "fp8_speedup" in found else ""
        lines.append(line("in FP8", found["fp8"]) + beside)
    return lines


def missed(found: Figures) -> list[str]:
    """Budgets that do not hold; none anywhere but on the card that they are of."""
    complaints = [f"{kind} failed" for kind in found.get("failed", {})]
    if BUDGET_CARD not in found["device"] or found["context"] != CONTEXT or "rl" not in found:
        return complaints
    shape = SHAPES[found["shape"]]
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
    parser.add_argument("--warm-up", type=int, default=2, help="steps that do not count, of each kind")
    parser.add_argument("--steps", type=int, default=2, help="measured, of each kind; the fastest counts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpointing", choices=("none", "selective", "full"), help="else the shape's own")
    parser.add_argument("--logits-gib", type=float, default=10.0, help="trainer.compute.logits_bytes, of float32")
    parser.add_argument("--grouped", action="store_true", help="attention is given key and value heads unrepeated")
    parser.add_argument("--turned", action="store_true", help="norm and rotation of queries and keys by one kernel")
    parser.add_argument("--round-each-pass", action="store_true", help="trainer.compute.round_once = false")
    parser.add_argument("--compile", action="store_true", help="compile each block, of both")
    parser.add_argument("--peak-flops", type=float, help="of the device, where its name does not tell")
    parser.add_argument(
        "--flash", choices=("FA3", "FA4"), help="another flash attention, where its package is installed"
    )
    parser.add_argument("--fp8", action="store_true", help="also with products in FP8")
    parser.add_argument("--only", choices=("rl", "bare", "fp8"), help="this kind of step alone")
    parser.add_argument("--longest", action="store_true", help="also the longest context that fits, on a card")
    parser.add_argument("--no-bare", action="store_true")
    parser.add_argument(
        "--profile", type=Path, help="write where the time of one micro-batch goes; of a folder, a file"
    )
    parser.add_argument("--all", action="store_true", help="all shapes of the card")
    parser.add_argument(
        "--out", type=Path, help="append figures, a JSON object a line; the last one of a shape has all"
    )
    return parser.parse_args(argv)


def run_all(argv: list[str]) -> int:
    """One process each: what one leaves on the card would be missing to the next."""
    rest = [word for word in argv if word != "--all"]
    return max([run_for([sys.executable, __file__, *words, *rest], limit_s) for limit_s, words in ALL])


def run_for(command: list[str], limit_s: float) -> int:
    """Exit code; 124 for one that took too long, with all that it started ended."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"FAILED: {limit_s:.0f} s are over: {' '.join(command[1:])}", flush=True)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return 124


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse(argv)
    if arguments.all:
        return run_all(argv)
    device = torch.device(arguments.device)
    if arguments.grouped:
        attention.GROUPED_ON.add("cuda")
    if arguments.turned:
        turned.FUSED_ON.add("cuda")
    if arguments.flash:
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl(arguments.flash)
    if arguments.profile and arguments.profile.is_dir():
        kind = f"-{arguments.only}" if arguments.only else ""
        arguments.profile /= f"profile-{arguments.shape}{kind}.txt"

    def out(found: Figures) -> None:
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(json.dumps(found) + "\n")

    found = measure(arguments.shape, arguments, device, out)
    print("\n".join(describe(found)), flush=True)
    complaints = missed(found)
    for complaint in complaints:
        print(f"MISSED: {complaint}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
