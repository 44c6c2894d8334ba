"""`slipstream eval`: how well a checkpoint, or a run that is up, answers held-out problems."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.common.config import ConfigError, parse_arguments
from slipstream.common.config_files import load_with_origins
from slipstream.common.extras import RUN_MODULES, explain, missing_modules
from slipstream.common.version import PolicyVersion
from slipstream.launcher.config import RUN_CONFIG, RunConfig
from slipstream.launcher.errors import LauncherError, RunFailedError
from slipstream.launcher.evaluate_results import (
    EnvironmentAnswers,
    print_method,
    print_result,
    result_of,
    write_result,
)
from slipstream.launcher.options import take
from slipstream.launcher.rundir import RunDir, find_services_run, launcher_pid, shown
from slipstream.launcher.sentences import one_line
from slipstream.launcher.services import service_command
from slipstream.orchestrator.evaluation_config import EvaluationConfig

USAGE = """\
usage: slipstream eval RUN [OPTION]...
       slipstream eval @ FILE.toml... --model DIR [OPTION]... [--section.field=VALUE]...

Ask held-out problems: of a run that is up, through its API and beside its training; else of the weights that RUN ended
with, or came to, or of DIR, a model directory in Hugging Face's form. For those it starts the engines, no trainer, and
ends them.

  --model DIR            these weights
  --checkpoint STEP      those of a checkpoint of RUN in the middle: a step, a version such as 1.20, or newest
  --environment NAME     this environment, as configured; may be repeated. All of them unless told
  --problems N           the first N held-out problems of each; as many as configured unless told
  --samples K            answers to each problem; more than one give pass@k. 1 unless told
  --temperature T        of their sampling. Greedy for one answer, the environment's own for more, unless told
  --seed N               of the sampling; the same seed asks the same way. 0 unless told
  --parallel N           problems at once, of a run that is up. 8 unless told
  --json                 print the result for programs, and nothing else

The result is in evaluation.json and evaluation.html: of a run that is up in RUN/evaluations/N/, else in a run
directory of its own.
"""
PROGRAM = "slipstream eval"
NEWEST = "newest"
"""Of the checkpoints."""


@dataclass
class Options:
    """The command line."""

    run: str | None = None
    model: Path | None = None
    checkpoint: str | None = None
    environments: list[str] = field(default_factory=list[str])
    problems: int | None = None
    samples: int = 1
    temperature: float | None = None
    seed: int = 0
    parallel: int = 8
    json: bool = False
    rest: list[str] = field(default_factory=list[str])
    """What says which configuration: files, and fields of it."""


def evaluate(arguments: Sequence[str]) -> int:
    """Run the command. Raises `ConfigError` or `LauncherError` for what it cannot make sense of."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE, end="")
        return 0
    options = parse(arguments)
    run = None
    if options.run is not None:
        if options.rest:
            raise ConfigError(f"{options.rest[0]!r} beside a run: it has its own configuration")
        run = find_services_run(options.run)
    elif not options.rest:
        raise ConfigError(f"which run, or which configuration? {PROGRAM} --help tells")
    if options.checkpoint is not None and (run is None or options.model is not None):
        raise ConfigError(f"--checkpoint takes a run, and no --model: {PROGRAM} RUN --checkpoint STEP")
    missing = missing_modules(RUN_MODULES)
    if missing:
        raise LauncherError(explain(PROGRAM, missing))
    asks_weights = options.model is not None or options.checkpoint is not None
    if run is not None and not asks_weights and launcher_pid(run) is not None:
        return _of_running(run, options)
    return _of_weights(run, options)


def _of_running(run: RunDir, options: Options) -> int:
    from slipstream.launcher.evaluate_run import MAX_SAMPLES, Asking, evaluate_run

    if options.samples > MAX_SAMPLES:
        raise ConfigError(f"--samples {options.samples}: a run that is up gives {MAX_SAMPLES} at most")
    config, _ = load_with_origins(RUN_CONFIG, [run.config_file], [])
    counts = counts_of(config, options)
    asking = Asking(options.samples, options.temperature, options.seed, options.parallel)
    asked = [(each, counts[each.name]) for each in config.environments if counts.get(each.name)]
    say = _teller(options)
    say(f"asking {run.name}, which goes on")
    told_s = time.monotonic()

    def on_progress(done: int, of: int) -> None:
        nonlocal told_s
        if time.monotonic() - told_s > 5.0 or done == of:
            told_s = time.monotonic()
            say(f"{done} of {of} problems are answered")

    answers = asyncio.run(evaluate_run(run, asked, asking, on_progress))
    directory = _next_directory(run.path / "evaluations")
    return _conclude({"of": run.name, "samples": options.samples}, answers, options, directory, config)


