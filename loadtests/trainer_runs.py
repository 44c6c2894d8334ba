"""The kinds of step that `trainer_throughput.py` measures, one after another on one device."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bare_step import BareStep
from trainer_shapes import BASE, Shape, make_model, make_sequence

from slipstream.trainer.config import ParallelConfig
from slipstream.trainer.cost import STEP_PHASES, ModelCost, peak_flops
from slipstream.trainer.loss_config import MaskedRatioLossConfig
from slipstream.trainer.optim_config import OptimConfig
from slipstream.trainer.parallel.sharding import Passes
from slipstream.trainer.step import Learner

LONGEST = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.1875)
"""Parts of a model's own longest context that are tried in turn: what does not fit ends at once."""
PROFILED_ROWS = 40

Figures = dict[str, Any]


class RlStep:
    """The trainer's learner with a random model."""

    def __init__(self, shape: Shape, arguments: argparse.Namespace, device: torch.device, *, fp8: bool = False) -> None:
        model = make_model(shape, device, fp8=fp8)
        self.cost = ModelCost.of(model)
        parallel = ParallelConfig(checkpointing=arguments.checkpointing, compile=arguments.compile)
        optim = OptimConfig(lr=1e-5, warmup_steps=0)
        once = not arguments.round_each_pass
        passes = Passes(device.type != "cpu", logits_bytes=int(arguments.logits_gib * 2**30), round_once=once)
        self.learner = Learner(model, optim, MaskedRatioLossConfig(), parallel=parallel, passes=passes)
        self._lora = shape.lora is not None
        self._step = 0

    def run(self, batches: list[Any]) -> Figures:
        """One step and the start of the copy that is published, which goes on beside the next; returns its figures."""
        self._step += 1
        tokens = sum(len(s.target_positions) for batch in batches for s in batch)
        started_s = now_s(self.learner.device)
        try:
            figures = self.learner.train(batches, step=self._step, loss_token_count=tokens, trained=BASE)
        except BaseException:
            # The routers' terms of the balance loss hold the graph, and it the layers it would compute again, and they
            # the routers: a circle through C++, which Python does not see. Nothing would be given back.
            self.learner.model.routes.begin()
            raise
        trained_s = now_s(self.learner.device)
        if self._lora:
            self.learner.begin_adapter_export(with_base=False)
        else:
            self.learner.begin_export()
        ended_s = now_s(self.learner.device)
        return {**figures, "step_s": ended_s - started_s, "publish_s": ended_s - trained_s}


