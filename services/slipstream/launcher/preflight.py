"""What a configuration names outside of itself: directories, programs and environments. Looked at before any start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from slipstream.common.config import ConfigError
from slipstream.common.config_errors import Origins, located
from slipstream.common.reaper import END_NOW, guarded
from slipstream.common.tls import try_certificates
from slipstream.environments.config import EntryPointConfig, ImportedConfig
from slipstream.environments.config_renderer import SECTION
from slipstream.environments.tokenizer import build_tokenizer
from slipstream.launcher.config import RunConfig
from slipstream.launcher.preflight_engines import check_engines
from slipstream.launcher.preflight_machine import check_machine
from slipstream.models.base import Sizes
from slipstream.orchestrator.tracking.feed import require_libraries
from slipstream.trainer.config import TrainerConfig
from slipstream.trainer.model_dir import sizes_at_start
from slipstream.trainer.teacher import check_teacher_on_vllm, teacher_sizes

T = TypeVar("T")

PROBE_TIMEOUT_S = 120.0
PROBE_END_TIMEOUT_S = 10.0


def preflight(config: RunConfig, origins: Origins, *, machine: bool = True, workers_here: bool = True) -> None:
    """Raise `ConfigError` for the first thing that is not what it should be.

    `machine`: also programs and certificates, which the doctor looks at on lines of their own. `workers_here`: also
    what the workers' engines need of the machine they run on.
    """
    trainer: Any = config.section("trainer")
    start = TrainerConfig(model=config.model, initial_model=trainer.initial_model, loss=trainer.loss)
    if trainer.initial_model is None:
        _vocabulary(config.model.vocab_size, origins)
    sizes = sizes_at_start(start, origins.located("trainer.initial_model"))
    _shared_out(trainer, sizes, origins)
    teacher: Any = config.section("teacher")
    if start.loss.type == "distillation":
        on_vllm = teacher.replicas and teacher.engine.type == "vllm"
        check = check_teacher_on_vllm if on_vllm else teacher_sizes
        check(start, start.loss.teacher, origins.located("trainer.loss.teacher"))
    if teacher.replicas and (limit := teacher.max_request_tokens) < sizes.max_context_tokens:
        where = origins.located("teacher.max_request_tokens")
        raise ConfigError(f"{where}: {limit} tokens are less than a rollout's {sizes.max_context_tokens}")
    _own_code(config, origins)
    _model(trainer, sizes, origins)
    if machine and workers_here:
        check_engines(config, origins)
    if machine:
        orchestrator: Any = config.section("orchestrator")
        require_libraries(orchestrator.tracking, origins.located("orchestrator.tracking"))
        _bubblewrap(config, origins)
        try_certificates(config.tls)
        check_machine(config, origins, workers_here=workers_here)
    _environments(config, origins, sizes, trainer.initial_model)


def _vocabulary(vocab_size: int, origins: Origins) -> None:
    needed = build_tokenizer().get_vocab_size()
    if 0 < vocab_size < needed:
        where = origins.located("model.vocab_size")
        raise ConfigError(f"{where} is {vocab_size}; the tokenizer has {needed} tokens; set it to that, or to 0")


def _bubblewrap(config: RunConfig, origins: Origins) -> None:
    program = getattr(config.section("sandbox"), "bwrap", None)
    if program is not None and not os.access(program, os.X_OK):
        raise ConfigError(f"{origins.located('sandbox.bwrap')} {str(program)!r} is no program that can run")


def _own_code(config: RunConfig, origins: Origins) -> None:
    """Try the user's loss and advantages in another process each."""
    for service, name in (("trainer", "loss"), ("orchestrator", "advantage")):
        section: Any = getattr(config.section(service), name)
        if section.type == "import":
            where = origins.located(f"{service}.{name}.path")
            asked = section.model_dump(mode="json")
            sentence = _ask(f"slipstream.{service}.{name}_probe", asked, f"{where}: {section.path}", str)
            if sentence:
                raise ConfigError(f"{where}: {shorten(sentence)}")