def _of_weights(run: RunDir | None, options: Options) -> int:
    from slipstream.launcher.evaluate_checkpoint import Request, answers_of, evaluate_checkpoint

    say = _teller(options)
    model = options.model
    if run is not None and model is None:
        model = weights_of(run, say) if options.checkpoint is None else weights_at(run, options.checkpoint, say)
    config = _configuration(run, options, model)
    counts = counts_of(config, options)
    request = Request(
        config, counts, EvaluationConfig(samples=options.samples, temperature=options.temperature), options.seed
    )
    trainer: Any = config.section("trainer")
    directory, ending = evaluate_checkpoint(request, say)
    if ending.exit_code or ending.stopped:
        how = one_line(ending.sentence or "stopped before the end", shown(directory.path / "launcher.jsonl"))
        print(f"{directory.name} ended: {how}", file=sys.stderr)
        return ending.exit_code
    answers = answers_of(directory, counts, options.samples)
    about = {"of": str(trainer.initial_model), "samples": options.samples}
    return _conclude(about, answers, options, directory.path, config)


def _conclude(
    about: Mapping[str, Any],
    answers: dict[str, EnvironmentAnswers],
    options: Options,
    directory: Path,
    config: RunConfig,
) -> int:
    how = EvaluationConfig(samples=options.samples, temperature=options.temperature)
    for environment in config.environments:
        if environment.name in answers:
            answers[environment.name].temperature = how.temperature_for(environment.temperature)
    result = result_of(about, answers, options.seed)
    if not result["environments"]:
        raise RunFailedError("no problem was answered")
    page = write_result(result, directory)
    if options.json:
        print(json.dumps(result))
    else:
        print_result(result)
        print_method(result)
        print(shown(page.with_suffix(".json")), shown(page))
    return 0


def _teller(options: Options) -> Callable[[str], None]:
    stream = sys.stderr if options.json else sys.stdout
    return lambda text: print(text, file=stream, flush=True)


def weights_of(run: RunDir, say: Callable[[str], None]) -> Path:
    """What a run ended with, or else came to, or else began with, which is then said. Raises `LauncherError`."""
    final, first = run.path / "checkpoints" / "final", run.path / "model"
    if any(final.glob("*.safetensors")):
        return final
    if checkpoints_of(run):
        say(f"{run.name} did not come to its end: this is its newest checkpoint")
        return weights_at(run, NEWEST, say)
    if any(first.glob("*.safetensors")):
        say(f"{run.name} did not come to its end: these are the weights it began with")
        return first
    raise LauncherError(f"{run.name} has left no weights: neither in checkpoints/final nor in model/; give --model DIR")


def checkpoints_of(run: RunDir) -> list[PolicyVersion]:
    """The trainer's, oldest first."""
    from slipstream.trainer.checkpoint_store import CheckpointStore

    return CheckpointStore(run.path / "checkpoints").versions()


def weights_at(run: RunDir, wanted: str, say: Callable[[str], None]) -> Path:
    """Weights of a checkpoint, written as a model directory, which is kept. Raises `LauncherError`."""
    known = {str(version): version for version in checkpoints_of(run)}
    newest = list(known)[-1:] if wanted == NEWEST else []
    found = newest or [name for name, version in known.items() if wanted in (name, str(version.step))]
    if not found:
        there = f"there are those of {', '.join(known)}" if known else "it has none (trainer.checkpoint.interval_steps)"
        raise LauncherError(f"{run.name} has no checkpoint {wanted}; {there}")
    model = run.path / "checkpoints" / "exported" / found[-1]
    say(f"writing checkpoint {found[-1]} as a model directory: {shown(model)}")
    command = service_command("slipstream.trainer.checkpoint_export", run, "trainer")
    here = f"--run-dir={run.path}"  # its configuration says where it was made: it may be a copy, or moved
    done = subprocess.run([*command, here, "--version", found[-1]], check=False, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1].removeprefix("error: ")
        raise LauncherError(f"checkpoint {found[-1]} cannot be taken: {last}")
    return model