class Runs:
    """All that is measured of a shape: each method yields figures as soon as there are any."""

    def __init__(self, shape: Shape, arguments: argparse.Namespace, device: torch.device) -> None:
        self._shape, self._arguments, self._device = shape, arguments, device
        self._tokens = arguments.context * arguments.micro_batches
        self._flops_of_peak: float | None = None

    def rl(self) -> Iterator[Figures]:
        """The RL step; of experts, with routes replayed and without, in turn, as a machine's speed drifts."""
        arguments, shape = self._arguments, self._shape
        rl = self._step()
        kinds = ("rl", "replay_off") if shape.moe else ("rl",)
        runs: dict[str, list[Figures]] = {kind: [] for kind in kinds}
        for index in range(arguments.warm_up + arguments.steps):
            for kind in kinds:
                figures = rl.run(self._batches(index, replay=kind == "rl"))
                if index >= arguments.warm_up:
                    runs[kind].append(figures)
        best = {kind: fastest(each) for kind, each in runs.items()}
        found: Figures = {kind: self.rate(figures["step_s"]) for kind, figures in best.items()}
        if "replay_off" in best:
            found["replay_cost"] = best["rl"]["step_s"] / best["replay_off"]["step_s"]
        yield {**found, **_of_step(best["rl"])}
        if arguments.profile:
            write_profile(lambda: rl.run(self._batches(0)[:1]), arguments.profile, self._device)
        if arguments.longest and self._device.type == "cuda":
            yield {"longest_context": self._longest(rl)}

    def fp8(self) -> Iterator[Figures]:
        """The RL step with products in FP8."""
        rl, times = self._step(fp8=True), []
        for index in range(self._arguments.warm_up + self._arguments.steps):
            times.append(rl.run(self._batches(index))["step_s"])
            if index < self._arguments.warm_up:  # kernels are made and tried, which can take longer than there is time
                yield {"fp8_warm_up_s": times}
            else:
                yield {"fp8": self.rate(min(times[self._arguments.warm_up :]))}
        if self._arguments.profile and self._arguments.only == "fp8":
            write_profile(lambda: rl.run(self._batches(0)[:1]), self._arguments.profile, self._device)

    def bare(self) -> Iterator[Figures]:
        """torchtitan's step."""
        arguments, device = self._arguments, self._device
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        bare = BareStep(self._shape, device, dtype, checkpointing=arguments.checkpointing)
        if arguments.compile:
            for block in bare.model.layers.values():
                block.compile()
        generator = torch.Generator().manual_seed(0)
        shape_BL = (arguments.micro_batches, arguments.context + 1)
        tokens_BL = torch.randint(0, self._shape.sizes.vocab_size, shape_BL, generator=generator).to(device)
        times = []
        for _ in range(arguments.warm_up + arguments.steps):
            started_s = now_s(device)
            bare.run(tokens_BL[:, :-1], tokens_BL[:, 1:])
            times.append(now_s(device) - started_s)
        yield {"bare": self.rate(min(times[arguments.warm_up :]))}

    def _step(self, *, fp8: bool = False) -> RlStep:
        """A new learner, by whose model the rates of all kinds go."""
        arguments = self._arguments
        made = RlStep(self._shape, arguments, self._device, fp8=fp8)
        flops = made.cost.flops([arguments.context], arguments.context) * arguments.micro_batches
        peak = peak_flops(self._device, arguments.peak_flops)
        self._flops_of_peak = None if peak is None else flops / peak
        return made

    def rate(self, step_s: float) -> Figures:
        """What a time means."""
        mfu = None if self._flops_of_peak is None else self._flops_of_peak / step_s
        return {"step_s": step_s, "tokens_per_s": self._tokens / step_s, "mfu": mfu}

    def _batches(self, index: int, *, replay: bool = True) -> list[Any]:
        count = self._arguments.micro_batches
        seeds = range(index * count, (index + 1) * count)
        return [[make_sequence(self._shape, self._arguments.context, seed, replay=replay)] for seed in seeds]

    def _longest(self, rl: RlStep) -> int:
        """The longest document that a step of one micro-batch takes, to an eighth of the model's own longest."""
        for part in LONGEST:
            context = int(self._shape.sizes.max_context_tokens * part)
            free(self._device)
            try:
                rl.run([[make_sequence(self._shape, context, 0)]])
            except torch.OutOfMemoryError:
                print(f"a context of {context:,} does not fit", flush=True)
                continue
            return context
        return 0


def _of_step(figures: Figures) -> Figures:
    """Where the time of a step went, and what else it says."""
    phases = {phase: figures[f"{phase}_s"] for phase in STEP_PHASES if f"{phase}_s" in figures}
    phases["publish"] = figures["publish_s"]
    phases["other"] = figures["step_s"] - sum(phases.values())
    return {
        "share": {phase: seconds / figures["step_s"] for phase, seconds in phases.items()},
        "loss": figures["loss"],
        "grad_norm": figures["grad_norm"],
        "memory": {key: value for key, value in figures.items() if key.startswith("memory_")},
    }


def now_s(device: torch.device) -> float:
    """When what was asked of the card has been done; copies beside it may go on."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def fastest(runs: list[Figures]) -> Figures:
    """The one that others disturbed least."""
    return min(runs, key=lambda figures: figures["step_s"])


def free(device: torch.device) -> None:
    """Give back what nobody holds."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def write_profile(run: Callable[[], object], path: Path, device: torch.device) -> None:
    """What one step asks of processor and card: its longest kernels, then its longest operators."""
    from torch.profiler import ProfilerActivity, profile

    card = device.type == "cuda"
    run()
    started_s = now_s(device)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if card else [])]) as profiled:
        run()
        wall_s = now_s(device) - started_s
    averages = profiled.key_averages()
    orders = ["self_device_time_total", "device_time_total"] if card else []
    tables = [
        averages.table(sort_by=order, row_limit=PROFILED_ROWS, max_name_column_width=100)
        for order in [*orders, "self_cpu_time_total"]
    ]
    path.write_text(f"one step of one micro-batch: {wall_s:.3f} s with the profiler\n\n" + "\n\n".join(tables) + "\n")
