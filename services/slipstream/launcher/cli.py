"""The `slipstream` command.

slipstream rl @ examples/demo.toml --run.seed 1
"""

from __future__ import annotations

import difflib
import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from slipstream.common.config import ConfigError, dump_toml, parse_arguments
from slipstream.common.config_errors import suggest
from slipstream.common.config_files import load_with_origins, read_toml
from slipstream.common.config_help import help_text
from slipstream.common.errors import DiskFull
from slipstream.common.exits import FAILED, REFUSED, end
from slipstream.common.extras import CONVERT_MODULES, RUN_MODULES, explain, explain_import, missing_modules
from slipstream.launcher.errors import LauncherError
from slipstream.launcher.rundir import find_run, find_services_run, newest_running, shown

if TYPE_CHECKING:
    from slipstream.launcher.config import RunConfig

USAGE = """\
usage: slipstream COMMAND

  rl @ FILE.toml [--section.field=VALUE]...   run everything: warm-up, evaluation, reinforcement learning, report
  rl --resume RUN                             go on with a run that was stopped or killed, from its last checkpoint
  rl --replay-rollouts RUN [--section.field=VALUE]...
                                              train once more what a run has stored, by the trainer alone
  up @ FILE.toml [--section.field=VALUE]...   the same, but stay up after the end, until stopped
  sft @ FILE.toml [--section.field=VALUE]...  fine-tune on the conversations of [data], or without that section do the
                                              supervised warm-up alone; leaves runs/NAME/model
  sft --resume RUN [--section.field=VALUE]... go on with a fine-tuning that was stopped or killed
  eval RUN | @ FILE.toml --model DIR          ask held-out problems of a run that is up, or of weights; --help
  status [RUN]                                show each service of a run, its version and its load
  stop [RUN]                                  end a run and wait until nothing of it is left
  report [RUN]                                make report.json and report.html of a run again
  plot [RUN]... [--metric NAME]... [--follow] draw rewards, lag, speed, mismatch and phases in the terminal; of several
                                              runs in one chart, also what eval found; --help
  rollouts [RUN] [--show ROLLOUT] [--json]    list, filter and read what was generated; --help names the filters
  trace [RUN] [--rollout ROLLOUT]             write trace.json of a run, for ui.perfetto.dev or chrome://tracing
  doctor [@ FILE.toml]...                     check whether this machine can carry a run
  prepare [--certs] @ FILE.toml...            make a run directory for processes that are started elsewhere
  certs [DIR] [--host NAME]... [--days N]     make certificates for mutual TLS between all services
  problems DATASET FILE.jsonl [--count N]...  write problems of reasoning-gym with their answers, for sft
  environments [--json]                       list the environments that a configuration can name
  convert SOURCE TARGET [--dtype D]           write a model directory: from another one, a GGUF file or a package
  --version                                   print the version

RUN is a name in runs/ or a path; without it, the newest run is meant. `rl`, `up` and `sft` also take
--dry-run, which prints the resolved configuration, and --help, which explains every field.
"""

OF_A_RUN = "RUN is a name in runs/ or a path; without it, the newest run is meant."
SHORT_USAGE = {
    "status": f"usage: slipstream status [RUN]\n\nShow each service of a run, its version and its load.\n{OF_A_RUN}",
    "stop": "usage: slipstream stop [RUN]\n\nEnd a run and wait until nothing of it is left.\n"
    "RUN is a name in runs/ or a path; without it, the newest run that is up is meant.",
    "report": f"usage: slipstream report [RUN]\n\nMake report.json and report.html of a run again.\n{OF_A_RUN}",
}

RESUMES = "slipstream {} --resume RUN goes on with a run that was stopped or killed, from its last checkpoint."
REPLAYS = "slipstream rl --replay-rollouts RUN trains once more what a run has stored, by the trainer alone."
ALSO = {
    "slipstream rl": f"{RESUMES.format('rl')}\n{REPLAYS}",
    "slipstream up": RESUMES.format("up"),
    "slipstream sft": "This is of the supervised warm-up. Fine-tuning on conversations has sections of its own:\n"
    "--help data, --help start and --help training show them; slipstream sft --resume RUN goes on with it.",
    "slipstream prepare": "--certs makes certificates for mutual TLS, too, for the hosts of the endpoints.",
}
"""What a command takes beside a configuration."""

DEMOS = {"slipstream prepare": "--certs @ examples/demo.toml @ deploy/compose.toml"}
"""What starts the demo, where that is not one file."""

RUN_SERVICES = ("rl", "up", "sft", "eval")
"""Commands that take all that services do; the others read and prepare, which takes the extra `launcher`."""

MEANT = {
    **dict.fromkeys(("run", "train", "start", "launch"), "rl"),
    **dict.fromkeys(("list", "ls", "ps", "runs"), "status"),
    **dict.fromkeys(("kill", "down", "end"), "stop"),
    **dict.fromkeys(("evaluate", "benchmark"), "eval"),
    **dict.fromkeys(("finetune", "fine-tune"), "sft"),
    "resume": "rl --resume",
    "replay": "rl --replay-rollouts",
    "serve": "up",
    **dict.fromkeys(("watch", "dashboard", "ui", "tail"), "plot --follow"),
    **dict.fromkeys(("config", "validate", "check"), "rl --dry-run"),
    **dict.fromkeys(("version", "-v", "-V"), "--version"),
}
"""Commands by the names that other programs have for them."""