def _configuration(run: RunDir | None, options: Options, model: Path | None) -> RunConfig:
    """The configuration, of which nothing trains."""
    from slipstream.launcher.preflight import preflight
    from slipstream.launcher.resolve import check

    given = parse_arguments(options.rest)
    if given.dry_run or given.help is not None:
        raise ConfigError(f"{PROGRAM} has no --dry-run: slipstream rl has")
    files = [run.config_file] if run is not None else given.files
    config, origins = load_with_origins(RUN_CONFIG, files, given.overrides)
    trainer: Any = config.section("trainer")
    model = model or trainer.initial_model
    if model is None:
        raise ConfigError(f"nothing says which weights: {PROGRAM} @ FILE.toml --model DIR")
    # Beside the run, wherever that is by now; its configuration says where it was made.
    directory = run.path.parent if run is not None else config.run.directory
    kept = {name: getattr(trainer, name) for name in ("probe_tokens", "probe_tolerance", "compute", "torch_threads")}
    config = config.model_copy(
        update={
            "run": config.run.model_copy(update={"name": f"{config.run.name[:58]}-eval", "directory": directory}),
            "launcher": config.launcher.model_copy(update={"restart": "never"}),
            "sft": config.sft.model_copy(update={"enabled": False}),
            "teacher": config.section("teacher").model_copy(update={"replicas": 0}),
            "trainer": type(trainer)(**kept, initial_model=model.absolute()),
        }
    )
    check(config, origins)
    preflight(config, origins)
    return config


def counts_of(config: RunConfig, options: Options) -> dict[str, int]:
    """Held-out problems to ask, by environment. Raises `ConfigError`.

    Never more than are configured: how many there are decides, in some environments, which are held out.
    """
    known = {environment.name: environment.evaluation_task_count for environment in config.environments}
    for name in options.environments:
        if name not in known:
            raise ConfigError(f"no environment called {name!r}; there are {', '.join(known)}")
    counts: dict[str, int] = {}
    for name in options.environments or known:
        if options.problems is not None and options.problems > known[name]:
            raise ConfigError(f"--problems {options.problems}: {name} has {known[name]} (evaluation_task_count)")
        counts[name] = known[name] if options.problems is None else options.problems
    if not any(counts.values()):
        raise ConfigError("no problem to ask: every evaluation_task_count is 0")
    return counts


def _next_directory(parent: Path) -> Path:
    number = 1
    while (parent / str(number)).exists():
        number += 1
    return parent / str(number)


def parse(arguments: Sequence[str]) -> Options:
    """Take the command line apart. Raises `ConfigError`."""
    options = Options()

    def as_json() -> None:
        options.json = True

    def name_run(word: str) -> bool:
        free = options.run is None
        options.run = word if free else options.run
        return free

    def of_configuration(argument: str, rest: list[str]) -> bool:
        name, equals, _ = argument.partition("=")
        field = argument.startswith("-") and "." in name
        if not field and not argument.startswith("@"):
            return False
        options.rest.append(argument)
        if rest and (argument == "@" or (field and not equals)):
            options.rest.append(rest.pop(0))
        return True

    values = {name: partial(option, options) for name, option in TAKES.items()}
    take(arguments, PROGRAM, values, {"--json": as_json}, name_run, of_configuration)
    return options


def _integer(attribute: str, least: int, most: int) -> Callable[[Options, str], None]:
    def take(options: Options, value: str) -> None:
        if not value.isdecimal() or not least <= int(value) <= most:
            raise ConfigError(f"--{attribute} takes a number from {least} to {most}, not {value!r}")
        setattr(options, attribute, int(value))

    return take


def _temperature(options: Options, value: str) -> None:
    try:
        options.temperature = float(value)
    except ValueError:
        options.temperature = -1.0
    if not 0 <= options.temperature <= 10:
        raise ConfigError(f"--temperature takes a number from 0 to 10, not {value!r}")


def _model(options: Options, value: str) -> None:
    options.model = Path(value)


def _checkpoint(options: Options, value: str) -> None:
    options.checkpoint = value


TAKES: dict[str, Callable[[Options, str], None]] = {
    "--model": _model,
    "--checkpoint": _checkpoint,
    "--environment": lambda options, value: options.environments.append(value),
    "--problems": _integer("problems", 1, 1_000_000),
    "--samples": _integer("samples", 1, 256),
    "--temperature": _temperature,
    "--seed": _integer("seed", 0, 2**31 - 1),
    "--parallel": _integer("parallel", 1, 256),
}
