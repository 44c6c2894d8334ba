"""Fine-tunes a model on conversations, and leaves it in `<run_dir>/model`. Started by `slipstream sft`.

Exits with 0 also when it was told to stop: a checkpoint is there to go on from, and no model.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from typing import Any, NoReturn

import structlog
import torch

from slipstream.common.config import ConfigError, cli
from slipstream.common.disk import AppendFile, replace_file
from slipstream.common.errors import CheckpointFailed, DiskFull
from slipstream.common.exits import FAILED, REFUSED, ServiceFailed
from slipstream.common.runtime import leave
from slipstream.common.telemetry import setup_logging
from slipstream.environments.chat_template import ChatTemplate
from slipstream.environments.tokenizer import CHAT_FILES, TEMPLATE_FILE, TOKENIZER_FILE, TextCodec
from slipstream.models.base import Model, Sizes
from slipstream.models.checkpoint import load_model, save_model, save_tensors
from slipstream.models.lora.adapters import adapters_of, attach
from slipstream.models.lora.peft import save_adapters
from slipstream.models.registry import BUILT_IN, read_config, sizes_of
from slipstream.trainer.chat.config import ChatConfig
from slipstream.trainer.chat.examples import BadRows, load_dataset
from slipstream.trainer.chat.finetuner import Diverged, Finetuner, Progress
from slipstream.trainer.model_dir import move_into_place
from slipstream.trainer.model_probe import problems
from slipstream.trainer.parallel.filling import without_weights
from slipstream.trainer.parallel.meeting import meet
from slipstream.trainer.parallel.roll import RankLost
from slipstream.trainer.parallel.world import World
from slipstream.trainer.place import placed

log = structlog.get_logger()

PRINT_INTERVAL_S = 2.0
METRICS_LIMIT_BYTES = 64 << 20


class Reporter:
    """Writes every figure to metrics.jsonl, and prints some lines."""

    def __init__(self, config: ChatConfig) -> None:
        self._file = AppendFile(config.metrics_file, METRICS_LIMIT_BYTES)
        self._printed_s = 0.0

    def __call__(self, progress: Progress) -> None:
        figures = progress.figures
        record = {"step": progress.step, "time_s": time.time(), **figures}
        try:
            self._file.append(json.dumps(record).encode() + b"\n")
        except DiskFull as error:  # the figures of a step are not worth the run
            log.error("metrics_not_written", step=progress.step, detail=error.message)
        at = f"step {progress.step} of {progress.step_count}"
        if "validation_loss" in figures:
            print(f"{at}: validation loss {figures['validation_loss']:.4f}", flush=True)
        elif "loss" not in figures:
            print(f"{at}: skipped, as loss or gradient is not finite", flush=True)
        elif time.monotonic() - self._printed_s > PRINT_INTERVAL_S or progress.step == progress.step_count:
            self._printed_s = time.monotonic()
            print(f"{at}: loss {figures['loss']:.4f}, {figures['tokens_per_s']:.0f} tokens/s", flush=True)


def main() -> None:
    """Exits as a service does (`exits.py`): data that are wrong are `REFUSED`."""
    config = placed(cli(ChatConfig))
    setup_logging(config, "trainer")
    torch.set_num_threads(config.training.torch_threads)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    try:
        world = meet(config.group, config.parallel, config.compute)
        with world.watching():
            finetuner = _prepare(config, world, stop)
            if finetuner.run(Reporter(config), stop.is_set):
                _leave_model(config, finetuner)
            world.all_agree(True)  # rank 0 keeps what the others meet in: it is not to leave before them
    except BadRows as error:
        _fail(REFUSED, config, "\n  ".join([str(error), *error.rows]))
    except ConfigError as error:
        _fail(REFUSED, config, str(error))
    except (Diverged, CheckpointFailed, DiskFull, ServiceFailed) as error:
        _fail(FAILED, config, str(error))
    except RankLost as error:
        _fail(FAILED, config, str(error), told_by_all=True)
    leave()


def _prepare(config: ChatConfig, world: World, stop: threading.Event) -> Finetuner:
    start = config.start.initial
    given = read_config(start)
    kind = given.get("model_type")
    if not isinstance(kind, str) or kind not in BUILT_IN:
        raise ConfigError(f"{start}: model_type is {kind!r}, and built in are {', '.join(BUILT_IN)}")
    sizes = sizes_of(kind, given)
    _check_model(config, sizes)
    template = ChatTemplate.load(start, config.data.chat_template)
    data = load_dataset(config.data, TextCodec.load(start), template, config.seed)
    if world.alone:
        model: Any = _extended(config, load_model(sizes, start))
        finetuner = Finetuner(model.to(world.device), config, data, world, stop.is_set)
    else:
        finetuner = Finetuner(_extended(config, without_weights(sizes)), config, data, world, stop.is_set)
        if not finetuner.resumes:  # otherwise each rank reads its part of the checkpoint
            finetuner.learner.fill(None if world.rank else _extended(config, load_model(sizes, start)))
    try:
        step = finetuner.restore()
    except ValueError as error:
        raise ConfigError(f"{config.run_dir}: {error}") from None
    rows = {"training": len(data.training), "validation": len(data.validation), "bad": data.bad_rows}
    log.info("fine_tuning", rows=rows, steps=finetuner.step_count, from_step=step)
    if world.rank:
        return finetuner
    told = f"{rows['training']} conversations to learn from, {rows['validation']} to validate on"
    print(f"{told}, {rows['bad']} bad rows left out" if rows["bad"] else told, flush=True)
    if step:
        print(f"goes on after step {step}", flush=True)
    return finetuner


def _extended(config: ChatConfig, model: Model) -> Model:
    if config.lora is not None:
        attach(model, config.lora, config.seed)
    return model


def _check_model(config: ChatConfig, sizes: Sizes) -> None:
    """Raise `ConfigError` for what a model of these sizes does not allow, before there is one."""
    if config.data.max_tokens > sizes.max_context_tokens:
        start = config.start.initial
        raise ConfigError(f"data.max_tokens is {config.data.max_tokens}; {start} takes {sizes.max_context_tokens}")
    try:
        config.parallel.layout(config.group.rank_count).check_sizes(sizes)
    except ValueError as error:
        raise ConfigError(f"parallel.{error}") from None
    for key, sentence in problems(sizes, config.lora, None, config.optim.groups):
        raise ConfigError(f"{key.removeprefix('trainer.')}: {sentence}")


def _leave_model(config: ChatConfig, finetuner: Finetuner) -> None:
    """Weights, sizes, tokenizer and chat template: what `slipstream rl` starts from, and transformers loads."""
    learner, scratch = finetuner.learner, config.model_dir / ".new"
    adapters = adapters_of(learner.model)
    halves = {} if adapters is None else adapters.tensors()  # all ranks take part
    tensors = {} if learner.world.alone else learner.whole_tensors()
    if learner.world.rank:
        return
    if tensors:
        save_tensors(learner.model.sizes, tensors, scratch)
    else:
        save_model(learner.model, scratch)
    for name in (TOKENIZER_FILE, *CHAT_FILES):
        source = config.start.initial / name
        if name == TEMPLATE_FILE and config.data.chat_template is not None:
            source = config.data.chat_template
        if source.exists():
            replace_file(scratch / name, source.read_bytes())
    if adapters is not None:
        save_adapters(adapters, halves, str(config.start.initial), config.adapter_dir)
    move_into_place(scratch, config.model_dir)


def _fail(code: int, config: ChatConfig, message: str, *, told_by_all: bool = False) -> NoReturn:
    """Tell it, once of what all ranks find."""
    if told_by_all or config.group.rank == 0:
        print(f"error: {message}", file=sys.stderr, flush=True)
    leave(code)


if __name__ == "__main__":
    main()