ASKED = "a run that is up answers programs (clients/python/README.md) and, with gateway.enabled, OpenAI clients"
INSTEAD = {
    **dict.fromkeys(("chat", "ask", "generate", "sample", "infer", "inference"), ASKED),
    **dict.fromkeys(("logs", "log"), "a run's logs are in runs/NAME/logs, one a service"),
    **dict.fromkeys(
        ("pause", "continue"), "pause_run and resume_run of slipstream_client do it (clients/python/README.md)"
    ),
    **dict.fromkeys(
        ("export", "merge"),
        "a run leaves runs/NAME/checkpoints/final in Hugging Face's form; `convert` changes its dtype",
    ),
}
"""What does what other programs have a command for."""


NO_NAMES = frozenset({errno.ENAMETOOLONG, errno.ELOOP})
"""What is told of a path that can name nothing, whoever asks first whether it is there."""
CLOSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EISDIR})
"""What is told of a file that is there, or may be made, for others alone."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; exits with 2 and one line when it cannot be understood."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what cannot show a character shows another
    if not sys.flags.safe_path and "" not in sys.path:
        sys.path.append("")  # a third party's modules are found, and hide none of those that are installed
    if len(arguments) > 1 and arguments[0] == "help":
        arguments = [arguments[1], "--help", *arguments[2:]]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        sys.exit(0 if arguments else REFUSED)
    command, rest = arguments[0], arguments[1:]
    if command in SHORT_USAGE and {"-h", "--help"} & set(rest):
        print(SHORT_USAGE[command])
        sys.exit(0)
    run_command = COMMANDS.get(command)
    if run_command is None:
        known = [name for name in COMMANDS if name[0] != "-"]
        flags = command.startswith("-")
        meant = [MEANT[command]] if command in MEANT else []
        if command in INSTEAD:
            end(REFUSED, f"unknown command {command!r}; {INSTEAD[command]}")
        near = meant or difflib.get_close_matches(command, ["--help", "--version"] if flags else known, n=1)
        end(REFUSED, f"unknown command {command!r}{suggest(near) or '; one of ' + ', '.join(known)}")
    try:
        sys.exit(run_command(rest))
    except (ConfigError, LauncherError) as error:
        end(REFUSED, str(error))
    except BrokenPipeError:  # `slipstream rl --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        closed = error.errno in CLOSED and error.filename is not None and command not in RUN_SERVICES
        if error.errno not in NO_NAMES and not closed:
            raise
        end(REFUSED, f"{error.filename}: {(error.strerror or '').lower()}")
    except DiskFull as error:
        end(FAILED, error.message)
    except ModuleNotFoundError as error:
        extra = "demo" if command in RUN_SERVICES else "launcher"
        end(REFUSED, explain_import(f"slipstream {command}", error, extra))


# What a command needs is imported when it runs, so that `slipstream status` does not wait for the rest.


def _rl(arguments: list[str], *, stay_up: bool = False) -> int:
    if "--replay-rollouts" in arguments:
        return _replay(arguments)
    resumed = None
    if "--resume" in arguments:
        from slipstream.launcher.resume import find_resumable

        resumed = find_resumable(arguments)
        here = resumed.run.path.absolute().parent  # its configuration says where it began, which may be no place now
        arguments = ["@", str(resumed.run.config_file), f"--run.directory={here}"]
    program = "slipstream up" if stay_up else "slipstream rl"
    for file in parse_arguments(arguments).files:
        if "data" in read_toml(file):
            raise ConfigError(f"{file}: has [data], so it is for fine-tuning: slipstream sft @ {file}, not {program}")
    config = load(arguments, program)
    if config is None:
        return 0
    from slipstream.launcher.rl import run_rl

    return run_rl(config, stay_up=stay_up, resumed=resumed)


def _replay(arguments: list[str]) -> int:
    from slipstream.launcher.replay import recorded_run, replay

    recorded, arguments = recorded_run(arguments)
    config = load(arguments, "slipstream rl")
    own_start = any(override.startswith("trainer.initial_model") for override in parse_arguments(arguments).overrides)
    return 0 if config is None else replay(config, recorded, own_start=own_start)


def _up(arguments: list[str]) -> int:
    return _rl(arguments, stay_up=True)


def _sft(arguments: list[str]) -> int:
    from slipstream.launcher.chat import asked_for, sft_on_chat

    if asked_for(arguments):
        return sft_on_chat(arguments)
    config = load(arguments, "slipstream sft")
    if config is None:
        return 0
    from slipstream.launcher.sft import run_sft

    return run_sft(config)


def _status(arguments: list[str]) -> int:
    import asyncio

    from slipstream.launcher.metrics_records import read_json_lines, was_prepared
    from slipstream.launcher.rundir import launcher_pid
    from slipstream.launcher.status import ended_run, print_status, read_status, refusal, standing

    run = find_services_run(_reference("status", arguments))
    up = launcher_pid(run) is not None
    rows = asyncio.run(read_status(run)) if up or was_prepared(read_json_lines(run.events_file)) else []
    if not up and all(row.health == "away" for row in rows):
        finished, sentence = ended_run(run)
        print(sentence)
        return 0 if finished else 1
    stopping, sentence = standing(run)
    if stopping:
        for row in rows:
            row.health = row.health.replace("away", "ended")
    print_status(run, rows)
    if sentence:
        print(sentence)
    if sentence := refusal(run, rows):
        raise LauncherError(sentence)
    return 0 if all(row.health != "away" for row in rows) else 1


def _stop(arguments: list[str]) -> int:
    from slipstream.launcher.stop import stop_run

    reference = _reference("stop", arguments)
    run = newest_running() if reference is None else find_run(reference)
    if run is None:
        print("no run is up")
        return 0
    return stop_run(run)


def _report(arguments: list[str]) -> int:
    from slipstream.launcher.report import write_report

    print(shown(write_report(find_services_run(_reference("report", arguments)))))
    return 0


def _doctor(arguments: list[str]) -> int:
    from slipstream.launcher.doctor import run_doctor

    return run_doctor(arguments)


def _plot(arguments: list[str]) -> int:
    from slipstream.launcher.plot import plot

    return plot(arguments)


def _eval(arguments: list[str]) -> int:
    from slipstream.launcher.evaluate import evaluate

    return evaluate(arguments)


def _rollouts(arguments: list[str]) -> int:
    from slipstream.launcher.rollouts import USAGE, rollouts

    if {"-h", "--help"} & set(arguments):
        print(USAGE, end="")
        return 0
    return rollouts(arguments)


def _trace(arguments: list[str]) -> int:
    from slipstream.launcher.trace import USAGE, trace

    if {"-h", "--help"} & set(arguments):
        print(USAGE, end="")
        return 0
    return trace(arguments)


def _prepare(arguments: list[str]) -> int:
    from slipstream.launcher.prepare import run_prepare

    return run_prepare(arguments)


def _certs(arguments: list[str]) -> int:
    from slipstream.launcher.certs import run_certs

    return run_certs(arguments)


def _convert(arguments: list[str]) -> int:
    import subprocess

    if missing := missing_modules(CONVERT_MODULES):
        raise LauncherError(explain("slipstream convert", missing, "convert"))
    # A process of its own: the launcher does not import torch.
    return subprocess.run([sys.executable, "-m", "slipstream.models.convert", *arguments], check=False).returncode


def _problems(arguments: list[str]) -> int:
    from slipstream.environments.problems import run

    return run(arguments)


def _environments(arguments: list[str]) -> int:
    from slipstream.environments.listing import run

    return run(arguments)


def _version(arguments: list[str]) -> int:
    from importlib.metadata import PackageNotFoundError, version

    try:
        print(f"slipstream {version('slipstream')}")
    except PackageNotFoundError:
        print("slipstream (not installed)")
    return 0


def load(
    arguments: Sequence[str],
    program: str,
    config_class: type[RunConfig] | None = None,
    modules: Sequence[str] = RUN_MODULES,
    *,
    workers_here: bool = True,
) -> RunConfig | None:
    """The configuration of a run, or None when it was only to be shown or explained. `modules` must be installed."""
    from slipstream.launcher.config import RUN_CONFIG
    from slipstream.launcher.resolve import check

    config_class = config_class or RUN_CONFIG
    given = parse_arguments(arguments)
    if given.help is not None:
        print(help_text(config_class, program, given.help, "" if given.help else ALSO.get(program, "")))
        return None
    if not given.files and not given.overrides:
        demo = DEMOS.get(program, "@ examples/demo.toml")
        raise ConfigError(f"no configuration is given; for the demo: {program} {demo}")
    config, origins = load_with_origins(config_class, given.files, given.overrides)
    check(config, origins)
    missing = missing_modules(modules)
    if missing and not given.dry_run:
        raise LauncherError(explain(program, missing))
    if missing:
        print(f"note: what the configuration names was not looked at; {explain('that', missing)}", file=sys.stderr)
    else:
        from slipstream.launcher.preflight import preflight

        preflight(config, origins, workers_here=workers_here)
    if given.dry_run:
        print(dump_toml(config), end="")
        return None
    return config


def _reference(command: str, arguments: list[str]) -> str | None:
    odd = [argument for argument in arguments if argument.startswith("-")] or arguments[1:]
    if odd:
        raise ConfigError(f"{odd[0]!r} is not understood; {SHORT_USAGE[command].splitlines()[0]}")
    return arguments[0] if arguments else None


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "rl": _rl,
    "up": _up,
    "sft": _sft,
    "status": _status,
    "stop": _stop,
    "report": _report,
    "plot": _plot,
    "rollouts": _rollouts,
    "trace": _trace,
    "eval": _eval,
    "doctor": _doctor,
    "prepare": _prepare,
    "certs": _certs,
    "convert": _convert,
    "problems": _problems,
    "environments": _environments,
    "--version": _version,
}
