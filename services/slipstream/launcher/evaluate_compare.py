"""`slipstream plot --evaluations`: what several evaluations found, beside each other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slipstream.launcher.errors import RunDirError
from slipstream.launcher.evaluate_results import FILE, open_console, print_figures
from slipstream.launcher.metrics_records import is_number
from slipstream.launcher.plot import MOST_RUNS
from slipstream.launcher.rollout_view import printable
from slipstream.launcher.rundir import RunDir, find_run, find_services_run, shown

Result = dict[str, Any]
NUMBERS = (
    *("problems", "unanswered", "failed", "samples", "temperature"),
    *("accuracy", "reward_mean", "tokens_mean", "truncated_fraction"),
)
INTERVALS = ("accuracy_interval", "reward_interval")
"""What is read of each environment's figures, beside `pass_at_k` and `roles`."""


def compare(references: Sequence[str]) -> int:
    """Print all evaluations of these runs, or the newest run's. Raises `RunDirError`."""
    results: dict[str, Result] = {}
    for reference in references or [None]:
        for label, path in evaluations_of(reference):
            results[shown(path) if label in results else label] = read_result(path / FILE)
    if len(results) > MOST_RUNS:
        raise RunDirError(f"{len(results)} evaluations: one chart takes {MOST_RUNS} at most; name them")
    console = open_console()
    environments = dict.fromkeys(name for result in results.values() for name in result["environments"])
    for environment in environments:
        console.print(printable(environment), style="bold", markup=False)
        print_figures(
            console,
            {
                label: result["environments"][environment]
                for label, result in results.items()
                if environment in result["environments"]
            },
            "evaluation",
        )
        console.print()
    return 0


def evaluations_of(reference: str | None, directory: Path = Path("runs")) -> list[tuple[str, Path]]:
    """Labels and directories of a run's evaluations, or the one that is named. Raises `RunDirError`."""
    for path in () if reference is None else (Path(reference), directory / reference):
        if (path / FILE).exists() and not (path / "config.toml").exists():
            path = path.resolve()
            run = path.parent.parent.name if path.parent.name == "evaluations" else path.parent.name
            return [(f"{run}/{path.name}", path)]
    run = find_services_run(None, directory) if reference is None else find_run(reference, directory)
    found = list(_of_run(run))
    if not found:
        raise RunDirError(f"{run.name} has no evaluation; slipstream eval {run.name} makes one")
    return found


def _of_run(run: RunDir) -> Iterator[tuple[str, Path]]:
    if (run.path / FILE).exists():  # a run of `slipstream eval`
        yield run.name, run.path
    files = (run.path / "evaluations").glob(f"*/{FILE}")
    for path in sorted((file.parent for file in files), key=lambda path: (len(path.name), path.name)):
        yield f"{run.name}/{path.name}", path


def read_result(file: Path) -> Result:
    """The evaluation in a file. Raises `RunDirError`."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunDirError(f"{file} cannot be read: {reason}") from None
    found = result.get("environments") if isinstance(result, dict) else None
    if not isinstance(found, dict) or not all(_are_figures(each) for each in found.values()):
        raise RunDirError(f"{file} is no evaluation, or is damaged")
    return result


def _are_figures(found: Any) -> bool:
    """Whether all that is shown is there, of the types that an evaluation writes."""
    return (
        isinstance(found, dict)
        and all(is_number(found.get(name)) for name in NUMBERS)
        and all(_is_interval(found.get(name)) for name in INTERVALS)
        and _are_passes(found.get("pass_at_k"))
        and _are_roles(found.get("roles", {}))
    )


def _is_interval(found: Any) -> bool:
    return isinstance(found, list) and len(found) == 2 and all(map(is_number, found))


def _are_passes(found: Any) -> bool:
    return isinstance(found, dict) and all(
        k.isdecimal() and is_number(float(k)) and is_number(value) for k, value in found.items()
    )


def _are_roles(found: Any) -> bool:
    names = ("answer_count", "accuracy", "reward_mean")
    return isinstance(found, dict) and all(
        isinstance(each, dict) and all(is_number(each.get(name)) for name in names) for each in found.values()
    )
