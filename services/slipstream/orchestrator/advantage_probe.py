"""Tries advantages of the user's in a process of its own: that code may do anything.

Reads `[orchestrator.advantage]` as JSON on standard input; the last line of standard output is a JSON string that
says what is wrong, empty where nothing is.
"""

from __future__ import annotations

import json
import sys

from pydantic import TypeAdapter

from slipstream.common.config import ConfigError
from slipstream.orchestrator.advantage import build_advantages
from slipstream.orchestrator.advantage_config import AdvantageConfig


def main() -> None:
    sentence = ""
    try:
        build_advantages(TypeAdapter[AdvantageConfig](AdvantageConfig).validate_python(json.load(sys.stdin)))
    except ConfigError as error:
        sentence = str(error).partition(": ")[2]
    print("\n" + json.dumps(sentence), flush=True)


if __name__ == "__main__":
    main()