def _shared_out(trainer: Any, sizes: Sizes, origins: Origins) -> None:
    """Whether the trainer's ranks can share the model."""
    try:
        trainer.parallel.layout(trainer.nproc).check_sizes(sizes)
    except ValueError as error:
        field, _, sentence = str(error).partition(": ")
        raise ConfigError(f"{origins.located(f'trainer.parallel.{field}', 'trainer.nproc')}: {sentence}") from None


def _model(trainer: Any, sizes: Sizes, origins: Origins) -> None:
    """Look for what is to be trained in the model, in another process: that takes torch."""
    if trainer.lora is None and trainer.fp8 is None and not trainer.optim.groups:
        return
    asked = {
        "architecture": sizes.architecture,
        "sizes": sizes.to_hf(),
        "lora": trainer.lora and trainer.lora.model_dump(mode="json"),
        "fp8": trainer.fp8 and trainer.fp8.model_dump(mode="json"),
        "groups": [group.model_dump(mode="json") for group in trainer.optim.groups],
    }
    what = f"{origins.located('model.architecture')}: models of {sizes.architecture}"
    for key, sentence in _ask("slipstream.trainer.model_probe", asked, what, _pairs):
        raise ConfigError(f"{located(origins.place(key.split('.')), key)}: {shorten(sentence)}")


def _environments(config: RunConfig, origins: Origins, sizes: Sizes, model: Path | None) -> None:
    """Build every environment in another process: a third party's code may do anything, or never come back."""
    runner: Any = config.section("runner")
    asked = {
        "environments": [environment.model_dump(mode="json") for environment in config.environments],
        "seed": config.run.seed,
        "initial_model": str(model) if model else None,
        "context_tokens": sizes.max_context_tokens,
        "demonstrations": config.sft.enabled and model is None,
        "renderer": runner.renderer.model_dump(mode="json"),
    }
    imported = [e.path for e in config.environments if isinstance(e, ImportedConfig)]
    imported += [e.entry_point for e in config.environments if isinstance(e, EntryPointConfig)]
    what = f"{origins.located('environments')}: {', '.join(imported) or 'the built-in ones'}"
    found = _ask("slipstream.launcher.environment_probe", asked, what, _pairs)
    for name, sentence in found:
        if name == SECTION:
            raise ConfigError(f"{located(origins.place(name.split('.')), name)}: {shorten(sentence)}")
        index = next((str(i) for i, e in enumerate(config.environments) if e.name == name), name)
        where = located(origins.place(["environments", index]), f"environments.{name}")
        raise ConfigError(f"{where}: {shorten(sentence)}")


def _pairs(answer: Any) -> list[tuple[str, str]]:
    """What a probe found wrong: where, and a sentence."""
    return [(str(where), str(sentence)) for where, sentence in answer]


def _ask(module: str, asked: dict[str, Any], what: str, read: Callable[[Any], T]) -> T:
    """Run a probe, and return what it found. Raises `ConfigError`, which begins with `what`, where it does not end."""
    command = guarded([sys.executable, "-m", module])  # their code may start processes, which end with it
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        printed, complained = process.communicate(json.dumps(asked), timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{what} cannot be built within {PROBE_TIMEOUT_S:.0f} s") from None
    finally:
        if process.poll() is None:
            process.send_signal(END_NOW)
            process.send_signal(signal.SIGCONT)  # their code may have stopped it
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=PROBE_END_TIMEOUT_S)
    try:
        return read(json.loads(printed.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        last = (complained.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"{what} end the process that builds them, exit code {process.returncode}: {last}") from None


def shorten(sentence: str, limit: int = 400) -> str:
    """User code can say a lot."""
    return sentence if len(sentence) <= limit else f"{sentence[:limit]}…"
