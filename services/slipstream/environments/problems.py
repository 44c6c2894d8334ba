"""`slipstream problems`: problems of reasoning-gym with their answers, as conversations for `slipstream sft`.

    slipstream problems chain_sum sums.jsonl --count 1000 --options '{"max_terms": 3}'

Each line is `{"messages": [{"role": "user", ...}, {"role": "assistant", ...}]}`; no question comes twice.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slipstream.common.config import ConfigError
from slipstream.common.disk import make_directory, replace_file
from slipstream.environments.reasoning_gym import open_problems

MAX_TRIES_A_ROW = 20


def conversations(problems: Any, count: int, before: str, after: str) -> Iterator[dict[str, Any]]:
    """As many with an answer as asked for, or as there are."""
    seen: set[str] = set()
    for number in range(len(problems)):
        problem = problems[number]
        if len(seen) == count:
            return
        if problem["answer"] is None or problem["question"] in seen:
            continue
        seen.add(problem["question"])
        asked = f"{before}{problem['question']}{after}"
        yield {
            "messages": [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": str(problem["answer"])},
            ]
        }


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return found


def run(arguments: Sequence[str]) -> int:
    """The command. Raises `ConfigError`."""
    parser = argparse.ArgumentParser("slipstream problems", description="Write problems as conversations.")
    parser.add_argument("dataset", help="one of reasoning-gym's")
    parser.add_argument("file", type=Path, help="the JSONL file to write")
    parser.add_argument("--count", type=int, default=1000, help="rows (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the problems (default: %(default)s)")
    parser.add_argument("--options", type=_json_object, default={}, help="of the data set, as JSON")
    parser.add_argument("--before", default="", help="text before each question")
    parser.add_argument("--after", default="", help="text after each question")
    given = parser.parse_args(arguments)
    if given.count < 1:
        raise ConfigError(f"--count {given.count}: must be 1 or more")
    problems = open_problems(given.dataset, given.options, given.seed, given.count * MAX_TRIES_A_ROW, given.dataset)
    found = conversations(problems, given.count, given.before, given.after)
    rows = [json.dumps(row, ensure_ascii=False) for row in found]
    if not rows:
        raise ConfigError(f"{given.dataset} has no problems with answers")
    make_directory(given.file.absolute().parent)
    replace_file(given.file, "".join(f"{row}\n" for row in rows).encode())
    print(f"{given.file}: {len(rows)} conversations")
    return 0
