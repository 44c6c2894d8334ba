"""What training starts from: a random start and its warm-up, or a model directory. Runs on the torch thread.

Imports torch inside its functions: they are called on that thread.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from slipstream.common.config import ConfigError
from slipstream.models.base import Model, Sizes
from slipstream.models.registry import find_architecture, load_sizes
from slipstream.trainer.config import TrainerConfig
from slipstream.trainer.model_dir import move_into_place, sizes_at_start
from slipstream.trainer.room import Stopped, write_when_room
from slipstream.trainer.status import Status
from slipstream.trainer.timeline import Timeline

if TYPE_CHECKING:
    from slipstream.trainer.parallel.world import World
    from slipstream.trainer.sft import SftProgress
    from slipstream.trainer.step import Learner

STARTED = "started"
"""What rank 0 leaves on the board once it has the model that step 1 trains, or knows of a checkpoint."""
MADE, RESUMED = "made", "resumed"


def start(config: TrainerConfig, status: Status, resumed: bool = False) -> tuple[Learner, dict[str, float]]:
    """The learner that step 1 trains and figures of the warm-up; `prepare_model_dir` has been called.

    `resumed`: its weights come from a checkpoint, and the model directory has those of step 0 already. Rank 0 knows,
    and tells the others.
    """
    from slipstream.trainer.parallel.meeting import meet

    def on_progress(progress: SftProgress) -> None:
        if status.stop.is_set():
            raise Stopped(f"stopped at step {progress.step} of the warm-up")
        status.activity, status.fraction_done = "sft", progress.fraction_done
        status.metrics = sft_figures(progress)

    check_model(config, sizes_at_start(config))
    world, figures = meet(config.group, config.parallel, config.compute), {}
    sizes, model = sizes_at_start(config), None
    if world.rank:
        resumed = _await_start(world, status) == RESUMED
    elif not resumed:
        model, figures = make_model(config, on_progress, status)
    elif world.alone:
        model = find_architecture(sizes.architecture).build_model(sizes)
    if world.rank == 0 and not world.alone:
        world.board.put(STARTED, RESUMED if resumed else MADE)
    learner = _learner(config, world, model, sizes, status, resumed)
    return learner, figures


def _learner(
    config: TrainerConfig, world: World, model: Model | None, sizes: Sizes, status: Status, resumed: bool
) -> Learner:
    """Of the weights that rank 0 has; of none where a checkpoint has them, of which each rank loads its part next."""
    from slipstream.trainer.compute import passes_of
    from slipstream.trainer.frozen import FrozenModels
    from slipstream.trainer.parallel.filling import without_weights
    from slipstream.trainer.step import Learner

    source: Any = model and extended(config, model)
    tree: Any = source
    if world.alone:
        tree.to(world.device)
    else:  # no rank has room for all of it where it computes
        tree = extended(config, without_weights(sizes))
    status.parameter_count = sum(parameter.numel() for parameter in tree.parameters())
    passes = passes_of(config.compute)
    learner = Learner(tree, config.optim, config.loss, FrozenModels.load(config), world, config.parallel, passes)
    if not world.alone and not resumed:
        with world.watching():
            learner.fill(source)
    return learner


def extended(config: TrainerConfig, model: Model) -> Model:
    """With what FP8 and adapters change about it."""
    from slipstream.models.fp8.modules import convert
    from slipstream.models.lora.adapters import attach

    if config.fp8 is not None:
        convert(model, config.fp8)
    if config.lora is not None:
        attach(model, config.lora, config.seed)
    return model


def check_model(config: TrainerConfig, sizes: Sizes) -> None:
    """Raise `ConfigError` for a setting that a model of these sizes does not allow, before there is one."""
    from slipstream.trainer.model_probe import problems

    try:
        config.parallel.layout(config.group.rank_count).check_sizes(sizes)
    except ValueError as error:
        raise ConfigError(f"trainer.parallel.{error}") from None
    for key, sentence in problems(sizes, config.lora, config.fp8, config.optim.groups):
        raise ConfigError(f"{key}: {sentence}")


def _await_start(world: World, status: Status) -> str:
    """Return once rank 0 has what step 1 starts from: what it says of it."""
    said = world.board.wait_for(STARTED, status.stop.is_set)
    if said is None:
        raise Stopped("stopped while rank 0 made the model")
    return said


def make_model(
    config: TrainerConfig, on_progress: Callable[[SftProgress], None], status: Status
) -> tuple[Model, dict[str, float]]:
    """Load or warm up the model, write its weights to the model directory unless told otherwise.

    Returns it with its figures.
    """
    from slipstream.models.checkpoint import load_model, save_model

    figures: dict[str, float] = {}
    sizes = load_sizes(config.model_dir)
    if config.initial_model is not None:
        model = load_model(sizes, config.initial_model)
    else:
        architecture = find_architecture(sizes.architecture)
        with _birthplace(config):
            model = architecture.build_model(sizes)
        architecture.init_weights(model, config.seed)
        if config.sft.enabled:
            figures = _warm_up(model, config, on_progress)
    if not config.save_weights:
        return model, figures
    scratch = config.model_dir / ".new"

    def save() -> None:
        save_model(model, scratch)
        move_into_place(scratch, config.model_dir)

    write_when_room(save, status)
    return model, figures


def _birthplace(config: TrainerConfig) -> AbstractContextManager[object]:
    """Where a random start is drawn: a large one on its card at once, which a CPU would be at for minutes.

    Warm-ups compute on the CPU, and of several ranks none has room for all of it on its card.
    """
    if config.compute.device == "cpu" or config.sft.enabled or config.group.rank_count > 1:
        return nullcontext()
    from slipstream.trainer.compute import device_of

    return device_of(config.compute, config.group.place)


def sft_figures(progress: SftProgress) -> dict[str, float]:
    """By the names used in reports."""
    return {"sft_step": float(progress.step), "sft_loss": progress.loss, "sft_accuracy": progress.accuracy}


def _warm_up(model: Model, config: TrainerConfig, on_progress: Callable[[SftProgress], None]) -> dict[str, float]:
    from slipstream.environments.demonstrations import Demonstrations
    from slipstream.trainer.sft import warm_up

    timeline = Timeline(config.timeline_file, config.timeline_limit_bytes)
    with timeline.interval("sft"):
        demonstrations = Demonstrations(config.environments, config.model_dir, config.seed)
        return sft_figures(warm_up(model, config.sft, demonstrations, on_progress))
